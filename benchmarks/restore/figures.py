"""What is asked of a restore, as arithmetic on what the cases measured. Pure.

A ratio is taken round by round, of two cases of the same round; its median is what counts. Ratios of
speeds say how many times as fast ftckpt is.
"""

from __future__ import annotations

from benchmarks.save.figures import Figure, Results, medians

MIB = 1 << 20


def figures(results: Results) -> list[Figure]:
    """Everything that is asked, in the order in which a reader asks."""

    def times_as_fast(ours: str, theirs: str) -> tuple[float, ...]:
        pairs = zip(results.get(ours, ()), results.get(theirs, ()), strict=False)
        return tuple(b["restore_s"] / a["restore_s"] for a, b in pairs)

    def speed(name: str, limit: float, theirs: str, what: str, ours: str, note: str = "") -> Figure:
        return Figure(name, "at least", limit, times_as_fast(ours, f"{theirs}: {what}"), note=note)

    return [
        speed("S3, stored raw / raw GETs of the same bytes", 0.8, "s3", "raw GETs", "s3: ftckpt, stored raw"),
        Figure(
            "S3, stored as by default / raw GETs of the uncompressed bytes",
            "shown",
            0.8,
            times_as_fast("s3: ftckpt", "s3: raw GETs"),
        ),
        speed("S3 / DCP, FsspecReader", 8, "s3", "DCP", "s3: ftckpt"),
        speed("S3 / s3torchconnector, S3StorageReader", 2, "s3", "s3torchconnector", "s3: ftckpt"),
        speed("S3 / TensorStore, zarr3", 1.5, "s3", "tensorstore zarr3", "s3: ftckpt"),
        speed("folder / DCP, FileSystemReader", 2, "folder", "DCP", "folder: ftckpt"),
        speed("folder, stored raw / raw reads", 0.5, "folder", "raw reads", "folder: ftckpt, stored raw"),
        Figure(
            "folder, stored as by default / raw reads of the uncompressed bytes",
            "shown",
            0.5,
            times_as_fast("folder: ftckpt", "folder: raw reads"),
        ),
        _eighth(results, 0, "needed_bytes", "bytes needed"),
        _eighth(results, 1, "chunk_bytes", "bytes of whole chunks"),
        *(_memory(results, name) for name in ("memory", "memory, four times the bytes")),
        _plan(results),
        Figure(
            "plan: this job / one of a sixteenth of its ranks, of whom each wants as much",
            "shown",
            1.0,
            tuple(r["plan_s"] / r["sixteenth_s"] for r in results.get("plan", ())),
        ),
        _chain(results, "chain"),
        _chain(results, "chain, all of it deltas"),
    ]


def _eighth(results: Results, dim: int, of: str, what: str) -> Figure:
    rounds = results.get(f"an eighth along dim {dim}", ())
    note = ""
    if found := medians(rounds):
        note = (
            f"{found['fetched_bytes'] / MIB:.0f} MiB of {found['needed_bytes'] / MIB:.0f} MiB needed, "
            f"{found['chunk_bytes'] / MIB:.0f} MiB in whole chunks, {found['gets']:.0f} requests of 8 readers"
        )
    return Figure(
        f"1/8 of each tensor along dim {dim}: bytes fetched / {what}",
        "at most",
        1.1,
        tuple(r["fetched_bytes"] / r[of] for r in rounds),
        note=note,
    )


def _memory(results: Results, name: str) -> Figure:
    rounds = results.get(name, ())
    size = f"{rounds[0]['raw_bytes'] / (1 << 30):.2f}" if rounds else "?"
    extra = tuple(r["extra_bytes"] / MIB for r in rounds)
    return Figure(f"extra memory beyond the state, {size} GiB", "at most", 256, extra, "MiB")


def _plan(results: Results) -> Figure:
    rounds = results.get("plan", ())
    note = ""
    if found := medians(rounds):
        note = (
            f"{found['ranks']:,.0f} ranks × {found['tensors']:,.0f} tensors: {found['fragments']:.0f} fragments read, "
            f"{found['chunks']:,.0f} chunks in {found['requests']:.0f} requests; "
            f"fetching the commit takes {1e3 * found['commit_s']:.0f} ms beside its GET, "
            f"the fragments {1e3 * found['fragments_s']:.0f} ms; all in all {1e3 * found['all_s']:.0f} ms"
        )
    return Figure(
        "plan of a rank, beside its fetches",
        "at most",
        50,
        tuple(1e3 * r["plan_s"] for r in rounds),
        "ms",
        note,
    )


def _chain(results: Results, name: str) -> Figure:
    rounds = results.get(name, ())
    note = ""
    if found := medians(rounds):
        note = (
            f"step {found['step']:.0f}, up to {found['longest']:.0f} bases a chunk, "
            f"{found['fetched_bytes'] / found['full_bytes']:.2f} × the bytes"
        )
    ratios = tuple(r["restore_s"] / r["full_s"] for r in rounds)
    return Figure(f"{name}: restore / full restore", "at most", 2, ratios, note=note)
