"""``python ftckpt/elastic/lighthouse.py``: torchft's lighthouse, without torch.

torchft's package imports torch, which takes a second and a half and a lot of memory; the lighthouse
itself is in the extension module. A lighthouse that died must be back fast: every group waits for it.
"""

from __future__ import annotations

import argparse
import importlib.machinery
import importlib.util
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def lighthouse_command(
    python: str, port: int, *, min_replicas: int, join_timeout_ms: int, heartbeat_timeout_ms: int
) -> tuple[str, ...]:
    """How to start one that listens on ``port``."""
    return (
        python,
        "-P",  # run as a file: this folder must not be on its path
        str(Path(__file__).resolve()),
        f"--bind=[::]:{port}",
        f"--min-replicas={min_replicas}",
        f"--join-timeout-ms={join_timeout_ms}",
        f"--heartbeat-timeout-ms={heartbeat_timeout_ms}",
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Serve until killed."""
    parser = argparse.ArgumentParser(description="the lighthouse of a job's quorum")
    parser.add_argument("--bind", required=True, help="address:port to listen on")
    parser.add_argument("--min-replicas", type=int, default=1)
    parser.add_argument("--join-timeout-ms", type=int, default=5000)
    parser.add_argument("--heartbeat-timeout-ms", type=int, default=1000)
    parser.add_argument("--quorum-tick-ms", type=int, default=100)
    args = parser.parse_args(argv)
    server = _extension().LighthouseServer(
        bind=args.bind,
        min_replicas=args.min_replicas,
        join_timeout_ms=args.join_timeout_ms,
        quorum_tick_ms=args.quorum_tick_ms,
        heartbeat_timeout_ms=args.heartbeat_timeout_ms,
    )
    print(f"lighthouse at {server.address()}", flush=True)  # noqa: T201  # a command's output
    threading.Event().wait()


def _extension() -> Any:
    package = importlib.util.find_spec("torchft")
    assert package is not None and package.submodule_search_locations, "torchft is not installed"
    for folder in package.submodule_search_locations:
        for suffix in importlib.machinery.EXTENSION_SUFFIXES:
            path = Path(folder, f"_torchft{suffix}")
            if path.exists():
                spec = importlib.util.spec_from_file_location("torchft._torchft", path)
                assert spec is not None and spec.loader is not None
                module = importlib.util.module_from_spec(spec)
                spec.loader.exec_module(module)
                return module
    raise ImportError("torchft has no extension module")


if __name__ == "__main__":
    main()
