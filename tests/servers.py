"""Real servers for the tests of remote stores, each on a free port of this machine."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest
import redis


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class RedisServer:
    """A redis-server process that can be stopped, killed and started again over the same folder."""

    def __init__(self, folder: Path, *options: str) -> None:
        binary = shutil.which("redis-server")
        if binary is None:
            pytest.skip("no redis-server on this machine: apt-get install redis-server")
        self.port = free_port()
        self.password = options[options.index("--requirepass") + 1] if "--requirepass" in options else ""
        self._command = [binary, "--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(folder)]
        self._command += ["--save", "", "--daemonize", "no", *options]
        self.start()

    def __enter__(self) -> RedisServer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    @property
    def url(self) -> str:
        """Address with the password in it."""
        secret = f":{self.password}@" if self.password else ""
        return f"redis://{secret}127.0.0.1:{self.port}/0"

    def client(self) -> Any:
        """A plain client, to look behind the store's back."""
        return redis.Redis(port=self.port, password=self.password or None)

    def start(self) -> None:
        """Starts it and returns when it accepts connections, which it says itself."""
        self.process = subprocess.Popen(self._command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        said = []
        for line in self.process.stdout:
            said.append(line)
            if "Ready to accept connections" in line:
                return
        raise RuntimeError("redis-server did not start:\n" + "".join(said))

    def stop(self, how: int = signal.SIGTERM) -> None:
        """Ends it: SIGTERM as an operator does, SIGKILL as a crash does; SIGSTOP makes it hang. Twice is harmless."""
        self.process.send_signal(how)  # does nothing to a process that has ended
        if how != signal.SIGSTOP:
            self.process.wait()
            assert self.process.stdout is not None
            self.process.stdout.close()


class S3Server:
    """An S3 server in a thread of this process. What it holds outlives a stop."""

    def __init__(self) -> None:
        self.port = free_port()
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Starts it and returns when it listens."""
        from moto.server import ThreadedMotoServer

        self._server = ThreadedMotoServer("127.0.0.1", self.port, verbose=False)
        self._server.start()

    def stop(self) -> None:
        """Stops listening."""
        self._server.stop()
        self._server._server.server_close()  # moto leaves its socket open
