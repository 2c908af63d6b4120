"""What a restore may do beside putting back what was saved: only if it is asked for, and by name.

Rules are read here and applied elsewhere. Names are those of leaves, ``component.path.to.leaf``; a rule
holds for what it names and for everything in it. Refuses to know tensors and stores.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ftckpt.errors import SettingsError
from ftckpt.leaf import ITEMSIZE_BYTES, is_in

Rename = Mapping[str, str] | Sequence[tuple[str, str]]
"""``{"actor.old": "actor.new"}``: what was saved as the left is the right here. ``{"module.": ""}``: that
part is taken out.
"""
_REALS = ("float64", "float32", "bfloat16", "float16")
_COMPLEX = ("complex128", "complex64")
_HELD_IN = {
    "float16": ("float16",),
    "bfloat16": ("bfloat16",),
    "float32": ("float32", "bfloat16", "float16"),
    "float64": _REALS,
    "complex64": ("complex64",),
    "complex128": _COMPLEX,
}
"""Of each dtype that values can be carried over to, those whose every value it holds."""


@dataclass(frozen=True, slots=True)
class Renames:
    """Rules that give saved names their names here.

    ``prefixes``: the longest that fits is used, and once. ``parts`` are taken out before: one that begins
    with an underscore (torch's wrappers name themselves so) wherever it stands, any other only where it
    stands first in its component, and once.
    """

    prefixes: tuple[tuple[str, str], ...] = ()
    parts: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.prefixes or self.parts)

    def of(self, name: str) -> tuple[str, tuple[str, ...]]:
        """The name here, and the left sides of the rules that made it."""
        name, used = self._without_parts(name)
        for saved, here in self.prefixes:
            if is_in(name, saved):
                return here + name[len(saved) :], (*used, saved)
        return name, used

    def _without_parts(self, name: str) -> tuple[str, tuple[str, ...]]:
        component, *path = name.split(".")
        used = [part for part in self.parts if part.startswith("_") and part in path[:-1]]
        path = [part for part in path[:-1] if part not in used] + path[-1:]
        for part in self.parts:
            taken = part.split(".")
            if not part.startswith("_") and path[: len(taken)] == taken and len(path) > len(taken):
                return ".".join([component, *path[len(taken) :]]), (*used, part)
        return ".".join([component, *path]), tuple(used)

    @property
    def lefts(self) -> tuple[str, ...]:
        """The left side of every rule."""
        return (*self.parts, *(saved for saved, _ in self.prefixes))


def renames(rules: Rename | None) -> Renames:
    """Rules as a user writes them: a mapping, or pairs. A dot at the end of a side changes nothing.

    Raises:
        SettingsError: a side that is no name, or two rules of which nobody can tell which is meant.
    """
    if rules is None:
        return Renames()
    pairs: list[Any] = list(rules.items()) if isinstance(rules, Mapping) else list(rules)
    known: dict[str, str] = {}
    for pair in pairs:
        if isinstance(pair, str) or len(pair) != 2 or not all(isinstance(side, str) for side in pair):
            raise _bad("rename", f"{pair!r} is no pair of names", pair)
        saved, here = (side.removesuffix(".") for side in pair)
        if "" in saved.split(".") or (here and "" in here.split(".")) or "@" in saved + here:
            raise _bad("rename", f"{pair[0]!r}: {pair[1]!r} is no rule: each side is a name, in parts", pair)
        if known.setdefault(saved, here) != here:
            raise _bad("rename", f"{saved!r} would be both {known[saved]!r} and {here!r} here", pair)
    parts = tuple(saved for saved, here in known.items() if not here)
    leading = [part for part in parts if not part.startswith("_")]
    for part in leading:
        other = next((one for one in leading if one != part and is_in(one, part)), None)
        if other is not None:
            raise _bad("rename", f"{part!r} and {other!r} would both be taken out of one name", part)
    prefixes = [(saved, here) for saved, here in known.items() if here]
    return Renames(tuple(sorted(prefixes, key=lambda rule: (-len(rule[0]), rule))), parts)


@dataclass(frozen=True, slots=True)
class Casts:
    """Which dtype a tensor may have here though it was saved with another one; by names as they are here."""

    rules: tuple[tuple[str, str], ...] = ()

    def of(self, name: str) -> str | None:
        """The dtype that was asked for; the longest rule says it."""
        for prefix, dtype in self.rules:
            if not prefix or is_in(name, prefix):
                return dtype
        return None


def casts(rules: object) -> Casts:
    """A dtype for all tensors, or a mapping of names to dtypes.

    Raises:
        SettingsError: no floating-point or complex dtype of those that values can be carried over to.
    """
    if rules is None:
        return Casts()
    pairs = rules.items() if isinstance(rules, Mapping) else (("", rules),)
    read = [(str(name).removesuffix("."), str(dtype).removeprefix("torch.")) for name, dtype in pairs]
    for _, dtype in read:
        if dtype not in _HELD_IN:
            known = "" if dtype in ITEMSIZE_BYTES else ", and no dtype at all"
            raise _bad(
                "dtype", f"{dtype!r} is none of {', '.join(_REALS)}, {', '.join(_COMPLEX)}{known}", dtype
            )
    return Casts(tuple(sorted(read, key=lambda rule: (-len(rule[0]), rule))))


def can_carry_over(saved: str, here: str) -> bool:
    """Whether values of one dtype have a meaning in the other: among reals, and among complex numbers."""
    return any(saved in kind and here in kind for kind in (_REALS, _COMPLEX))


def loses(saved: str, here: str) -> bool:
    """Whether values may change on the way."""
    return saved not in _HELD_IN[here]


@dataclass(frozen=True, slots=True)
class Asked:
    """What a restore was asked for. ``only``: names here; everything else is left as it is. ``idle``: a
    rule to rename that fits nothing is no mistake.
    """

    strict: bool = True
    rename: Renames = Renames()
    casts: Casts = Casts()
    only: tuple[str, ...] | None = None
    idle: bool = False


EXACTLY = Asked()


def asked(
    *,
    strict: bool = True,
    rename: Rename | None = None,
    dtype: object = None,
    only: str | Iterable[str] | None = None,
) -> Asked:
    """What a user's arguments ask for. Raises ``SettingsError`` for what has no meaning."""
    names: list[Any] | None = None if only is None else [only] if isinstance(only, str) else list(only)
    if names is not None and (not names or not all(isinstance(name, str) and name for name in names)):
        raise _bad("only", f"{only!r} names nothing; give names of leaves, or of what they are in", only)
    chosen = None if names is None else tuple(name.removesuffix(".") for name in names)
    return Asked(strict, renames(rename), casts(dtype), chosen)


def _bad(setting: str, what: str, found: object) -> SettingsError:
    return SettingsError(
        f"SettingsError: {setting}=: {what}\n  nothing was read or changed", setting=setting, found=found
    )
