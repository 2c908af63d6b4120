"""What is asked of a save, as arithmetic on what the cases measured. Pure.

A ratio is taken round by round, of two cases of the same round; its median is what counts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

from benchmarks.save.measure import Numbers

Results = Mapping[str, Sequence[Numbers]]
"""What each case measured, round by round. A round in which it failed is left out."""

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Figure:
    """``rounds`` are in ``unit``; there is nothing in them when a case that it needs did not run."""

    name: str
    asked: Literal["at most", "at least", "shown"]
    limit: float
    rounds: tuple[float, ...]
    unit: str = "×"
    note: str = ""

    @property
    def measured(self) -> float | None:
        return median(self.rounds) if self.rounds else None

    @property
    def reached(self) -> bool | None:
        """``None``: it was not measured, or is only shown."""
        if self.measured is None or self.asked == "shown":
            return None
        return self.measured <= self.limit if self.asked == "at most" else self.measured >= self.limit


def figures(results: Results) -> list[Figure]:
    """Everything that is asked, in the order in which a reader asks."""
    ratio, shown = _Ratios(results), _Shown(results)
    gib = 1 << 30
    return [
        Figure(
            "stall of save() / stall of DCP async_save",
            "at most",
            1 / 20,
            ratio("s3: ftckpt, second save", "stall_s", "s3: DCP async_save", "stall_s"),
            note=shown("s3: ftckpt, second save", "stall {stall_s:.4f} s"),
        ),
        Figure(
            "stall of save() / the same with a sixteenth of the bytes",
            "at most",
            1.5,
            ratio("stall", "stall_s", "stall, a sixteenth of the bytes", "stall_s"),
            note=shown("stall", "{leaves:.0f} leaves"),
        ),
        Figure(
            "fence at once / memcpy into touched memory",
            "at most",
            1.3,
            tuple(r["ratio"] for r in results.get("fence", ())),
            note=_staged(results),
        ),
        Figure(
            "fence beyond the budget / its deadline; the save is aborted",
            "at most",
            1.25,
            tuple(
                r["fence_s"] / r["deadline_s"] if r["aborted"] and r["next_is_good"] else float("inf")
                for r in results.get("fence beyond the budget", ())
            ),
            note=shown(
                "fence beyond the budget", "{fence_s:.2f} s of {deadline_s:.0f} s; the next save is good"
            ),
        ),
        Figure(
            "S3: incompressible state / raw PUTs",
            "at most",
            1.15,
            ratio("s3: ftckpt, incompressible", "commit_s", "s3: raw PUTs", "commit_s"),
        ),
        Figure(
            "S3: RL state / raw PUTs of the uncompressed bytes",
            "at most",
            1.1,
            ratio("s3: ftckpt", "commit_s", "s3: raw PUTs", "commit_s"),
            note=_stored(results, "s3: ftckpt"),
        ),
        Figure(
            "S3: RL state / DCP async_save",
            "at most",
            0.65,
            ratio("s3: ftckpt", "commit_s", "s3: DCP async_save", "commit_s"),
        ),
        Figure(
            "S3: RL state / s3torchconnector, the faster of its two",
            "at most",
            1.0,
            _best_peer(results, ("s3: s3torchconnector save", "s3: s3torchconnector async_save")),
        ),
        Figure(
            "S3: second save (deltas) / raw PUTs",
            "at most",
            0.8,
            ratio("s3: ftckpt, second save", "commit_s", "s3: raw PUTs", "commit_s"),
            note=_stored(results, "s3: ftckpt, second save"),
        ),
        Figure(
            "folder: RL state / raw writes with fsync",
            "at most",
            1.15,
            ratio("folder: ftckpt", "commit_s", "folder: raw writes", "commit_s"),
            note=_stored(results, "folder: ftckpt"),
        ),
        Figure(
            "S3: CPU seconds, raw codec / DCP save",
            "at most",
            0.5,
            ratio("s3: ftckpt, raw codec", "cpu_s", "s3: DCP save", "cpu_s"),
            note=shown("s3: ftckpt, raw codec", "{cpu_s:.2f} s", "; raw PUTs ")
            + shown("s3: raw PUTs", "{cpu_s:.2f} s"),
        ),
        *(
            Figure(
                f"extra memory, {_gib(results, name, gib)} GiB, nothing staged",
                "at most",
                384,
                tuple(r["extra_bytes"] / MIB for r in results.get(name, ())),
                "MiB",
            )
            for name in ("memory", "memory, four times the bytes")
        ),
        *(
            Figure(
                f"second save after a step at lr 1e-6: bytes of {what}",
                "at most",
                limit,
                tuple(100 * r[key] for r in results.get("s3: ftckpt, second save", ())),
                "%",
            )
            for what, key, limit in (
                ("the bf16 policy", "actor_part", 6),
                ("the whole state", "whole_part", 70),
                ("the frozen reference", "reference_part", 0),
            )
        ),
        Figure(
            "training throughput with saves back to back / without",
            "at least",
            0.97,
            tuple(r["ratio"] for r in results.get("throughput", ())),
            note=_free(results),
        ),
        *(
            Figure(
                f"longest hold of the GIL, {what}",
                "at most",
                5,
                tuple(1e3 * r["hold_s"] for r in results.get(f"hold, {what}", ())),
                "ms",
                note=_held(results, f"hold, {what}"),
            )
            for what in ("large tensors", "13,000 leaves")
        ),
        *(
            Figure(
                f"leaves: {what} per leaf, many / a few",
                "at most",
                1.25,
                tuple(
                    (b[key] / b["leaves"]) / (a[key] / a["leaves"])
                    for a, b in zip(
                        results.get("leaves, a few", ()), results.get("leaves, many", ()), strict=False
                    )
                ),
                note=_rate(results, key),
            )
            for what, key in (("save", "save_s"), ("restore", "restore_s"))
        ),
    ]


class _Ratios:
    def __init__(self, results: Results) -> None:
        self._results = results

    def __call__(self, ours: str, ours_key: str, theirs: str, theirs_key: str) -> tuple[float, ...]:
        pairs = zip(self._results.get(ours, ()), self._results.get(theirs, ()), strict=False)
        return tuple(a[ours_key] / b[theirs_key] for a, b in pairs)


class _Shown:
    """Medians of a case's numbers in words; nothing when it did not run."""

    def __init__(self, results: Results) -> None:
        self._results = results

    def __call__(self, name: str, text: str, then: str = "") -> str:
        rounds = self._results.get(name, ())
        return text.format(**medians(rounds)) + then if rounds else ""


