"""What a person may set, checked once, where it is set: never deep inside a client.

Knows numbers, flags, addresses and what can be called. Refuses to know what any of it is for.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping

from ftckpt.errors import SettingsError


def require(name: str, value: object, fits: bool, wanted: str) -> None:
    """Refuse what does not fit. ``wanted`` says what would.

    Raises:
        SettingsError: facts ``setting`` and ``found``.
    """
    if not fits:
        text = " ".join(f"{value!r:.200}".split())  # a module's is many lines
        raise SettingsError(
            f"SettingsError: {name}={text:.80} has no meaning; it is of type {type(value).__qualname__}\n"
            f"  give {wanted}; nothing was changed",
            setting=name,
            found=value,
        )


def require_flag(name: str, value: object) -> None:
    """Nothing but ``True`` and ``False``: text that says "false" is true."""
    require(name, value, isinstance(value, bool), "True or False")


def can(value: object, *methods: str) -> bool:
    """Whether it has these methods; a class does not, its objects may."""
    return not isinstance(value, type) and all(callable(getattr(value, name, None)) for name in methods)


def require_address(name: str, value: object) -> None:
    """Text, or a path of text."""
    fits = isinstance(value, str) or (isinstance(value, os.PathLike) and isinstance(os.fspath(value), str))
    require(name, value, fits, 'an address: a folder ("runs/one", a Path) or a bucket ("s3://bucket/run")')


def require_folders(name: str, value: object) -> None:
    """Several addresses; one text would be as many as it has letters."""
    several = isinstance(value, Collection) and not isinstance(value, str | bytes | Mapping)
    require(name, value, several, 'folders in a list: ["/dev/shm/run"]')
    assert isinstance(value, Collection)
    for one in value:
        fits = isinstance(one, str) or (isinstance(one, os.PathLike) and isinstance(os.fspath(one), str))
        require(f"{name}=[...]: one of them", one, fits, 'folders in a list: ["/dev/shm/run"]')


def require_state(value: object) -> None:
    """Components by name. The likely mistake is one of them, bare."""
    wanted = 'a mapping from names to what is saved under them: {"actor": model, "optimizer": optimizer}'
    require("state", value, isinstance(value, Mapping), wanted)


def require_options(value: object) -> None:
    """Settings of a store."""
    wanted = 'a mapping from names to values, as {"endpoint": "http://127.0.0.1:9000"}, or None'
    require("store_options", value, value is None or isinstance(value, Mapping), wanted)


def require_listener(value: object) -> None:
    """Who hears events."""
    require(
        "events", value, can(value, "__call__"), "a callable that takes an Event, as ftckpt.events.silent"
    )


def require_number(
    name: str, value: object, *, low: float, high: float, whole: bool = False, optional: bool = False
) -> float:
    """The value as a number within ``low`` and ``high``, both allowed. ``optional``: ``None`` has a
    meaning too; it gives ``low``.

    Raises:
        SettingsError: text, a flag, NaN, infinity, a fraction where a whole number is meant, or out
            of bounds. Facts: ``setting``, ``found``.
    """
    if value is None and optional:
        return low
    fits = (
        isinstance(value, int if whole else int | float)
        and not isinstance(value, bool)
        and low <= value <= high  # NaN is not
    )
    if not fits:
        raise SettingsError(
            f"SettingsError: {name}={value!r:.80} has no meaning\n"
            f"  give {'a whole number' if whole else 'a number'} from {low:.15g} to {high:.15g}"
            f"{', or None' if optional else ''}; nothing was changed",
            setting=name,
            found=value,
        )
    assert isinstance(value, int | float)
    return value


DAY_S = 86_400.0
"""The longest of any deadline: what waits longer than that is not waited for."""

SHORTEST_S = 0.001
