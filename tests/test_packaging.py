"""What a wheel holds."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ("pyproject.toml", "README.md", "LICENSE", "ftckpt", "integrations", "chaos")


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """A copy of what the wheel is made from, links kept as links."""
    tree = tmp_path_factory.mktemp("tree")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(
                ROOT / name, tree / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__")
            )
        else:
            shutil.copy2(ROOT / name, tree / name)
    return tree


@pytest.fixture(scope="module")
def wheel(tree, tmp_path_factory):
    out = tmp_path_factory.mktemp("wheel")
    argv = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-build-isolation",
        "--no-deps",
        "--no-index",
        "-w",
        out,
        tree,
    ]
    built = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    (path,) = out.glob("ftckpt-*.whl")
    with zipfile.ZipFile(path) as archive:
        yield archive


def test_integrations_and_chaos_are_links_to_the_folders_at_the_top(tree):
    for name in ("integrations", "chaos"):
        assert (tree / "ftckpt" / name).is_symlink()
        assert (tree / "ftckpt" / name).resolve() == tree / name


@pytest.mark.parametrize("name", ["integrations", "chaos"])
def test_a_wheel_holds_integrations_and_chaos_as_real_files(wheel, tree, name):
    inside = f"ftckpt/{name}/__init__.py"

    assert wheel.read(inside) == (tree / name / "__init__.py").read_bytes()
    assert wheel.getinfo(inside).external_attr >> 28 == 0o10, "a regular file, not a link"


def test_a_wheel_holds_every_module_of_the_tree(wheel, tree):
    """A folder without ``__init__.py`` would be left out without a word."""
    links = {"ftckpt/integrations": "integrations", "ftckpt/chaos": "chaos"}
    wanted = {str(path.relative_to(tree)) for path in (tree / "ftckpt").rglob("*.py")}
    for inside, top in links.items():
        wanted |= {f"{inside}/{path.relative_to(tree / top)}" for path in (tree / top).rglob("*.py")}

    assert wanted - set(wheel.namelist()) == set()


def test_a_wheel_brings_no_other_top_level_name(wheel):
    tops = {name.split("/")[0] for name in wheel.namelist()}

    assert {top for top in tops if not top.endswith(".dist-info")} == {"ftckpt"}


def test_a_wheel_says_that_it_is_typed_and_under_which_licence(wheel):
    names = wheel.namelist()

    assert "ftckpt/py.typed" in names
    assert any(name.endswith("/licenses/LICENSE") for name in names)
