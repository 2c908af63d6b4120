"""Deltas in real runs: chains and their ends, restores, collecting, damage, and how many bytes a step
costs. Every run here is a ``Session`` over a folder.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch

import ftckpt
from ftckpt.boxes import Box
from ftckpt.codec import DELTA, MAX_CHAIN, RAW, Codec
from ftckpt.errors import ChunkCorrupt, ObjectDamaged, RecordCorrupt, StoreUnavailable
from ftckpt.events import Event
from ftckpt.gc import collect
from ftckpt.manifest import ChunkRecord, Fragment, PackRef, decode, encode
from ftckpt.reader import ReadSettings, check_commit, read_fragments, verify_commit
from ftckpt.retention import Keep
from ftckpt.store.api import Buffer
from ftckpt.store.local import LocalStore
from ftckpt.writer import may_extend
from tests.core.records import PACK, chunk, fragment, leaf

DELTAS = Codec("delta", max_chain=8)


def silent(_event: Event) -> None:
    """Nobody listens."""


class Policy:
    """Some bf16 weights, all of which change a little in every step."""

    def __init__(self, rows: int = 256, columns: int = 96, above: float = 2.5) -> None:
        self.above = above
        self.generator = torch.Generator().manual_seed(0)
        self.weight = torch.randn(rows, columns, generator=self.generator).mul(0.02).bfloat16()
        self.bias = torch.randn(8192, generator=self.generator).mul(0.02).bfloat16()
        self.state = {"policy": {"weight": self.weight, "bias": self.bias}}

    def step(self) -> None:
        for part in (self.weight, self.bias):
            change = torch.randn(part.shape, generator=self.generator)
            part.mul_(1 + 0.01 * (change > self.above))

    def copy(self) -> list[torch.Tensor]:
        return [self.weight.clone(), self.bias.clone()]


def train(
    folder: Path, steps: int, policy: Policy | None = None, **options
) -> tuple[Policy, dict[int, list[torch.Tensor]]]:
    """Save ``steps`` steps after the restored one (or after 0); the state of each."""
    policy = policy or Policy()
    options = {"codec": DELTAS, "chunk_bytes": 4096, "keep": None, "events": silent} | options
    seen = {}
    with ftckpt.Session(folder, policy.state, **options) as session:
        begin = session.finished_step
        seen[begin] = policy.copy()
        for step in range(begin + 1, begin + 1 + steps):
            policy.step()
            seen[step] = policy.copy()
            session.save(step).wait(30)
    return policy, seen


def restored(folder: Path, step: int | None = None) -> list[torch.Tensor]:
    policy = Policy()
    for part in (policy.weight, policy.bias):
        part.zero_()
    ftckpt.restore(folder, policy.state, step=step)
    return policy.copy()


def same(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return all(
        torch.equal(a.view(torch.int16), b.view(torch.int16)) for a, b in zip(left, right, strict=True)
    )


def fragments(folder: Path, step: int) -> list[Fragment]:
    with ftckpt.open(folder) as run:
        return read_fragments(run.store, run.commit(step))


def chunks(folder: Path, step: int) -> Iterator[tuple[str, Fragment, ChunkRecord]]:
    """Every chunk of a tensor of a step."""
    for part in fragments(folder, step):
        for record in part.leaves:
            if record.kind == "tensor" and record.name.startswith("policy"):
                for box in record.boxes:
                    yield from ((record.name, part, one) for one in box.chunks)


@pytest.fixture(scope="module")
def long(tmp_path_factory) -> tuple[Path, dict[int, list[torch.Tensor]]]:
    folder = tmp_path_factory.mktemp("long") / "run"
    return folder, train(folder, 12)[1]


# --- chains --------------------------------------------------------------------------------------


def test_every_step_of_a_chain_restores_bit_for_bit(long):
    folder, seen = long

    for step, state in seen.items():
        assert same(restored(folder, step), state)
    with ftckpt.open(folder) as run:
        assert run.verify() == []


def test_chains_grow_up_to_eight_bases_and_no_save_writes_all_of_them_whole(long):
    """Steps are rebased one chunk here, one there: no save has a pause for it."""
    folder, seen = long
    lengths = {step: [len(one.chain) for _, _, one in chunks(folder, step)] for step in seen}

    assert set(lengths[0]) == {0}
    assert max(max(found) for found in lengths.values()) == 8
    for step in range(1, 13):
        whole = sum(length == 0 for length in lengths[step])
        assert whole <= len(lengths[step]) * 0.6
    first_whole = [
        next(step for step in range(1, 13) if lengths[step][number] == 0) for number in range(len(lengths[0]))
    ]
    assert len(set(first_whole)) > 3


@pytest.mark.parametrize("max_chain", [1, 2, 5, 8, MAX_CHAIN])
def test_no_chain_exceeds_its_bound_and_its_ends_are_spread(max_chain):
    lengths = []
    for first in range(256):
        record = ChunkRecord(0, 1, bytes([first]) * 16, bytes(16), RAW, 0, 0, 100)
        while may_extend(record, max_chain):
            record = msgspec.structs.replace(record, codec=DELTA, base=record, size=1)
        lengths.append(len(record.chain))

    assert max(lengths) == max_chain and min(lengths) == max_chain - max_chain // 2
    assert len(set(lengths)) == max_chain // 2 + 1


@pytest.mark.parametrize("size, bases", [(10, 8), (20, 5), (40, 2), (60, 1), (100, 1)])
def test_a_chain_ends_before_its_deltas_are_larger_than_what_they_began_with(size, bases):
    """So reading it never costs more than about twice the bytes."""
    record = ChunkRecord(0, 1, bytes(16), bytes(16), RAW, 0, 0, 100)

    while may_extend(record, 8):
        record = msgspec.structs.replace(record, codec=DELTA, base=record, size=size)

    assert len(record.chain) == bases


def test_large_deltas_make_short_chains_and_every_step_still_restores(tmp_path):
    """A tenth of the weights changes at every step: no step takes more than twice the bytes of the first."""
    _, seen = train(tmp_path / "run", 6, Policy(above=1.3))

    def read_bytes(step: int) -> int:
        return sum(
            one.size + sum(base.size for base in one.chain) for _, _, one in chunks(tmp_path / "run", step)
        )

    for step, state in seen.items():
        assert same(restored(tmp_path / "run", step), state)
        assert read_bytes(step) <= 2.1 * read_bytes(0)


def test_without_chains_every_chunk_is_whole(tmp_path):
    for codec in ("raw", "zstd", "planes", Codec("delta", max_chain=0), Codec(base_budget_bytes=0)):
        folder = tmp_path / str(hash(codec))
        _, seen = train(folder, 2, codec=codec)

        assert same(restored(folder), seen[2])
        assert all(one.base is None for _, _, one in chunks(folder, 2))


def test_after_a_resume_changed_chunks_are_whole_and_deltas_begin_anew(tmp_path):
    train(tmp_path / "run", 2)
    _, seen = train(tmp_path / "run", 2)

    assert same(restored(tmp_path / "run", 4), seen[4])
    assert {len(one.chain) for _, _, one in chunks(tmp_path / "run", 3)} == {0}
    assert {len(one.chain) for _, _, one in chunks(tmp_path / "run", 4)} == {1}


def test_what_has_no_room_in_the_budget_is_whole(tmp_path):
    """Six of sixteen chunks are deltas, and so it stays."""
    _, seen = train(tmp_path / "run", 3, codec=Codec("delta", base_budget_bytes=26_000))

    for step in (1, 2, 3):
        assert sum(one.codec == DELTA for _, _, one in chunks(tmp_path / "run", step)) == 6
    assert same(restored(tmp_path / "run"), seen[3])


def test_the_codec_left_to_choose_restores_too(tmp_path):
    _, seen = train(tmp_path / "run", 5, codec="auto")

    for step, state in seen.items():
        assert same(restored(tmp_path / "run", step), state)


class Flaky(LocalStore):
    """Refuses packs while ``down``."""

    down = False

    def create(self, key: str, body: Buffer) -> None:
        if self.down and key.startswith("packs/"):
            raise StoreUnavailable("StoreUnavailable: down")
        super().create(key, body)


def test_nothing_builds_on_a_save_that_came_to_nothing(tmp_path):
    store = Flaky(str(tmp_path / "run"))
    policy = Policy()
    options = {"codec": DELTAS, "chunk_bytes": 4096, "events": silent, "store": store}
    with ftckpt.Session(tmp_path / "run", policy.state, **options) as session:
        policy.step()
        store.down = True
        with pytest.raises(ftckpt.FtckptError, match="down"):
            session.save(1).wait(30)
        store.down = False
        for step in (2, 3):
            policy.step()
            session.save(step).wait(30)

    assert same(restored(tmp_path / "run"), policy.copy())
    assert {len(one.chain) for _, _, one in chunks(tmp_path / "run", 2)} == {0}
    assert {len(one.chain) for _, _, one in chunks(tmp_path / "run", 3)} == {1}


# --- reading -------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [1, 64 << 20])
@pytest.mark.parametrize("run_bytes", [1, 20_000, 16 << 20])
def test_any_part_is_read_through_its_chain(long, run_bytes, budget):
    """Other shardings: rows in three parts, columns in two, with chunks that are spans of rows."""
    folder, seen = long
    settings = ReadSettings(threads=3, budget_bytes=budget, run_bytes=run_bytes, gap_bytes=0)
    boxes = [Box((row, 0), (86, 96)) for row in (0, 85, 170)] + [Box((0, c), (256, 48)) for c in (0, 48)]

    with ftckpt.open(folder) as opened:
        run = ftckpt.Run(opened.store, settings)
        for box in boxes:
            part = run.tensor("policy.weight", 8, box)
            rows, columns = (slice(o, o + n) for o, n in zip(box.offset, box.extent, strict=True))
            assert same([part], [seen[8][0][rows, columns]])


def test_bases_are_fetched_with_few_requests(long):
    """Neighbours' bases are neighbours: a chain of eight takes about a request a step, not a chunk."""
    folder, _ = long
    reads: list[str] = []

    class Counting(LocalStore):
        def read(self, key, at=None):
            reads.append(key)
            return super().read(key, at)

    run = ftckpt.Run(Counting(str(folder)))
    links = sum(1 + len(one.chain) for _, _, one in chunks(folder, 4))
    run.restore(Policy().state, 4)

    packs = [key for key in reads if key.startswith("packs/")]
    assert len(packs) < links / 2


