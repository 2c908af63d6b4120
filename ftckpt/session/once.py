"""Restoring without a session: once, any subset of a step's components."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from contextlib import ExitStack
from typing import Literal

from ftckpt.bounds import (
    can,
    require,
    require_address,
    require_flag,
    require_folders,
    require_listener,
    require_options,
    require_state,
)
from ftckpt.errors import SettingsError
from ftckpt.events import Events, to_logging
from ftckpt.jointly import restore_chosen
from ftckpt.manifest import MAX_STEP
from ftckpt.plan.asked import Rename, asked
from ftckpt.reader import Progress
from ftckpt.restoring import Restored
from ftckpt.session.pacing import Pacing
from ftckpt.store import LocalStore, open_store
from ftckpt.store.nearest import NearestStore


def is_step(step: object) -> bool:
    """Whether this is a number that a step can have."""
    return isinstance(step, int) and not isinstance(step, bool) and 0 <= step <= MAX_STEP


def restore(
    uri: str | os.PathLike[str],
    state: MutableMapping[str, object] | Mapping[str, object],
    step: int | Literal["latest"] | None = "latest",
    *,
    only: str | Iterable[str] | None = None,
    rename: Rename | None = None,
    dtype: object = None,
    strict: bool = True,
    tiers: Sequence[str | os.PathLike[str]] = (),
    store_options: Mapping[str, object] | None = None,
    events: Events = to_logging,
    progress: Progress | None = None,
) -> Restored:
    """Overwrite the components in ``state`` with those of a step, once; any subset of them.

    Blocks until it is done. Where ``state`` holds DTensors, all ranks call it and get the same step. Other
    components of the step are left alone, and so is the run. What a folder of ``tiers`` has, at the right
    digest, is read from there; which step it is, the run says.

    Everything has to be what it was when it was saved, unless one of these asks for something else. What
    came about otherwise is in the result, and told as the event ``restore.differs``; nothing is printed.

    Args:
        uri: the run's address.
        state: components by name, as for ``Session``.
        step: its number, or ``"latest"``.
        only: names of leaves here, or of what they are in (``"actor.head"``); all else is left as it is.
        rename: what was saved as the left is the right here: ``{"actor.old": "actor.new"}``. With
            nothing on the right that part is taken out: ``{"module.": ""}`` where it stands first in a
            component; one with an underscore in front (``"_orig_mod."``) wherever it stands. The longest rule
            that fits a name is used, once. State of optimizers goes with its parameters.
        dtype: which dtype a tensor may have here though it was saved with another; for all, or by names
            here: ``{"actor": torch.bfloat16}``. Values are rounded to the nearest; ``casts`` of the result
            counts those that became infinite or zero.
        strict: ``False`` lets pass what is missing, extra or of another shape, and lists it.
        tiers: folders to read from first.
        store_options: settings of the store.
        events: who hears of what differs; the standard logger ``ftckpt`` otherwise.
        progress: told (bytes done, bytes in all) now and then; without one ``events`` are, every two seconds.

    Raises:
        RunNotFound, NoCommit, StepNotFound: nothing to restore. Nothing was changed.
        SettingsError: an argument that has no meaning. Nothing was read.
        StateMismatch, CorruptError, StoreError: see ``ftckpt.errors``. Nothing was changed.
        RestoreIncomplete: it failed on the way; the named components must not be used.
    """
    from ftckpt.run import Run

    require_address("uri", uri)
    require_state(state)
    require("only", only, only is None or isinstance(only, Iterable), "a name, several names, or None")
    rules = 'rules as {"name when saved": "name here"}, or None'
    require("rename", rename, rename is None or isinstance(rename, Iterable), rules)
    require_flag("strict", strict)
    require_folders("tiers", tiers)
    require_options(store_options)
    require_listener(events)
    require("progress", progress, progress is None or can(progress, "__call__"), "a callable, or None")
    if step not in ("latest", None) and not is_step(step):
        raise SettingsError(f'SettingsError: step={step!r} has no meaning; give a step\'s number or "latest"')
    wish = asked(only=only, rename=rename, dtype=dtype, strict=strict)
    with ExitStack() as stack:
        far = open_store(uri, options=store_options, allow_unconditional=True)
        stack.callback(far.close)
        near = [LocalStore(os.fspath(tier)) for tier in tiers if os.fspath(tier) != os.fspath(uri)]
        return restore_chosen(
            NearestStore([*near, far], events),
            lambda: Run(far).commit(None if step == "latest" else step),
            state,
            asked=wish,
            events=events,
            progress=lambda commit: progress or Pacing(commit.step, events),
        )
