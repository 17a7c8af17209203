"""The user's cache folder: where it is, and how a finished folder gets into it whole or not at all."""

import contextlib
import hashlib
import json
import os
import re
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from platformdirs import user_cache_path

__all__ = [
    "cache_home",
    "file_sha256",
    "is_complete",
    "model_folder",
    "noted_sha256",
    "publish",
    "sha256_of",
    "staging",
]

# Raised whenever a conversion writes something different from the same file, so that folders
# written by an older kvblend are replaced instead of trusted.
CONVERTER = 1
MARKER = "kvblend.json"
STAGING_PREFIX = ".part-"
STAGING_MAX_AGE_S = 24 * 3600


def cache_home() -> Path:
    """``$KVBLEND_HOME``, or the platform's user cache folder for kvblend."""
    override = os.environ.get("KVBLEND_HOME")
    if override:
        return Path(override).expanduser().absolute()
    return user_cache_path("kvblend", appauthor=False)


def model_folder(name: str, sha256: str) -> Path:
    """Where the model converted from the file with this digest lives, whether or not it exists yet."""
    plain = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip(".-") or "model"
    return cache_home() / "models" / f"{plain}-{sha256[:12]}"


def is_complete(folder: Path, sha256: str) -> bool:
    """Whether ``folder`` holds the finished conversion of the file with this digest."""
    try:
        marker = json.loads((folder / MARKER).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return bool(marker == {"sha256": sha256, "converter": CONVERTER})


@contextlib.contextmanager
def staging() -> Iterator[Path]:
    """A private folder beside the models, removed at the end whatever happens, Ctrl-C included.

    Raises :class:`OSError` when the cache folder cannot be written.
    """
    models = cache_home() / "models"
    models.mkdir(parents=True, exist_ok=True)
    _sweep(models)
    prefix = f"{STAGING_PREFIX}{_host()}-{os.getpid()}-"
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=models))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def publish(built: Path, final: Path, sha256: str) -> None:
    """Move a finished folder to its place in one rename.

    Another process that got there first has converted the same bytes, so its folder is kept.
    Raises :class:`OSError` when the move fails and no finished folder is there.
    """
    marker = {"sha256": sha256, "converter": CONVERTER}
    (built / MARKER).write_text(json.dumps(marker) + "\n", encoding="utf-8")
    if final.exists() and not is_complete(final, sha256):
        with contextlib.suppress(FileNotFoundError):
            os.rename(final, built.with_name(built.name + "-stale"))
    try:
        os.rename(built, final)
    except OSError:
        if not is_complete(final, sha256):
            raise


def sha256_of(path: Path) -> str:
    """The file's sha256 in hex, from its bytes. Raises :class:`OSError` when they cannot be read."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def file_sha256(path: Path) -> str:
    """The file's sha256, noted by path, size and time of change so that it is worked out once.

    Hashing several gigabytes costs more than loading the converted model.
    Raises :class:`OSError` when the file cannot be read.
    """
    known = noted_sha256(path)
    if known is not None:
        return known
    stat = path.stat()
    digest = sha256_of(path)
    entries = _read_digests()
    entries[str(path.absolute())] = [stat.st_size, stat.st_mtime_ns, digest]
    # A cache that cannot be written costs a second hashing, nothing else.
    with contextlib.suppress(OSError):
        _write_digests(entries)
    return digest


def noted_sha256(path: Path) -> str | None:
    """The digest noted when the file was last hashed, or None if it has changed since."""
    stat = path.stat()
    entry = _read_digests().get(str(path.absolute()))
    if isinstance(entry, list) and len(entry) == 3 and entry[:2] == [stat.st_size, stat.st_mtime_ns]:
        return str(entry[2])
    return None


def _digests_file() -> Path:
    return cache_home() / "digests.json"


def _read_digests() -> dict[str, object]:
    try:
        entries = json.loads(_digests_file().read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return entries if isinstance(entries, dict) else {}


def _write_digests(entries: dict[str, object]) -> None:
    target = _digests_file()
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, part = tempfile.mkstemp(prefix=STAGING_PREFIX, dir=target.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(entries, file, indent=1)
        os.replace(part, target)
    except BaseException:
        Path(part).unlink(missing_ok=True)
        raise


def _host() -> str:
    return re.sub(r"[^A-Za-z0-9]+", "", socket.gethostname()) or "host"


def _sweep(models: Path) -> None:
    """Remove what killed processes left behind; a running one's folder is left alone."""
    for folder in models.glob(f"{STAGING_PREFIX}*"):
        try:
            age = time.time() - folder.stat().st_mtime
        except OSError:
            continue
        if age > STAGING_MAX_AGE_S or _owner_is_dead(folder.name):
            shutil.rmtree(folder, ignore_errors=True)


def _owner_is_dead(name: str) -> bool:
    host, _, rest = name.removeprefix(STAGING_PREFIX).partition("-")
    pid = rest.partition("-")[0]
    # A shared home may hold folders of other hosts, whose process ids say nothing here. On Windows
    # os.kill with signal 0 sends a Ctrl-C instead of asking, so there only the age counts.
    if host != _host() or not pid.isdigit() or os.name == "nt":
        return False
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    return False
