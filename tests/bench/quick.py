"""A benchmark run as its command, small and once."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def quick(package: str, cases: Sequence[str], folder: Path) -> tuple[dict[str, Any], str]:
    """What it wrote to its file, and what it printed. Nothing else may be left in ``folder``."""
    only = [word for name in cases for word in ("--only", name)]
    out = [f"--json={folder}/out.json", f"--folder={folder}"]
    done = subprocess.run(
        [sys.executable, "-m", package, "--quick", "--mib=8", *only, *out],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(path.name for path in folder.iterdir()) == ["out.json"]
    return json.loads((folder / "out.json").read_text()), done.stdout