def medians(rounds: Sequence[Numbers]) -> Numbers:
    """Number by number."""
    return {key: median(r[key] for r in rounds) for key in rounds[0]} if rounds else {}


def _best_peer(results: Results, names: Sequence[str]) -> tuple[float, ...]:
    own = results.get("s3: ftckpt", ())
    peers = [rounds for name in names if (rounds := results.get(name, ()))]
    if not peers:
        return ()
    return tuple(
        ours["commit_s"] / min(r["commit_s"] for r in others)
        for ours, *others in zip(own, *peers, strict=False)
    )


def _stored(results: Results, name: str) -> str:
    rounds = results.get(name, ())
    return (
        f"{100 * median(r['stored_bytes'] / r['raw_bytes'] for r in rounds):.0f} % of the bytes"
        if rounds
        else ""
    )


def _staged(results: Results) -> str:
    if not (found := medians(results.get("fence", ()))):
        return ""
    return (
        f"{found['staged_bytes'] / MIB:.0f} MiB staged of a budget of {found['budget_bytes'] / MIB:.0f} MiB, "
        f"{found['fence_s']:.3f} s"
    )


def _gib(results: Results, name: str, gib: int) -> str:
    rounds = results.get(name, ())
    return f"{rounds[0]['raw_bytes'] / gib:.2f}" if rounds else "?"


def _free(results: Results) -> str:
    if not (found := medians(results.get("throughput", ()))):
        return ""
    free = found["idle_cores"]
    verdict = "a core was free" if free >= 0.9 else "no core was free"
    return f"{verdict} ({free:.1f} idle beside the loop alone); {found['saves']:.0f} saves"


def _held(results: Results, name: str) -> str:
    if not (found := medians(results.get(name, ()))):
        return ""
    most, wait, idle = (1e3 * found[key] for key in ("most_s", "wait_s", "idle_s"))
    return f"at most {most:.1f} ms; waited {wait:.1f} ms for it, and {idle:.1f} ms while nothing is saved"


def _rate(results: Results, key: str) -> str:
    if not (found := medians(results.get("leaves, many", ()))):
        return ""
    return f"{found['leaves'] / found[key]:,.0f} leaves a second; {found['objects']:.0f} objects of {found['leaves']:,.0f} leaves"
