"""``python -m ftckpt.integrations.grpo RUN [flags]``: train, saving to RUN and going on from it.

Alone as it stands; as a member of a job when ``ftckpt run RUN --groups N -- python -m …`` starts
it. This is the only file of the trainer that looks at how the process was launched.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import torch
import torch.distributed as dist

import ftckpt
from ftckpt.elastic import Launch
from ftckpt.errors import FtckptError, SettingsError, in_words
from ftckpt.events import Events, JsonLines, both, to_logging
from ftckpt.integrations.grpo.config import GRPOConfig, add_flags, from_flags
from ftckpt.integrations.grpo.digest import digests, write_digests
from ftckpt.integrations.grpo.trainer import GRPOTrainer
from ftckpt.slots import Alone, SlotGroup


def main(argv: Sequence[str] | None = None) -> int:
    """The command; its exit code."""
    parser = _parser()
    options = parser.parse_args(argv)
    try:
        launch = Launch.from_env()
        config = from_flags(vars(options))
        run = options.run or launch.run
        if run is None:
            raise SettingsError("no RUN was given\n  say where the run is kept: a folder, file://… or s3://…")
        _make_deterministic()
        with ExitStack() as stack:
            events = _events(options.events, launch, stack)
            _train(config, run, launch, events, options.digest)
    except FtckptError as error:
        print(in_words(error), file=sys.stderr)
        return 2 if isinstance(error, SettingsError) else 1
    return 0


def _train(config: GRPOConfig, run: str, launch: Launch, events: Events, digest: str | None) -> None:
    config.check_world(launch.world)
    if launch.world > 1:
        dist.init_process_group("cpu:gloo,cuda:nccl" if config.device.startswith("cuda") else "gloo")
    try:
        trainer = GRPOTrainer(config, _group(config, launch, events))
        with ftckpt.wrap(trainer, run, events=events):
            trainer.train()
        if digest is not None:
            found = digests(trainer)  # a collective: every rank of the group takes part
            if launch.rank == 0:
                write_digests(Path(digest.replace("{group}", launch.group)), found)
    finally:
        if launch.world > 1:
            dist.destroy_process_group()


def _group(config: GRPOConfig, launch: Launch, events: Events) -> SlotGroup:
    if launch.lighthouse is None:
        return Alone(config.slots, launch.group)
    from ftckpt.elastic import ReplicaGroup

    return ReplicaGroup(launch, slots=config.slots, events=events)


def _events(path: str | None, launch: Launch, stack: ExitStack) -> Events:
    """The log always; a file too if one was named. Appended to: several members may share it."""
    if path is None:
        return to_logging
    file = Path(path.replace("{group}", launch.group).replace("{rank}", str(launch.rank)))
    return both(to_logging, JsonLines(stack.enter_context(file.open("a", encoding="utf-8"))))


def _make_deterministic() -> None:
    """Equal bits need kernels that keep the order of their sums: one thread, no racing reductions."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(mode=True)
    torch.set_num_threads(1)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m ftckpt.integrations.grpo",
        description="Train a policy with GRPO on a reasoning-gym task, and survive.",
    )
    parser.add_argument(
        "run",
        metavar="RUN",
        nargs="?",
        help="where the run is kept: a folder, file://… or s3://… [$FTCKPT_RUN]",
    )
    parser.add_argument(
        "--digest",
        metavar="FILE",
        help="at the end, write SHA-256 sums of weights, moments, RNG and data position as JSON"
        " ({group} in the name becomes the group's)",
    )
    parser.add_argument(
        "--events",
        metavar="FILE",
        help="append what happened as JSON lines ({group} and {rank} in the name are filled in)",
    )
    add_flags(parser)
    return parser


if __name__ == "__main__":
    sys.exit(main())
