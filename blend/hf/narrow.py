"""One forward pass of the model, narrowed to selected rows by a pre-hook on each decoder layer.

The model's own forward runs unmodified. Where a hook finds a :class:`FusionCache` among a layer's arguments, it lets
the pass decide which rows still run from this layer on, picks these rows out of every argument, and puts the mask
of the narrowed layer in place of the model's::

    layer 0   | all rows, or the chosen ones                           |
    check     | K/V of the running rows -> stop -> choose -> fewer run |
    ...       | chosen rows + question                                 |
    last      | K/V of the running rows -> stop -> only the last row   |

All state sits in the pass, so threads with different selections can share a hooked model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from blend.hf.attention.mask import FusionMask, Observer, Reach
from blend.hf.fusion_cache import Correct, FusionCache, LayerKnown

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

__all__ = ["Check", "NarrowPass", "PassOver", "hook_layers"]

Check = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""Called with (layer, running rows ``[R]``, fresh keys, fresh values ``[1, H, R, D]``); returns the rows that go on."""


class NarrowPass:
    """The plan and the state of one pass over a fusion cache.

    Args:
        owner: whoever hooked the model's layers; only its hooks act.
        cache: K/V of all rows.
        reaches: window or chunk per decoder layer.
        rows_S: rows that run from layer 0 on; None for all.
        checks: layers at which the running rows are chosen anew.
        only_last: in the last layer, compute K/V for all running rows and the rest for the last row alone.
        observer: sees the weights of each narrowed attention.
        correct: shifts K/V of rows that do not run, once per layer and before its attention.
        fusion_masks: hand a :class:`FusionMask` to the layers (else a tensor mask).
        float_masks: tensor masks are additive floats (eager attention) instead of booleans.
    """

    def __init__(
        self,
        owner: object,
        cache: FusionCache,
        reaches: Sequence[Reach],
        *,
        rows_S: Tensor | None,
        checks: Mapping[int, Check] | None = None,
        only_last: bool = True,
        observer: Observer | None = None,
        correct: Correct | None = None,
        fusion_masks: bool = True,
        float_masks: bool = False,
    ) -> None:
        self.owner = owner
        self.cache = cache
        self.reaches = reaches
        self.start_S = rows_S
        self.checks = dict(checks or {})
        # Layers that share another layer's K/V have none of their own to stop behind.
        self.only_last = only_last and len(cache.states) == len(reaches)
        self.observer = observer
        self.correct = correct
        self.fusion_masks = fusion_masks
        self.float_masks = float_masks
        self.ran: list[int] = []  # rows that ran through each layer
        self.projected: list[int] = []  # rows whose K/V were projected in each layer beyond those
        self._rows_S: Tensor | None = None
        self._memo: dict[int, tuple[Any, Any]] = {}
        self._masks: dict[Reach, FusionMask] = {}

    @property
    def narrow_from_start(self) -> bool:
        """No layer runs all rows, so the model need not build its own mask."""
        return self.start_S is not None

    def __enter__(self) -> NarrowPass:
        self.cache.current = self
        if self.correct is not None:
            self.cache.correct_with(self.correct)
        return self

    def __exit__(self, *exc: object) -> None:
        self.cache.reset_pass()

    # --- called by the hook of each decoder layer -------------------------------------------------

    def enter(self, index: int, layer: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Decides the rows of layer ``index`` and returns its narrowed arguments."""
        if index == 0 and self.start_S is not None:
            args, kwargs = self._narrow(args, kwargs, self.start_S)
        else:
            self._follow(args, kwargs)
            args, kwargs = self._pick(args, kwargs, self._rows_S, None)
        projected = 0
        if index in self.checks:
            rows_R = self._running()
            keys, values = self._known(index, layer, args, kwargs)
            chosen = self.checks[index](index, rows_R, keys, values)
            # All fresh K/V of the layer are better than the cached ones, chosen or not.
            self._settle(index, keys, values)
            projected += rows_R.numel()
            args, kwargs = self._narrow(args, kwargs, chosen)
        if self.only_last and index == len(self.reaches) - 1 and self._running().numel() > 1:
            if index not in self.checks:  # else its fresh K/V are in place already
                self._settle(index, *self._known(index, layer, args, kwargs))
            projected += self._running().numel()
            args, kwargs = self._narrow(args, kwargs, self._running()[-1:])
        self.ran.append(self._running().numel())
        self.projected.append(projected)
        if self._rows_S is not None:
            kwargs = {**kwargs, "attention_mask": self._mask(self.reaches[index], kwargs.get("attention_mask"))}
        return args, kwargs

    def _running(self) -> Tensor:
        if self._rows_S is not None:
            return self._rows_S
        return torch.arange(self.cache.rows, device=self.cache.states[0].keys.device)

    def _known(self, index: int, layer: nn.Module, args: Any, kwargs: Any) -> tuple[Tensor, Tensor]:
        """Fresh K/V of the running rows: enters the layer and leaves it before its attention."""
        target = self.cache.states[index]
        target.stop = True
        try:
            layer.forward(*args, **kwargs)
        except LayerKnown as known:
            return known.keys, known.values
        finally:
            target.stop = False
        raise RuntimeError(f"layer {index} never updated its cache")

    def _follow(self, args: Any, kwargs: Any) -> None:
        """Some models drop all rows but the last by themselves (Gemma 4, before layers that share KV): go along."""
        hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        arrived, running = hidden.shape[-2], self._running()
        if arrived < running.numel():
            self._show(running[-arrived:])

    def _settle(self, index: int, keys: Tensor, values: Tensor) -> None:
        self.cache.states[index].scatter(keys, values)
        self.cache.states[index].settled = True

    # --- narrowing --------------------------------------------------------------------------------

    def _narrow(self, args: Any, kwargs: Any, rows_S: Tensor) -> tuple[Any, Any]:
        """Goes on with ``rows_S``, a subset of the running rows."""
        before = self._rows_S
        self._show(rows_S)
        local = rows_S if before is None else torch.searchsorted(before, rows_S)
        return self._pick(args, kwargs, rows_S, (local, self.cache.rows if before is None else before.numel()))

    def _show(self, rows_S: Tensor) -> None:
        self._rows_S = rows_S
        self._memo.clear()
        self._masks.clear()
        self.cache.show_rows(rows_S)

    def _pick(self, args: Any, kwargs: Any, rows_S: Tensor | None, local: tuple[Tensor, int] | None) -> tuple[Any, Any]:
        if rows_S is None:
            return args, kwargs
        pick = _Picker(rows_S, self.cache.rows, local, self._memo)
        return tuple(pick(x) for x in args), {k: v if k == "attention_mask" else pick(v) for k, v in kwargs.items()}

    def _mask(self, reach: Reach, given: Any) -> Any:
        assert self._rows_S is not None
        if not self.fusion_masks:
            return self._tensor_mask(FusionMask(self._rows_S, self.cache.rows, reach), given)
        if reach not in self._masks:
            self._masks[reach] = FusionMask(self._rows_S, self.cache.rows, reach, self.observer)
        return self._masks[reach]

    def _tensor_mask(self, fusion: FusionMask, given: Any) -> Tensor:
        """For attentions that cannot read a fusion mask: the model's own mask, rows picked, or one of ours."""
        if isinstance(given, Tensor) and given.ndim == 4 and given.shape[-2] == self.cache.rows:
            return given[..., fusion.rows_S, :]  # keeps biases that the model folded in (ALiBi)
        seen = fusion.dense()[None, None]
        if not self.float_masks:
            return seen
        dtype = self.cache.states[0].keys.dtype
        return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, torch.finfo(dtype).min)


