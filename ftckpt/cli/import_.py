"""``ftckpt import``: a run made of a checkpoint that another tool wrote."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from ftckpt.cli.common import (
    AsJson,
    OneWriter,
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


class Format(StrEnum):
    HF = "hf"
    TORCH = "torch"
    DCP = "dcp"
    ORBAX = "orbax"


Source = Annotated[
    str,
    typer.Argument(
        metavar="SRC", help="The checkpoint: a folder, or a file; also in a bucket.", show_default=False
    ),
]
Run = Annotated[
    str,
    typer.Argument(
        metavar="RUN", help="Where the run is to be: an address that holds nothing.", show_default=False
    ),
]


def import_(
    src: Source,
    run: Run,
    format_: Annotated[Format, typer.Option("--format", help="What SRC is.", show_default=False)],
    component: Annotated[
        str | None,
        typer.Option(
            "--component",
            metavar="NAME",
            help="All of SRC becomes this component; else each of its outermost names becomes one.",
            show_default=False,
        ),
    ] = None,
    step: Annotated[int, typer.Option("--step", min=0, help="The step that it becomes.")] = 0,
    as_json: AsJson = False,
    store_option: StoreOptions = None,
    to_option: ToOptions = None,
    allow_unconditional: OneWriter = False,
) -> None:
    """Make a run of a checkpoint: hf (a folder of safetensors, or one such file), torch (a file of torch.save),
    dcp (a folder of torch.distributed.checkpoint) or orbax (a folder with OCDBT or Zarr arrays).

    No code in the checkpoint is run: a class that its format does not need is refused by name. Bytes stream
    from SRC's store to RUN's. RUN is no run before all of it is there and proven; the same command again
    completes an import that was interrupted. Afterwards show, verify, diff, export and restore work on it.

    \b
    Examples:
      ftckpt import ./Qwen3-0.6B s3://bucket/runs/base --format hf --component actor
      ftckpt import ./checkpoint.pt ./run --format torch
      ftckpt import s3://bucket/dcp/step-400 ./run --format dcp --step 400
      ftckpt import gs://bucket/flax/100/default ./run --format orbax --component actor
    """  # noqa: D301 - the backspace keeps lines as they are
    with reporting(as_json=as_json), bar(1) as shown:
        from ftckpt.interop import import_run

        done = import_run(
            locate(src),
            locate(run),
            format=format_.value,
            component=component,
            step=step,
            store_options=parse_options(store_option),
            to_options=parse_options(to_option),
            allow_unconditional=allow_unconditional,
            progress=shown.hear,
            events=tell_retry,
        )
    if as_json:
        answer = {"run": run, "format": format_.value, "step": done.step, "components": done.components}
        print_json({**answer, "tensors": done.tensors, "tensor_bytes": done.tensor_bytes})
        return
    named = ", ".join(f"{name} ({kind})" for name, kind in done.components.items())
    print(f"{run}: step {done.step}; {done.tensors} tensors, {size(done.tensor_bytes)}; components: {named}")