def test_collecting_keeps_the_packs_of_bases(tmp_path):
    """With one commit kept, all packs that its chains need stay, and others go."""
    _, seen = train(tmp_path / "run", 4)
    before = len(list(tmp_path.glob("run/packs/**/*-*")))

    with ftckpt.open(tmp_path / "run") as run:
        done = collect(run.store, Keep(last=1), intent_id="one")
        assert [commit.step for commit in run.commits()] == [4]
        assert run.verify() == []

    assert len(done.victims) == 4 and len(list(tmp_path.glob("run/packs/**/*-*"))) < before
    assert same(restored(tmp_path / "run"), seen[4])


def test_a_collected_session_goes_on_with_its_chains(tmp_path):
    """Retention runs beside the saves."""
    _, seen = train(tmp_path / "run", 10, keep=1)

    assert same(restored(tmp_path / "run"), seen[10])


# --- damage --------------------------------------------------------------------------------------


def flip(folder: Path, key: str, offset: int) -> None:
    path = folder / key
    path.chmod(0o644)
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def test_a_broken_base_makes_exactly_its_dependants_unreadable_and_is_named(tmp_path):
    folder = tmp_path / "run"
    train(folder, 3)
    name, part, victim = next(c for c in chunks(folder, 3) if c[0] == "policy.bias")
    anchor = victim.chain[-1]
    pack = part.packs[anchor.pack].key
    assert len(victim.chain) == 3
    flip(folder, pack, anchor.offset + anchor.size // 2)

    with ftckpt.open(folder) as run:
        for step in range(4):
            problems = run.verify(step)
            assert [(p.key, p.error.facts["leaf"], p.error.facts["start"]) for p in problems] == [
                (pack, name, victim.start)
            ]
            assert problems[0].error.facts["base"] == step
        message = problems[0].error.message
        assert name in message and pack in message and "base 3 is broken" in message
        with pytest.raises(ChunkCorrupt, match=r"policy\.bias"):
            run.tensor("policy.bias", 3)
        assert run.tensor("policy.weight", 3) is not None
        assert run.tensor("policy.bias", 3, Box((victim.stop,), (100,))) is not None


def test_a_base_whose_pack_is_absent_is_noticed_before_anything_is_touched(tmp_path):
    folder = tmp_path / "run"
    train(folder, 2)
    name, part, victim = next(chunks(folder, 2))
    pack = part.packs[victim.chain[-1].pack].key
    (folder / pack).unlink()
    policy = Policy()
    before = policy.copy()

    with ftckpt.open(folder) as run:
        with pytest.raises(ObjectDamaged, match="no tensor was touched"):
            run.restore(policy.state)
        with pytest.raises(ObjectDamaged):
            check_commit(run.store, run.commit(2))
        problems = verify_commit(run.store, run.commit(2))

    assert same(policy.copy(), before)
    assert isinstance(problems[0], ObjectDamaged) and problems[0].facts["key"] == pack
    lost = {(p.facts["leaf"], p.facts["start"]) for p in problems if isinstance(p, ChunkCorrupt)}
    assert (name, victim.start) in lost


@pytest.mark.parametrize("number", range(12))
def test_one_flipped_byte_of_any_pack_is_named_and_nothing_wrong_is_read(tmp_path, long, number):
    """Over all packs of a chain: the flip is found in every step that needs that byte."""
    folder, seen = long
    packs = sorted(folder.glob("packs/**/*-*"))
    path = packs[number * len(packs) // 12]
    body = path.read_bytes()
    mode = path.stat().st_mode
    try:
        flip(folder, str(path.relative_to(folder)), number * 7919 % len(body))
        with ftckpt.open(folder) as run:
            problems = run.verify()
        assert problems and {p.key for p in problems} == {str(path.relative_to(folder))}
        bad = {p.step for p in problems}
        for step in sorted(bad)[:1]:
            leaves = {str(p.error.facts.get("leaf")) for p in problems if p.step == step}
            if leaves <= {"rng@g0.0", "ftckpt"}:  # which a restore without a session leaves alone
                assert same(restored(folder, step), seen[step])
                continue
            with pytest.raises(ftckpt.FtckptError):
                restored(folder, step)
        for step in [step for step in seen if step not in bad][:2]:
            assert same(restored(folder, step), seen[step])
    finally:
        path.chmod(0o644)
        path.write_bytes(body)
        path.chmod(mode)


def chain(length: int, **changes) -> ChunkRecord:
    record = chunk()
    for _ in range(length):
        record = msgspec.structs.replace(record, codec=DELTA, base=record)
    return msgspec.structs.replace(record, **changes)


def test_records_with_bases_come_back():
    for length in (0, 1, 8, MAX_CHAIN):
        record = fragment(leaf(chain(length)))

        assert decode(Fragment, encode(record), "key") == record
        assert len(record.leaves[0].boxes[0].chunks[0].chain) == length


@pytest.mark.parametrize(
    "wrong",
    [
        chain(MAX_CHAIN + 1),
        chain(900),
        chain(1, base=None),
        chain(0, base=chunk()),
        chain(1, base=chunk(0, 11)),
        chain(1, base=chunk(pack=1)),
        chain(1, base=chunk(pack=-1)),
        chain(1, base=chunk(offset=1)),
        chain(1, base=chunk(size=0)),
        chain(2, base=chain(1, base=chunk(offset=-1))),
        chain(1, base=msgspec.structs.replace(chunk(), raw=b"short")),
    ],
    ids=range(11),
)
def test_bases_that_cannot_be_are_refused(wrong):
    data = encode(fragment(leaf(wrong), packs=(PackRef(PACK, 48),)))

    with pytest.raises(RecordCorrupt, match=r"actor\.weight|decode"):
        decode(Fragment, data, "key")


# --- figures -------------------------------------------------------------------------------------


class Job:
    """bf16 policy, fp32 masters, two moments, a frozen bf16 reference: the state of an RL step."""

    def __init__(self, count: int = 1 << 19) -> None:
        torch.manual_seed(0)
        self.master = torch.nn.Parameter(torch.randn(count // 512, 512) * 0.02)
        self.masters = torch.nn.ParameterDict({"w": self.master})
        self.policy = {"w": self.master.detach().bfloat16()}
        self.optim = torch.optim.AdamW([self.master], lr=1e-6)
        self.state = {
            "policy": self.policy,
            "masters": self.masters,
            "optim": self.optim,
            "reference": ftckpt.Frozen({"w": self.policy["w"].clone()}),
        }
        for _ in range(3):
            self.step()

    def step(self) -> None:
        self.master.grad = torch.randn_like(self.master) * 1e-3
        self.optim.step()
        self.policy["w"].copy_(self.master.detach())


def sizes(folder: Path, step: int) -> dict[str, tuple[int, int]]:
    with ftckpt.open(folder) as run:
        return {n: (c.raw_bytes, c.stored_bytes) for n, c in run.components(step).items()}


def test_a_second_save_after_one_step_costs_few_bytes(tmp_path, capsys):
    """One AdamW step at lr 1e-6: the bf16 policy at most 6 %, the whole at most 70 %, frozen parts 0."""
    job = Job()
    options = {"codec": DELTAS, "chunk_bytes": 1 << 18, "events": silent}
    with ftckpt.Session(tmp_path / "run", job.state, **options) as session:
        job.step()
        session.save(1).wait(30)
    first, second = sizes(tmp_path / "run", 0), sizes(tmp_path / "run", 1)

    with capsys.disabled():
        print("\n  component    raw bytes    step 0    step 1")
        for name, (raw, stored) in second.items():
            print(f"  {name:10} {raw:11}   {first[name][1] / raw:7.1%}   {stored / raw:7.1%}")
    assert second["policy"][1] <= 0.06 * second["policy"][0]
    assert second["reference"][1] == 0
    trained = [second[name] for name in ("policy", "masters", "optim")]
    assert sum(s for _, s in trained) <= 0.70 * sum(r for r, _ in trained)
    again = Job()
    ftckpt.restore(tmp_path / "run", again.state)
    assert torch.equal(again.master, job.master) and torch.equal(again.policy["w"], job.policy["w"])


def test_a_frozen_base_is_written_once_in_a_run_of_adapters(tmp_path):
    """LoRA: the base is frozen or merely never stepped, the adapters change in every step; a resume
    writes the base no second time either.
    """
    torch.manual_seed(0)
    base = torch.nn.Linear(256, 256).requires_grad_(requires_grad=False)
    adapters = torch.nn.Sequential(torch.nn.Linear(256, 4, bias=False), torch.nn.Linear(4, 256, bias=False))
    optim = torch.optim.AdamW(adapters.parameters(), lr=1e-4)
    for frozen in (True, False):
        folder = tmp_path / str(frozen)
        state = {"base": ftckpt.Frozen(base) if frozen else base, "adapters": adapters, "optim": optim}
        for last in (3, 6):
            with ftckpt.Session(folder, state, save_every=1, keep=None, events=silent) as session:
                for _ in session.steps(until=last):
                    adapters(torch.randn(4, 256)).square().mean().backward()
                    optim.step()

        written = [sizes(folder, step)["base"][1] for step in range(7)]
        assert written[0] > 0 and written[1:] == [0] * 6
        assert all(sizes(folder, step)["adapters"][1] > 0 for step in range(1, 7))
