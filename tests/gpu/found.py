"""What has been found out so far, as JSON and as Markdown; written anew after every case."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class Found:
    """All that is known so far; written anew after every case."""

    out: Path
    until: float
    machine: dict[str, Any]
    suites: dict[str, dict[str, Any]] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)
    choice: dict[str, Any] = field(default_factory=dict)
    compared: list[dict[str, Any]] = field(default_factory=list)
    cases: list[dict[str, Any]] = field(default_factory=list)
    waits: list[dict[str, Any]] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def case(self, what: str, needs: float, run: Callable[[], Any], into: list[Any] | None = None) -> Any:
        """Runs one case if it fits the time left; keeps its figures, or its error, and writes the report.

        Args:
            needs: seconds, roughly.
            into: where figures are kept.

        Returns:
            What ``run`` returned; None where it did not run, or failed.
        """
        if time.monotonic() + needs > self.until:
            self.skipped.append(what)
            print(f"skipped: {what}", flush=True)
            self.write()
            return None
        try:
            result = run()
        except Exception as error:  # one case that fails must not take the others with it
            self.errors.append(f"{what}: {type(error).__name__}: {str(error)[:300]}")
            print(self.errors[-1], flush=True)
            result = None
        if into is not None and result is not None:
            into.append(result)
            print(f"{what}: {json.dumps(result, default=str)[:200]}", flush=True)
        self.write()
        return result

    def write(self) -> None:
        self.out.mkdir(parents=True, exist_ok=True)
        data = {k: v for k, v in vars(self).items() if k not in ("out", "until")}
        (self.out / "report.json").write_text(json.dumps(data, indent=1, default=str) + "\n")
        (self.out / "report.md").write_text(markdown(self))


def markdown(found: Found) -> str:
    lines = ["# kvblend on " + str(found.machine["device"]), ""]
    lines += [", ".join(f"{k} {v}" for k, v in found.machine.items() if k != "device"), "", "## Backends", ""]
    verdicts = [(name, _verdict(result)) for name, result in found.suites.items()]
    lines += _rows(("backend", "AttentionTests and proofs"), [*verdicts, *found.absent.items()])
    lines += ["", "Where nobody names one: " + json.dumps(found.choice)]
    lines += ["", "## Every row computed again, and decoding", ""]
    heads = ("model", "rows", "K/V off", "logits off", "next logits off", "decode ms/token", "decode ratio")
    keys = ("model", "rows", "kv_off", "logits_off", "next_logits_off", "decode_ms", "decode_ratio")
    lines += _rows(heads, [[_shown(key, case.get(key)) for key in keys] for case in found.compared])
    lines += ["", "## Time to first token", ""]
    keys = ("model", "rows", "method", "ratio", "backend", "ttft_s", "speedup", "ideal", "of_ideal", "peak_gib")
    heads = ("model", "rows", "method", "ratio", "attention", "TTFT s", "speed-up", "ideal", "of ideal", "peak GiB")
    lines += _rows(heads, [[_shown(key, case.get(key)) for key in keys] for case in found.cases])
    lines += ["", "## Where the host waits for the device", ""]
    lines += _rows(
        ("model", "rows", "method", "waits", "places"),
        [[str(case[key]) for key in ("model", "rows", "method", "waits", "places")] for case in found.waits],
    )
    for title, items in (("Skipped for want of time", found.skipped), ("Failed", found.errors)):
        lines += ["", f"## {title}", "", *([f"* {item}" for item in items] or ["nothing"])]
    return "\n".join(lines) + "\n"


def _verdict(result: dict[str, Any]) -> str:
    if "crashed" in result:
        return f"CRASHED: {result['crashed']}".replace("\n", " ")
    wrong = [f"{name} ({why})" for name, why in result["failures"].items()]
    return f"{len(wrong)} failed: {'; '.join(wrong)}" if wrong else "all pass"


def _rows(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    table = [heads, ["---"] * len(heads), *rows]
    return ["| " + " | ".join(cell.replace("|", "/") for cell in row) + " |" for row in table]


def _shown(key: str, value: Any) -> str:
    if value is None:
        return ""
    if key == "of_ideal":
        return f"{value:.0%}"
    digits = {"ttft_s": ".3f", "speedup": ".2f", "ideal": ".2f", "peak_gib": ".1f", "decode_ms": ".1f"}
    if isinstance(value, float) and key != "ratio":
        return format(value, digits.get(key, ".1e" if key.endswith("off") else ".2f"))
    return str(value)
