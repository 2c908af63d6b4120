"""Restoring without a session: once, any subset of a step's components."""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from typing import Literal

from ftckpt.errors import SettingsError
from ftckpt.layout import MAX_STEP
from ftckpt.manifest import Commit
from ftckpt.store import open_store


def is_step(step: object) -> bool:
    """Whether this is a number that a step can have."""
    return isinstance(step, int) and not isinstance(step, bool) and 0 <= step <= MAX_STEP


def restore(
    uri: str | os.PathLike[str],
    state: MutableMapping[str, object] | Mapping[str, object],
    step: int | Literal["latest"] | None = "latest",
    *,
    strict: bool = True,
    store_options: Mapping[str, object] | None = None,
) -> Commit:
    """Overwrite the components in ``state`` with those of a step, once; any subset of them.

    Blocks until it is done. Other components of the step are left alone, and so is the run.

    Raises:
        RunNotFound, NoCommit, StepNotFound: nothing to restore. Nothing was changed.
        StateMismatch, CorruptError, StoreError: see ``ftckpt.errors``. Nothing was changed.
        RestoreIncomplete: it failed on the way; the named components must not be used.
    """
    from ftckpt.run import Run

    if step not in ("latest", None) and not is_step(step):
        raise SettingsError(f'SettingsError: step={step!r} has no meaning; give a step\'s number or "latest"')
    with Run(open_store(uri, options=store_options, allow_unconditional=True)) as run:
        return run.restore(state, None if step == "latest" else step, strict=strict)
