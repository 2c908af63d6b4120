"""J14: every number that a person may set means something, or is refused by name where it is set."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest

import ftckpt
from ftckpt.codec import Codec
from ftckpt.commit import Patience
from ftckpt.errors import SettingsError
from ftckpt.reader import ReadSettings
from ftckpt.retention import Keep
from ftckpt.session.settings import Settings
from ftckpt.store import open_store
from ftckpt.writer import WriteSettings, fitted

VALUES = [0, 1, 65, 10**6, -1, "5", None, True, 1.5, math.nan, math.inf, 10**30]

ABOVE_ZERO = (1, 65, 10**6)
SECONDS = (1, 65, 1.5)
OPTIONAL = (*ABOVE_ZERO, None)

SESSION: dict[str, tuple[object, ...]] = {
    "keep": OPTIONAL,
    "step": (0, *OPTIONAL),
    "chunk_bytes": ABOVE_ZERO,
    "staging_bytes": OPTIONAL,
    "run_seed": (0, -1, *ABOVE_ZERO),
    "max_failed_saves": OPTIONAL,
    "deadline_s": SECONDS,
    "fence_deadline_s": SECONDS,
    "retry_deadline_s": SECONDS,
    "mtbf_s": (*OPTIONAL, 1.5),
}
WITH: dict[str, dict[str, object]] = {"mtbf_s": {"save_every": "auto"}}
"""What a number has a meaning with, where it has none alone."""
STORE: dict[str, tuple[object, ...]] = {
    "max_calls": (1, 65),
    "timeout_s": SECONDS,
    "connect_timeout_s": SECONDS,
}
OTHERS: list[tuple[object, dict[str, tuple[object, ...]]]] = [
    (Codec(), {"level": (0, 1, -1), "max_chain": (0, 1), "base_budget_bytes": (0, *ABOVE_ZERO)}),
    (Keep(), {"last": OPTIONAL, "every": OPTIONAL}),
    (
        Patience(),
        {
            "deadline_s": SECONDS,
            "takeover_s": (0, *SECONDS),
            "poll_s": SECONDS,
            "max_poll_s": SECONDS,
        },
    ),
    (
        WriteSettings(),
        {
            "pack_bytes": ABOVE_ZERO,
            "max_pack_bytes": ABOVE_ZERO,
            "packs_in_flight": (1, 65),
            "encode_threads": (1, 65),
            "backlog": (1, 65),
        },
    ),
    (
        ReadSettings(),
        {
            "threads": (1, 65),
            "budget_bytes": ABOVE_ZERO,
            "run_bytes": ABOVE_ZERO,
            "gap_bytes": (0, *ABOVE_ZERO),
        },
    ),
]

Make = Callable[[object], object]


def numbers() -> list[tuple[str, Make, tuple[object, ...]]]:
    """Every number: how it is set, and which of ``VALUES`` mean something."""
    found: list[tuple[str, Make, tuple[object, ...]]] = []
    for name, good in SESSION.items():
        beside = WITH.get(name, {})

        def make(v: object, name: str = name, beside: dict[str, object] = beside) -> object:
            return ftckpt.Session("memory://settings", {}, **{name: v}, **beside)  # type: ignore[arg-type]

        found.append((name, make, good))
    for name, good in STORE.items():
        found.append((name, lambda v, name=name: open_store("memory://settings", options={name: v}), good))  # type: ignore[misc]
    for default, fields in OTHERS:
        for name, good in fields.items():
            found.append(
                (
                    f"{type(default).__name__}.{name}",
                    lambda v, d=default, name=name: replace(d, **{name: v}),
                    good,
                )  # type: ignore[misc]
            )
    return found


@pytest.mark.parametrize("name, make, good", [pytest.param(*case, id=case[0]) for case in numbers()])
def test_a_number_means_something_or_is_refused_by_name_where_it_is_set(name, make, good):
    """J14: 0, 1, 65, 10**6, -1, "5", None and their siblings, for every numeric option."""
    for value in VALUES:
        means_something = any(value == g and type(value) is type(g) for g in good)
        if means_something:
            make(value)
            continue
        if isinstance(value, int | float) and not isinstance(value, bool) and 10**6 <= value < math.inf:
            continue  # some bound lies above a million, and that is for each to say
        with pytest.raises(SettingsError, match=name.rpartition(".")[2]) as caught:
            make(value)
        assert isinstance(caught.value, ValueError)
        assert repr(value)[:60] in str(caught.value)


@pytest.mark.parametrize("name, make, good", [pytest.param(*case, id=case[0]) for case in numbers()])
def test_a_number_beyond_all_reason_is_refused(name, make, good):
    """J14: no number is taken that would overflow somewhere below."""
    with pytest.raises(SettingsError, match=name.rpartition(".")[2]):
        make(10**400)


def test_no_number_of_a_session_is_left_out():
    """A new numeric setting must say here what it means."""
    taken = {name for name, kind in Settings.__annotations__.items() if "int" in kind or "float" in kind}
    assert taken - {"save_every"} <= SESSION.keys()


@pytest.mark.parametrize("cores", [1, 2, 3, 4, 8, 16, 192, 1024])
def test_a_save_fits_its_threads_and_packs_to_the_cores_it_may_use(cores):
    """On few a core is left to the trainer and packs never grow; with many, more is encoded and put at once."""
    found, plain = fitted(WriteSettings(), cores), WriteSettings()

    assert 1 <= found.encode_threads <= max(1, cores // 2)
    assert 3 <= found.packs_in_flight <= 16
    assert found.codec == plain.codec and found.patience == plain.patience
    memory_bytes = (found.packs_in_flight + 2) * found.max_pack_bytes
    assert memory_bytes == 80 << 20 if cores < 4 else found.max_pack_bytes == plain.max_pack_bytes
    more = fitted(WriteSettings(), 2 * cores)
    assert (more.encode_threads, more.packs_in_flight) >= (found.encode_threads, found.packs_in_flight)
