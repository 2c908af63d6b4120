"""``ftckpt export``: a step of a run as a checkpoint that other tools read."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from ftckpt.cli.common import (
    AsJson,
    StoreOptions,
    ToOptions,
    bar,
    locate,
    parse_options,
    print_json,
    reporting,
    size,
    tell_retry,
)
from ftckpt.cli.copy import AtRest


class Format(StrEnum):
    HF = "hf"
    SAFETENSORS = "safetensors"
    DCP = "dcp"
    ZARR = "zarr"


Run = Annotated[
    str, typer.Argument(metavar="RUN", help="The run: a folder, s3://bucket/prefix, …", show_default=False)
]
Dest = Annotated[
    str,
    typer.Argument(
        metavar="DEST",
        help="Where to: an address that holds nothing; for safetensors the file itself.",
        show_default=False,
    ),
]


def export(
    run: Run,
    dest: Dest,
    format_: Annotated[Format, typer.Option("--format", help="What DEST is to be.", show_default=False)],
    step: Annotated[
        int | None, typer.Option("--step", min=0, help="Which step; the newest if left out.")
    ] = None,
    component: Annotated[
        str | None,
        typer.Option(
            "--component",
            metavar="NAME",
            help="Only this component, without its name in front of the tensors' names.",
            show_default=False,
        ),
    ] = None,
    config: Annotated[
        str | None,
        typer.Option(
            "--config",
            metavar="DIR",
            help="hf: copy the model's config and tokenizer from this folder.",
            show_default=False,
        ),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            "--dtype",
            metavar="DTYPE",
            help="Floating-point tensors as bf16, fp16, fp32 or fp64.",
            show_default=False,
        ),
    ] = None,
    shard_gb: Annotated[
        float | None,
        typer.Option("--shard-gb", min=0.001, help="hf: the most that a file holds; 5 if left out."),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace what an export of this format wrote there.")
    ] = False,
    at_rest: AtRest = False,
    as_json: AsJson = False,
    store_option: StoreOptions = None,
    to_option: ToOptions = None,
) -> None:
    """Write a step as a checkpoint of another format: hf (for from_pretrained), safetensors (one file), dcp
    (for torch.distributed.checkpoint) or zarr (Zarr 3).

    Bytes stream from RUN's store to DEST's, a part at a time, and are read back. An export that is interrupted
    leaves nothing that looks whole; the same command again completes it. Plain values, and what single ranks
    hold, go along only where the format can say them; what is left out is listed.

    \b
    Examples:
      ftckpt export s3://bucket/runs/grpo-1 ./policy --format hf --component actor --config ./base-model
      ftckpt export RUN s3://bucket/policy --format hf --component actor --step 400 --dtype bf16
      ftckpt export RUN ./step-400 --format dcp --step 400
      ftckpt export RUN ./actor.safetensors --format safetensors --component actor
    """  # noqa: D301 - the backspace keeps lines as they are
    with reporting(as_json=as_json), bar(1) as shown:
        from ftckpt.interop import export_run

        done = export_run(
            locate(run),
            locate(dest),
            format=format_.value,
            step=step,
            component=component,
            dtype=dtype,
            config=locate(config) if config is not None else None,
            shard_bytes=int(shard_gb * 1e9) if shard_gb is not None else None,
            overwrite=overwrite,
            at_rest=at_rest,
            store_options=parse_options(store_option),
            to_options=parse_options(to_option),
            progress=shown.hear,
            events=tell_retry,
        )
    if as_json:
        print_json({"dest": dest, "format": format_.value, **_facts(done)})
        return
    print(f"{dest}: step {done.step} as {format_.value}; {done.tensors} tensors, {size(done.tensor_bytes)}")
    for name in done.left_out:
        print(f"  left out: {name}")


def _facts(done: object) -> dict[str, object]:
    return {
        name: getattr(done, name) for name in ("step", "components", "tensors", "tensor_bytes", "left_out")
    }
