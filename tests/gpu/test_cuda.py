"""Saves of a state that lives on a CUDA device. Skipped where there is none; ``run.sh`` runs them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import ftckpt
from ftckpt.sources import PIECE_BYTES, PinnedRing, Rings, Sources, pieces
from tests.session.test_fences import OPTIMIZERS, Job, committed, held_save

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_what_an_optimizer_changes_after_save_is_committed_as_it_was(tmp_path: Path, kind: str) -> None:
    """Case B1 on a device: parameters, moments, buffers and foreign tensors."""
    job = Job(tmp_path / "run", kind, device="cuda")

    with held_save(job) as handle:
        before = job.remembered()
        job.ema.fill_(7)
        for _ in range(3):
            job.step()
        job.gate.release()
        handle.wait(30)

    run = committed(job)
    for name, tensor in before.items():
        assert torch.equal(run.tensor(f"actor.{name}"), tensor), name
    assert torch.equal(run.tensor("ema.value"), torch.zeros(64))
    assert job.fences()[0].endswith(".step")


def test_a_device_state_is_restored_bit_for_bit(tmp_path: Path) -> None:
    job = Job(tmp_path / "run", device="cuda")
    with job.session as ckpt:
        for _ in range(3):
            job.step()
        ckpt.save(3).wait(30)
        saved = job.remembered()
    fresh = Job(tmp_path / "unused", device="cuda")

    ftckpt.restore(job.folder, {"actor": fresh.model}, step=3)

    assert all(torch.equal(value, saved[name]) for name, value in fresh.remembered().items())


def test_a_copy_waits_for_the_kernels_that_were_queued_before_it_and_for_no_later_ones() -> None:
    data = torch.zeros(PIECE_BYTES, dtype=torch.uint8, device="cuda")
    torch.cuda._sleep(200_000_000)
    data.fill_(3)

    source = Sources(Rings()).of(data)
    assert source is not None
    into = np.empty(PIECE_BYTES, np.uint8)
    torch.cuda._sleep(2_000_000_000)
    source.copy(0, PIECE_BYTES, into)

    assert (into == 3).all()
    assert not torch.cuda.current_stream().query(), "the trainer's stream was not waited for"
    torch.cuda.synchronize()


def test_many_bytes_go_through_a_small_pinned_ring() -> None:
    made: list[PinnedRing] = []

    def make(device: torch.device) -> PinnedRing:
        made.append(PinnedRing(device, buffers=2, buffer_bytes=1 << 20))
        return made[-1]

    rings = Rings(make)
    data = torch.randint(0, 256, (64 << 20,), dtype=torch.uint8, device="cuda")
    other = torch.zeros(5, device="cuda")

    source = Sources(rings).of(data)
    assert source is not None
    found = np.concatenate([np.frombuffer(part, np.uint8).copy() for part in pieces(source)])

    assert np.array_equal(found, data.cpu().numpy())
    assert rings.of(other.device) is made[0], "one ring a device"
    assert len(made) == 1
