"""What a GPU says of kvblend, in one script: is every attention backend right, and how fast is fusing.

::

    python tests/gpu/run.py --out report        # under 5 minutes on an H200; no network, no weights: random ones do
    python tests/gpu/run.py --small --out small # tiny models on the CPU: does the script itself run

1. Each backend that is installed, in a process of its own (a kernel that crashes takes nothing else with it): the
   AttentionTests on the device, then the proofs of ``kvblend check`` on tiny models with windows, softcap and sinks.
2. Models shaped like Llama 3 8B and Qwen2.5 0.5B: fusing with every row computed again against full prefill, and
   decoding after fusing against decoding after full prefill.
3. Time to first token of full prefill (SDPA, and flash_attention_2 where installed; the faster one counts) and of
   fusing, by rows, ratio and recipe; what cannot be measured within ``--budget`` seconds is listed as skipped.

The tables are written to ``report.md`` and ``report.json`` after every case, so that nothing measured is ever lost.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

# The checkout that this file lies in, installed or not; its neighbours are found by themselves.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import transformers
from found import Found
from lab import RECIPES, Lab, Sizes, Small, compare, full_prefill, fused_case, host_waits, layers_arrive
from suites import CHOICE, FAMILIES, SECONDS, installed, run_choice, run_suite, suite_process, suite_results

from blend.hf.attention import BACKENDS, SETTING


def measure(found: Found, device: torch.device, small: bool) -> None:
    """Everything, in the order of what matters most; ``found`` keeps it."""
    sizes = Small() if small else Sizes()
    found.absent = {name: why for name, why in installed(device).items() if why}
    names = [name for name, why in installed(device).items() if not why]
    limit = min(SECONDS, 0.4 * (found.until - time.monotonic()))
    results = suite_results({name: suite_process(name, device, small) for name in (*names, CHOICE)}, limit)
    found.choice, found.suites = results.pop(CHOICE), results
    found.write()
    sound = [name for name in names if results[name].get("failures") == {}] or ["sdpa"]
    os.environ[SETTING] = sound[0]
    found.case("bringing layers over", 2, partial(layers_arrive, device))
    labs: list[Lab] = []
    for name, config in sizes.models().items():
        lab = found.case(f"building {name}", 10, partial(Lab.of, name, config, device, sizes))
        labs += [lab] if lab else []
    for lab in labs:
        found.case(f"comparing {lab.name}", 15, partial(compare, lab, sizes.rows[0]), found.compared)
        for recipe in RECIPES if device.type == "cuda" else ():
            found.case(f"waits of {lab.name}", 5, partial(host_waits, lab, sizes.rows[0], recipe), found.waits)
    spent = dict.fromkeys((lab.name for lab in labs), 1.0)
    for rows in sizes.rows:
        for lab in labs:
            # A longer prompt than the last one, encoded first.
            needs = 6 * spent[lab.name] * (sizes.repeats + 1)
            full = found.case(f"{lab.name}, {rows} rows, full", needs, partial(full_prefill, lab, rows), found.cases)
            if full is not None:
                spent[lab.name] = full["ttft_s"]
                others = sound[1:] if rows == sizes.rows[1] and lab is labs[0] else []
                fused_cases(found, lab, rows, full["ttft_s"], sound[0], others)


def fused_cases(found: Found, lab: Lab, rows: int, full_s: float, chosen: str, others: Sequence[str]) -> None:
    """Every recipe and ratio with the backend that is chosen; the default one with the others too."""
    cases = [(recipe, ratio, chosen) for recipe in RECIPES for ratio in lab.sizes.ratios]
    cases += [(RECIPES[0], 0.15, other) for other in others]
    for recipe, ratio, backend in cases:
        needs = full_s * (lab.sizes.repeats + 2) + (0 if backend == chosen else 10)  # another one may have to compile
        what = f"{lab.name}, {rows} rows, {recipe} at {ratio}, {backend}"
        found.case(what, needs, partial(fused_case, lab, rows, recipe, ratio, full_s, backend), found.cases)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--out", type=Path, default=Path(os.environ.get("OUT", "gpu-report")), help="folder to write to"
    )
    parser.add_argument("--budget", type=float, default=280.0, help="seconds for everything")
    parser.add_argument("--small", action="store_true", help="tiny models on the CPU")
    parser.add_argument("--device", help="cuda, or cpu with --small")
    parser.add_argument("--suite", choices=sorted([*BACKENDS, CHOICE]), help="one backend's tests alone, as JSON")
    options = parser.parse_args(arguments)
    began = time.monotonic()
    device = torch.device(options.device or ("cpu" if options.small else "cuda"))
    if device.type == "cuda" and not torch.cuda.is_available():
        parser.error("there is no CUDA device here: --small runs tiny models on the CPU")
    if options.suite:
        families = FAMILIES[:1] if options.small else FAMILIES
        print(json.dumps(run_choice(device) if options.suite == CHOICE else run_suite(options.suite, device, families)))
        return 0
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "a CPU"
    machine = {"device": name, "torch": torch.__version__, "transformers": transformers.__version__}
    found = Found(options.out, began + options.budget, machine)
    measure(found, device, options.small)
    found.machine["seconds"] = round(time.monotonic() - began)
    found.write()
    print((found.out / "report.md").read_text())
    wrong = any(result.get("failures") != {} for result in found.suites.values())
    return 1 if wrong or found.errors else 0


if __name__ == "__main__":
    sys.exit(main())
