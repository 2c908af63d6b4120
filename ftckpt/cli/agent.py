"""``ftckpt agent``: bring what a tier holds to the far store, whoever has died meanwhile."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import TYPE_CHECKING, Annotated

import typer

from ftckpt.cli.common import (
    Address,
    AsJson,
    OneWriter,
    StoreOptions,
    locate,
    opening,
    parse_options,
    print_json,
    reporting,
    size,
)
from ftckpt.clock import Clock, SystemClock
from ftckpt.errors import FtckptError, first_line
from ftckpt.events import Event

if TYPE_CHECKING:
    from ftckpt.agent import Agent
    from ftckpt.tiers import Tier as NearTier

COPIES = 4
IDLE_S = 0.1
WAITING_S = 0.5
WATCH_S = 5.0
LONGEST_PAUSE_S = 5.0

Tier = Annotated[
    str,
    typer.Option(
        "--tier", metavar="DIR", help="The folder of this machine that saves go to first.", show_default=False
    ),
]


def agent(
    run: Address,
    tier: Tier,
    once: Annotated[bool, typer.Option("--once", help="One pass over what is owed now, then end.")] = False,
    as_json: AsJson = False,
    store_option: StoreOptions = None,
    allow_unconditional: OneWriter = False,
) -> None:
    """Copy committed steps from a tier to the run, oldest first, and finish what dead trainers staged.

    `ftckpt run --tier` starts one and keeps it running. It outlives the trainer: it ends when nobody
    works with the tier any more and the run has everything. It may be killed and started again at
    any moment.

    Example: ftckpt agent s3://bucket/runs/grpo-1 --tier /dev/shm/ftckpt/grpo-1 --once
    """
    with reporting(as_json=as_json):
        options = parse_options(store_option)
        with opening(locate(run), options, one_writer=allow_unconditional) as far:
            from ftckpt.agent import Agent
            from ftckpt.attempts import find_run
            from ftckpt.tiers import open_tier

            find_run(far)
            tell = _tell_json if as_json else _tell
            near = open_tier(tier, lambda _event: None)
            with ThreadPoolExecutor(COPIES, "ftckpt-agent") as pool:

                def together(copies: Sequence[Callable[[], int]]) -> list[int]:
                    return list(pool.map(lambda copy: copy(), copies))

                one = Agent(
                    near,
                    far,
                    nonce=lambda: uuid.uuid4().hex,
                    clock=SystemClock(),
                    events=tell,
                    together=together,
                )
                if once:
                    waiting = one.drain().waiting
                    for at in waiting:
                        tell(Event("agent.waiting", {"step": at.step, "attempt": at.attempt}))
                    code = 1 if waiting else 0
                else:
                    code = _stay(one, near, tell, SystemClock())
    raise typer.Exit(code)


def _stay(one: Agent, near: NearTier, tell: Callable[[Event], None], clock: Clock) -> int:
    """Drain until nobody works with the tier and nothing is owed."""
    with ExitStack() as stack:
        try:
            stack.enter_context(near.agent_life(f"{os.getpid()}-{uuid.uuid4().hex}"))
        except BlockingIOError:
            tell(Event("agent.not_needed", {"tier": str(near.folder)}))
            return 0
        return _work(one, near, tell, clock)


def _work(one: Agent, near: NearTier, tell: Callable[[Event], None], clock: Clock) -> int:
    from ftckpt.gc import owed

    watched_s, pause_s = -WATCH_S, IDLE_S
    while True:
        alone = not near.living()
        try:
            if clock.now_s() - watched_s >= WATCH_S:
                one.watch()
                watched_s = clock.now_s()
            done = one.drain()
            stuck = done.waiting and not done.committed and not done.given_up
            pause_s = min(2 * pause_s, WAITING_S) if stuck else IDLE_S
        except FtckptError as error:
            tell(Event("agent.failed", {"error": first_line(error)}))
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        if alone and not owed(near.store):
            return 0
        clock.sleep(pause_s)


def _tell_json(event: Event) -> None:
    print_json({"event": event.name, "unix_s": event.unix_s, **event.fields})


def _tell(event: Event) -> None:
    said = event.fields
    match event.name:
        case "agent.drained":
            text = f"step {said['step']} of attempt {said['attempt']}: {size(said['bytes'])} in {said['seconds']:g} s"
        case "agent.aborted":
            text = f"step {said['step']} of attempt {said['attempt']} will not be there: {said['why']}"
        case "agent.finished":
            text = (
                f"step {said['step']} of attempt {said['attempt']}: finished for {said['writer']}, which died"
            )
        case "agent.waiting":
            text = f"step {said['step']} of attempt {said['attempt']} waits for somebody who lives"
        case "agent.fenced":
            text = f"attempt {said['newest']} was claimed"
        case "agent.failed":
            text = f"trying again: {said['error']}"
        case "agent.not_needed":
            text = f"an agent is at work in {said['tier']}"
        case "gc.collected":
            text = f"collected steps {', '.join(map(str, said['steps']))}" if said["steps"] else ""
        case "gc.failed":
            text = f"collecting failed: {said['error']}"
        case _:
            text = ""
    if text:
        print(text, flush=True)
