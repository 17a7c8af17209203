"""One-off conversion of a GGUF file into a bfloat16 folder that transformers loads in a moment."""

import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
from tokenizers import pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GgufConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ..errors import ModelNotFound, UnsupportedModel
from .cache import cache_home, file_sha256, is_complete, model_folder, noted_sha256, publish, staging
from .gguf_header import GGUFHeader, read_header
from .progress import library_bars, spinner

__all__ = ["converted", "write_converted"]

# llama.cpp pre-tokenizers that cut every digit off before the GPT-2 split. transformers knows none of
# them and uses the bare GPT-2 split, which turns "\n\n3" into other tokens than the model was trained on.
DIGIT_SPLITTING = {"codeshell", "command-r", "exaone", "minerva-7b", "refact", "smollm", "starcoder"}
GPT2_SPLITTING = {"default", "exaone4", "gigachat", "gpt-2", "jais", "jina-de", "jina-es", "mpt", "olmo"}
GPT2_SPLITTING |= {"phi-2", "roberta-bpe", "trillion"}


def converted(path: Path, *, progress: bool = True) -> Path:
    """The folder with the converted model of a GGUF file, made now if it is not there yet.

    Raises :class:`ModelNotFound` for a damaged file or a cache folder that cannot be written, and
    :class:`UnsupportedModel` for a file that transformers cannot turn into a model faithfully.
    """
    try:
        known = noted_sha256(path)
    except OSError as error:
        raise ModelNotFound(f"{path} cannot be read: {error.strerror or error}") from error
    if known is not None and is_complete(folder := model_folder(path.stem, known), known):
        return folder
    # The header first: a damaged file is refused at once, not after hashing all of it.
    header = read_header(path)
    with spinner(progress) as show:
        try:
            show(f"checking {path.name}")
            sha256 = file_sha256(path)
            folder = model_folder(path.stem, sha256)
            if not is_complete(folder, sha256):
                with staging() as work:
                    built = work / "model"
                    write_converted(header, built, show)
                    publish(built, folder, sha256)
        except OSError as error:
            raise unwritable(error) from error
    return folder


def unwritable(error: OSError) -> ModelNotFound:
    """The error for a conversion that the disk refused."""
    return ModelNotFound(
        f"the cache folder {cache_home()} cannot be used ({error}); "
        "set KVBLEND_HOME to a writable folder with room for the model"
    )


def write_converted(header: GGUFHeader, target: Path, show: Callable[[str], None]) -> None:
    """De-quantise the file to bfloat16 and save model and tokenizer in ``target``.

    Raises :class:`UnsupportedModel` as :func:`converted` does, and :class:`OSError` when the disk refuses.
    """
    refuse_unreadable(header)
    name = header.path.name
    with library_bars(False):
        try:
            show(f"converting {name}: reading weights (once)")
            model = read_model(header)
            show(f"converting {name}: reading the tokenizer")
            tokenizer = read_tokenizer(header)
        except UnsupportedModel:
            raise
        except Exception as error:  # the readers raise whatever a strange file trips over
            reason = str(error).strip().partition("\n")[0] or type(error).__name__
            raise UnsupportedModel(f"transformers cannot read {header.path}: {reason}") from error
        tokenizer.model_max_length = int(getattr(model.config, "max_position_embeddings", 0)) or 10**30
        show(f"converting {name}: saving")
        target.mkdir()
        model.save_pretrained(target)
        tokenizer.save_pretrained(target)
        # safetensors files come out readable by their owner only, which a shared cache has no use for.
        for weights in target.glob("*.safetensors"):
            shutil.copymode(target / "config.json", weights)


def refuse_unreadable(header: GGUFHeader) -> None:
    """Raise :class:`UnsupportedModel` for what can be known from the header alone."""
    parts = header.metadata.get("split.count", 1)
    if isinstance(parts, int) and parts > 1:
        raise UnsupportedModel(f"{header.path} is one of {parts} parts; join them with `llama-gguf-split --merge`")
    if "tokenizer.ggml.model" not in header.metadata:
        raise UnsupportedModel(f"{header.path} holds no tokenizer, so it is not a language model of its own")


def read_model(header: GGUFHeader) -> PreTrainedModel:
    """The de-quantised model, with the RoPE scaling that transformers leaves out put back."""
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        header.path.parent,
        gguf_file=header.path.name,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
        trust_remote_code=False,
        local_files_only=True,
        output_loading_info=True,
    )
    model, info = cast("tuple[PreTrainedModel, dict[str, Any]]", loaded)
    if info["missing_keys"]:
        names = ", ".join(sorted(info["missing_keys"])[:3])
        raise UnsupportedModel(f"{header.path} lacks weights that its architecture needs: {names}, ...")
    restore_rope_scaling(header, model.config)
    return model


def restore_rope_scaling(header: GGUFHeader, config: PreTrainedConfig) -> None:
    """Write Llama 3 frequency factors back into the config; refuse any other scaling that was lost.

    transformers reads the RoPE base from GGUF but neither ``rope_freqs.weight`` nor ``rope.scaling.*``,
    and a model with the wrong frequencies still talks, only worse.
    """
    factors = header.floats("rope_freqs.weight")
    rope = getattr(config, "rope_parameters", None) or {}
    if factors and max(factors) > 1 and rope.get("rope_type") == "default":
        plain = dict(rope)
        scaled = {
            "rope_type": "llama3",
            "factor": max(factors),
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
        }
        config.rope_parameters = {**plain, **scaled, "original_max_position_embeddings": 8192}
        frequencies, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
        size = 2 * len(factors)
        base = plain["rope_theta"] ** -(torch.arange(0, size, 2, dtype=torch.float64) / size)
        expected = base / torch.tensor(factors, dtype=torch.float64)
        if frequencies.shape == expected.shape and torch.allclose(frequencies.double(), expected, rtol=1e-4):
            return
        raise UnsupportedModel(
            f"{header.path} has RoPE frequency factors of an unknown kind; load the safetensors checkpoint instead"
        )
    kind = header.metadata.get(f"{header.architecture}.rope.scaling.type", "none")
    lost = kind != "none" or any(name.startswith("rope_factors_") for name in header.tensors)
    kinds = [rope] if "rope_type" in rope else [part for part in rope.values() if isinstance(part, dict)]
    if lost and all(part.get("rope_type", "default") == "default" for part in kinds):
        raise UnsupportedModel(
            f"{header.path} declares RoPE scaling ({kind}) that transformers does not read from GGUF; "
            "load the safetensors checkpoint instead"
        )


def read_tokenizer(header: GGUFHeader) -> PreTrainedTokenizerBase:
    """The file's tokenizer, cutting text where llama.cpp and the original checkpoint cut it."""
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
        header.path.parent, gguf_file=header.path.name, trust_remote_code=False, local_files_only=True
    )
    split = header.metadata.get("tokenizer.ggml.pre", "default")
    backend = getattr(tokenizer, "backend_tokenizer", None)
    # A bare ByteLevel is transformers' fallback; anything else is a split that it knows.
    if backend is None or not isinstance(backend.pre_tokenizer, pre_tokenizers.ByteLevel):
        return tokenizer
    if split in DIGIT_SPLITTING:
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    elif split not in GPT2_SPLITTING:
        warnings.warn(
            f"{header.path}: the pre-tokenizer {split!r} is unknown; text is split as for GPT-2, so some "
            "of it may become other tokens than in the original model",
            stacklevel=2,
        )
    return tokenizer
