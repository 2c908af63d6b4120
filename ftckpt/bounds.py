"""Numbers that a person may set, checked once, where they are set: never deep inside a client."""

from __future__ import annotations

from ftckpt.errors import SettingsError


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