class PassOver(Exception):
    """Raised by an observer that has seen enough; ends the pass there."""


class _Picker:
    """Picks rows out of one argument: dim -2 of floats, dim -1 of integers, tuples through and through.

    That one rule covers hidden states (3-D, and Gemma 3n's 4-D), cos/sin, complex frequencies, M-RoPE position ids and
    per-layer inputs. A dim counts as rows when it is as long as the prompt, or as the rows that ran before.
    """

    def __init__(
        self, rows_S: Tensor, total: int, local: tuple[Tensor, int] | None, memo: dict[int, tuple[Any, Any]]
    ) -> None:
        self.rows_S, self.total, self.local, self.memo = rows_S, total, local, memo

    def __call__(self, x: Any) -> Any:
        if isinstance(x, Tensor):
            return self._tensor(x)
        if type(x) is tuple:
            # The same cos/sin come to every layer: picked once per set of rows. The memo holds the argument too, so
            # that its id stays taken.
            if id(x) not in self.memo:
                self.memo[id(x)] = (x, tuple(self(item) for item in x))
            return self.memo[id(x)][1]
        return x

    def _tensor(self, x: Tensor) -> Tensor:
        dim = -2 if x.is_floating_point() or x.is_complex() else -1
        if x.ndim < -dim:
            return x
        size = x.shape[dim]
        if self.local is not None and size == self.local[1]:
            return x.index_select(dim, self.local[0])
        if size == self.total:
            return x.index_select(dim, self.rows_S)
        return x


def hook_layers(layers: nn.ModuleList, owner: object) -> list[RemovableHandle]:
    """One pre-hook per decoder layer; only passes of the same ``owner`` are narrowed, all other calls go by untouched.

    Two views of one model each have their hooks, and only one of them may act.
    """
    return [
        layer.register_forward_pre_hook(_hook(index, owner), with_kwargs=True) for index, layer in enumerate(layers)
    ]


def _hook(index: int, owner: object) -> Callable[[nn.Module, Any, Any], tuple[Any, Any] | None]:
    def before(layer: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        for value in (*kwargs.values(), *args):
            if isinstance(value, FusionCache) and value.current is not None and value.current.owner is owner:
                result: tuple[Any, Any] = value.current.enter(index, layer, args, kwargs)
                return result
        return None

    return before
