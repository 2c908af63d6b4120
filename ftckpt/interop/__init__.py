"""Other formats: runs made of their checkpoints, and their checkpoints made of runs.

``export_run`` and ``import_run`` take addresses; ``exporting`` and ``importing`` do the work on open stores,
with one module a format.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Literal, get_args

from ftckpt.address import from_anywhere, options_for
from ftckpt.errors import NotRepresentable, ObjectNotFound, SettingsError
from ftckpt.events import Events, silent
from ftckpt.store import Files, open_files, open_store

if TYPE_CHECKING:
    from ftckpt.interop.api import Progress, Sink, Source
    from ftckpt.interop.exporting import Exported
    from ftckpt.interop.importing import Imported

ExportFormat = Literal["hf", "safetensors", "dcp", "zarr"]
ImportFormat = Literal["hf", "torch", "dcp", "orbax"]

__all__ = ["ExportFormat", "ImportFormat", "export_run", "import_run"]


def _quiet(_done: int, _total: int) -> None:
    pass


def export_run(
    run: str | os.PathLike[str],
    dest: str | os.PathLike[str],
    *,
    format: ExportFormat,  # noqa: A002 - the word of the command line
    step: int | None = None,
    component: str | None = None,
    dtype: str | None = None,
    config: str | os.PathLike[str] | None = None,
    shard_bytes: int | None = None,
    overwrite: bool = False,
    at_rest: bool = False,
    store_options: Mapping[str, object] | None = None,
    to_options: Mapping[str, object] | None = None,
    progress: Progress = _quiet,
    events: Events = silent,
) -> Exported:
    """Write a step of a run, or one component of it, as a checkpoint of another format. Blocks until it is
    there, and was read back.

    ``hf``: a folder for ``from_pretrained``, in shards of ``shard_bytes``, with the files of the folder ``config``;
    ``safetensors``: one file; ``dcp``: a folder for ``dcp.load``; ``zarr``: a Zarr 3 group. ``dtype`` ("bf16", …)
    is for floating-point tensors. ``at_rest``: pin nothing, for runs that may only be read.
    ``store_options`` are for every address that is no folder, ``to_options`` for ``dest`` alone.

    Raises:
        DestinationTaken: something is there, and ``overwrite`` is off.
        NotRepresentable, StateMismatch: it cannot be said in that format. Nothing was written.
        CorruptError, StoreError: what was written is not whole; the same export again begins anew.
    """
    from ftckpt.interop.exporting import Choice, export

    _known(format, get_args(ExportFormat))
    if format != "hf" and (config is not None or shard_bytes is not None):
        raise SettingsError(
            f"config and shard_bytes have no meaning for the format {format!r}; nothing was written"
        )
    with ExitStack() as stack:
        store = open_store(
            run, options=options_for(run, store_options), allow_unconditional=True, events=events
        )
        stack.callback(store.close)
        options = {**options_for(dest, store_options), **(to_options or {})}
        folder, name = (dest, "") if format != "safetensors" else _split(dest)
        files = _files(stack, folder, options, events)
        beside = None
        if config is not None:
            beside = _files(stack, config, options_for(config, store_options), events)
        sink = _sink(format, files, name, beside, shard_bytes)
        choice = Choice(step, component, dtype)
        return export(
            store, files, sink, choice, kind=format, overwrite=overwrite, pins=not at_rest, progress=progress
        )


def import_run(
    source: str | os.PathLike[str],
    run: str | os.PathLike[str],
    *,
    format: ImportFormat,  # noqa: A002
    component: str | None = None,
    step: int = 0,
    store_options: Mapping[str, object] | None = None,
    to_options: Mapping[str, object] | None = None,
    allow_unconditional: bool = False,
    progress: Progress = _quiet,
    events: Events = silent,
) -> Imported:
    """Make a new run of a checkpoint of another format. Blocks until its one step is readable and proven.

    ``hf``: a folder of safetensors, or one such file; ``torch``: a file of ``torch.save``; ``dcp``: a folder of
    ``dcp.save``; ``orbax``: a folder of Orbax. No code in a checkpoint is run. All of it becomes one
    component, if ``component`` names one; else each of its outermost names does.

    Raises:
        ForeignError: it cannot be read, or not be held by a run. Nothing is readable.
        NotSameRun: something else is at the address of the run.
    """
    from ftckpt.interop.importing import import_checkpoint

    _known(format, get_args(ImportFormat))
    with ExitStack() as stack:
        opened, origin = _source(stack, format, source, options_for(source, store_options), events)
        options = {**options_for(run, store_options), **(to_options or {})}
        store = open_store(run, options=options, allow_unconditional=allow_unconditional, events=events)
        stack.callback(store.close)
        return import_checkpoint(
            opened(), store, origin=origin, kind=format, component=component, step=step, progress=progress
        )


def _known(given: str, known: tuple[str, ...]) -> None:
    if given not in known:
        raise SettingsError(
            f"format {given!r} has no meaning here; use {', '.join(known)}\n  nothing was written"
        )


def _sink(kind: ExportFormat, files: Files, name: str, config: Files | None, shard_bytes: int | None) -> Sink:
    if kind == "safetensors":
        from ftckpt.interop.hf import SingleSink

        return SingleSink(files, name)
    if kind == "hf":
        from ftckpt.interop.hf import SHARD_BYTES, FolderSink

        return FolderSink(files, config, SHARD_BYTES if shard_bytes is None else shard_bytes)
    if kind == "dcp":
        from ftckpt.interop.torch_folder import DcpSink

        return DcpSink(files)
    from ftckpt.interop.zarr_group import ZarrSink

    return ZarrSink(files)


def _source(
    stack: ExitStack,
    kind: ImportFormat,
    source: str | os.PathLike[str],
    options: Mapping[str, object],
    events: Events,
) -> tuple[Callable[[], Source], str]:
    """How the checkpoint is opened, and its address without credentials."""
    single = kind == "torch" or (kind == "hf" and os.fspath(source).endswith(".safetensors"))
    folder, name = _split(source) if single else (source, "")
    files = _files(stack, folder, options, events)
    origin = f"{files.uri}/{name}".rstrip("/")

    def opened() -> Source:
        if not single and not files.sizes():
            raise ObjectNotFound(f"{files.uri} holds nothing\n  nothing was written", uri=files.uri)
        if kind == "torch":
            from ftckpt.interop.torch_file import TorchSource

            return TorchSource(files, name)
        if kind == "hf":
            from ftckpt.interop.hf import SafetensorsSource

            return SafetensorsSource(files, name or None)
        if kind == "dcp":
            from ftckpt.interop.torch_folder import DcpSource

            return DcpSource(files)
        from ftckpt.interop.orbax import OrbaxSource

        return OrbaxSource(files)

    return opened, origin


def _files(
    stack: ExitStack, address: str | os.PathLike[str], options: Mapping[str, object], events: Events
) -> Files:
    files = open_files(address, options=options, events=events)
    stack.callback(files.close)
    return files


def _split(address: str | os.PathLike[str]) -> tuple[str, str]:
    """A file's folder and its name."""
    text = from_anywhere(address)
    folder, _, name = text.rpartition("/")
    if not name or not folder or folder.endswith((":", ":/")):
        raise NotRepresentable(f"NotRepresentable: {text} names no file in a folder\n  nothing was written")
    return folder, name
