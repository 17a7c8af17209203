"""``kvblend check``: proves a model, or refuses it with the reason."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from blend.check import Proof, prove
from blend.errors import KVBlendError
from blend.hf.load import load
from blend.hf.view import ModelView

__all__ = ["run_check"]


def run_check(name: str, console: Console, dtype: Any = None, rows: int | None = None) -> dict[str, Any]:
    """Loads ``name``, runs every proof, prints a table and returns the figures.

    The result has ``passed``, and ``refused`` with the reason where the model cannot be fused at all.

    Raises:
        ModelNotFound: the name leads to no weights.
    """
    model, _ = load(name, dtype=dtype)
    figures: dict[str, Any] = {
        "model": name,
        "family": model.config.model_type,
        "dtype": str(model.dtype).removeprefix("torch."),
        "proofs": [],
        "refused": None,
    }
    try:
        view = ModelView(model)
        proofs = list(prove(view, rows))
        view.close()
    except KVBlendError as error:
        console.print(f"[red]refused[/]: {error}", highlight=False)
        return {**figures, "passed": False, "refused": str(error)}
    figures["proofs"] = [{**proof._asdict(), "passed": proof.passed} for proof in proofs]
    figures["passed"] = all(proof.passed for proof in proofs)
    console.print(_table(figures, proofs))
    console.print("[green]passed[/]" if figures["passed"] else "[red]failed[/]: use full prefill for this model")
    return figures


def _table(figures: dict[str, Any], proofs: list[Proof]) -> Table:
    title = f"{figures['model']}: {figures['family']}, {figures['dtype']}"
    table = Table("proof", "difference", "limit", "", "of what", title=title)
    for proof in proofs:
        verdict = "[green]ok[/]" if proof.passed else "[red]FAILED[/]"
        table.add_row(proof.name, f"{proof.value:.1e}", f"{proof.limit:.0e}", verdict, proof.note)
    return table
