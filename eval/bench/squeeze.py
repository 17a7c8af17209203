"""A model for prompts beyond its context: the same weights over squeezed positions.

Position interpolation (Chen et al., arXiv:2306.15595) divides positions until the longest prompt lies where the model
was trained. Answers get worse, but the model still attends to what a prompt says; without, it attends to anything, and
a selector that asks it where to look chooses rows that no real prompt would have it choose.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any

from blend.errors import BudgetError

__all__ = ["squeezed"]


def squeezed(model: Any, rows: int) -> Any:
    """A copy of a model of transformers that holds ``rows`` rows; the weights are copied too.

    Raises:
        BudgetError: a rotation that is scaled already, or no rotation.
    """
    config = deepcopy(model.config)
    text: Any = config.get_text_config()
    context, rope = text.max_position_embeddings, getattr(text, "rope_parameters", None)
    if not rope or rope.get("rope_type") != "default":
        kind = rope.get("rope_type", "one per kind of layer") if rope else "none"
        raise BudgetError(
            f"a prompt of {rows} rows is longer than the {context} that the model holds, and its rotation ({kind}) "
            "is not one that can be squeezed: ask for shorter prompts"
        )
    text.rope_parameters = {**rope, "rope_type": "linear", "factor": rows / context}
    text.max_position_embeddings = rows
    wide = type(model)._from_config(config, dtype=model.dtype)
    wide.load_state_dict(model.state_dict())
    return wide.to(model.device).eval()
