"""``ftckpt export`` and ``ftckpt import`` of a small run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.cli.conftest import Cli


def test_a_component_goes_out_and_comes_back_as_a_run_for_every_command(
    cli: Cli, made: Path, tmp_path: Path
) -> None:
    file, run = tmp_path / "model.safetensors", tmp_path / "back"

    out = cli("export", made, file, "--format", "safetensors", "--component", "model", "--step", 2)
    back = cli("import", file, run, "--format", "hf", "--component", "model", "--step", 2)

    assert out.code == back.code == 0 and out.err == back.err == ""
    assert out.out.startswith(f"{file}: step 2 as safetensors; 2 tensors") and "model (module)" in back.out
    assert sorted(load_file(file)) == ["bias", "weight"]
    assert cli("verify", run).code == 0
    assert [line["step"] for line in cli("ls", run, "--json").json["commits"]] == [2]
    assert "it was imported from hf" in cli("show", run).out
    compared = cli("diff", f"{made}@2", f"{run}@2", "--json").json
    (model,) = [part for part in compared["components"] if part["name"] == "model"]
    assert model["equal"] == 3 and model["changed"] == 0


def test_export_says_what_it_left_out_and_speaks_json(cli: Cli, made: Path, tmp_path: Path) -> None:
    ran = cli("export", made, tmp_path / "z", "--format", "zarr", "--dtype", "bf16", "--json")

    assert ran.code == 0 and ran.json["step"] == 3 and ran.json["tensors"] == 8
    assert ran.json["components"] == ["buffer", "model", "optim"]
    assert set(ran.json) == {*("dest", "format", "step", "components", "tensors", "tensor_bytes", "left_out")}
    assert ran.json["left_out"] == ["buffer (plain values)", "optim.param_groups (plain values)"]
    told = cli("export", made, tmp_path / "b.safetensors", "--format", "safetensors").out
    assert "  left out: buffer (plain values)\n" in told


@pytest.mark.parametrize(
    ("dtype", "found"), [("fp16", torch.float16), ("fp32", torch.float32), ("fp64", torch.float64)]
)
def test_options_do_what_their_table_says(
    cli: Cli, made: Path, tmp_path: Path, dtype: str, found: torch.dtype
) -> None:
    asked = ("--format", "hf", "--component", "model", "--dtype", dtype, "--shard-gb", "0.001", "--at-rest")

    assert cli("export", made, tmp_path / "hf", *asked).code == 0
    assert cli("export", made, tmp_path / "hf", *asked).code == 1
    assert cli("export", made, tmp_path / "hf", *asked, "--overwrite").code == 0
    back = cli("import", tmp_path / "hf", tmp_path / "run", "--format", "hf", "--component", "m", "--json")

    assert load_file(tmp_path / "hf" / "model.safetensors")["weight"].dtype == found
    assert set(back.json) == {"run", "format", "step", "components", "tensors", "tensor_bytes"}
    assert (back.json["step"], back.json["components"]) == (0, {"m": "module"})
    again = cli("export", tmp_path / "run", tmp_path / "dcp", "--format", "dcp")
    assert again.code == 0 and again.out.startswith(f"{tmp_path / 'dcp'}: step 0 as dcp; 2 tensors")


def test_errors_are_told_and_leave_everything_as_it_was(cli: Cli, made: Path, tmp_path: Path) -> None:
    (tmp_path / "there").write_text("mine")

    taken = cli("export", made, tmp_path, "--format", "hf", "--component", "model", "--json")
    absent = cli("import", tmp_path / "nowhere.pt", tmp_path / "run", "--format", "torch", "--json")
    wrong = cli("import", tmp_path / "there", tmp_path / "run", "--format", "zarr")

    assert (taken.code, taken.json["error"]) == (1, "DestinationTaken")
    assert (absent.code, absent.json["error"]) == (1, "ObjectNotFound")
    assert wrong.code == 2
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


def test_help_teaches_with_examples(cli: Cli) -> None:
    for command in ("export", "import"):
        shown = cli(command, "--help").out
        assert sum(line.startswith(f"    ftckpt {command} ") for line in shown.splitlines()) == 4, shown


def test_no_code_of_a_checkpoint_runs(cli: Cli, tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2), "x": Path}, tmp_path / "x.pt")  # noqa: TID251

    ran = cli("import", tmp_path / "x.pt", tmp_path / "run", "--format", "torch", "--json")

    assert (ran.code, ran.json["error"]) == (1, "ForeignUnsafe") and "pathlib.Path" in ran.err
