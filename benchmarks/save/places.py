"""Where a case saves to: a folder, or a prefix of a bucket on a loopback server."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Place:
    """``uri`` is a folder's path or ``s3://bucket/prefix``; nothing is there yet. ``environ`` are the
    variables with which S3 clients find the server.
    """

    uri: str
    environ: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_s3(self) -> bool:
        return self.uri.startswith("s3://")

    @property
    def bucket(self) -> str:
        return self.uri.removeprefix("s3://").partition("/")[0]

    @property
    def prefix(self) -> str:
        return self.uri.removeprefix("s3://").partition("/")[2]

    @property
    def endpoint(self) -> str:
        return self.environ["AWS_ENDPOINT_URL"]

    def synced(self) -> None:
        """Make what a peer left in the folder as durable as ours: it syncs nothing, or not all."""
        folder = Path(self.uri)
        for path in (*folder.rglob("*"), folder, folder.parent):
            fd = os.open(path, os.O_RDONLY)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)
