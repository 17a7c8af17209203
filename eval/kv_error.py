"""How far a fusion's reused KV ends up from full prefill's: one number per cache layer."""

from __future__ import annotations

from blend import Fusion
from eval.inside import kv_deviation, reused_rows

__all__ = ["kv_error"]


def kv_error(fusion: Fusion, full: Fusion) -> tuple[float, ...]:
    """Mean relative distance of keys and values from full prefill's, over the rows whose KV was reused.

    The distance is :func:`~eval.inside.kv_deviation`'s, of keys and values with equal weight. Rows that were computed
    again count too: this is the error after repair. Rows that are exact (those of a prefix, the question) do not.

    Args:
        fusion: what is judged.
        full: the same prompt, prefilled in full.

    Returns:
        One number per cache layer; 0.0 where nothing was reused.

    Raises:
        PromptError: the two are not of the same prompt.
        ForeignKV: they come from models of different shapes.
    """
    keys_LT, values_LT = kv_deviation(fusion, full)
    reused_T = reused_rows(fusion)
    if not reused_T.any():
        return (0.0,) * len(keys_LT)
    error_L = (keys_LT + values_LT)[:, reused_T].mean(1) / 2
    return tuple(error_L.tolist())
