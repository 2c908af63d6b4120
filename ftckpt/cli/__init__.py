"""``ftckpt``: the command line. Thin: it reads arguments, calls the rooms below, and tells."""

from __future__ import annotations

from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0 when it did what was asked, 1 when it could not,
    2 when it was asked wrongly.
    """
    from ftckpt.cli.app import app

    try:
        app(args=None if argv is None else list(argv), prog_name="ftckpt")
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    return 0
