"""Restoring without a session: once, any subset of a step's components."""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping, Sequence
from contextlib import ExitStack
from typing import Literal

from ftckpt.errors import SettingsError
from ftckpt.events import to_logging
from ftckpt.manifest import MAX_STEP, Commit
from ftckpt.restoring import restore_into
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
    strict: bool = True,
    tiers: Sequence[str | os.PathLike[str]] = (),
    store_options: Mapping[str, object] | None = None,
) -> Commit:
    """Overwrite the components in ``state`` with those of a step, once; any subset of them.

    Blocks until it is done. Other components of the step are left alone, and so is the run. What a folder
    of ``tiers`` has, at the right digest, is read from there; which step it is, the run says.

    Raises:
        RunNotFound, NoCommit, StepNotFound: nothing to restore. Nothing was changed.
        StateMismatch, CorruptError, StoreError: see ``ftckpt.errors``. Nothing was changed.
        RestoreIncomplete: it failed on the way; the named components must not be used.
    """
    from ftckpt.run import Run

    if step not in ("latest", None) and not is_step(step):
        raise SettingsError(f'SettingsError: step={step!r} has no meaning; give a step\'s number or "latest"')
    with ExitStack() as stack:
        far = open_store(uri, options=store_options, allow_unconditional=True)
        stack.callback(far.close)
        near = [LocalStore(os.fspath(tier)) for tier in tiers if os.fspath(tier) != os.fspath(uri)]
        commit = Run(far).commit(None if step == "latest" else step)
        restore_into(NearestStore([*near, far], to_logging), commit, state, subset=True, strict=strict)
        return commit
