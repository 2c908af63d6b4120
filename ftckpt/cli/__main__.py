"""``python -m ftckpt.cli``: the same as ``ftckpt``."""

from __future__ import annotations

import sys

from ftckpt.cli import main

if __name__ == "__main__":
    sys.exit(main())
