"""``ftckpt gc``: delete what nothing needs."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ftckpt.cli.common import (
    Address,
    AsJson,
    OneWriter,
    StoreOptions,
    busy,
    locate,
    opening,
    parse_options,
    print_json,
    reporting,
    size,
)
from ftckpt.errors import ObjectNotFound
from ftckpt.manifest import Intent, Pin

if TYPE_CHECKING:
    from ftckpt.gc import Collected
    from ftckpt.store.api import ObjectStore


def gc(
    run: Address,
    keep: Annotated[
        int | None,
        typer.Option("--keep", min=1, metavar="N", help="Keep the newest N commits; all if left out."),
    ] = None,
    keep_every: Annotated[
        int | None,
        typer.Option("--keep-every", min=1, metavar="K", help="With --keep: also every step divisible by K."),
    ] = None,
    abandoned: Annotated[
        bool, typer.Option("--abandoned", help="Also commits of attempts that were left behind (orphans).")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would go; delete nothing.")] = False,
    drop_pin: Annotated[
        list[str] | None,
        typer.Option(
            "--drop-pin", metavar="ID", help="Let go of a pin whose holder is dead; collect nothing."
        ),
    ] = None,
    drop_intent: Annotated[
        list[str] | None,
        typer.Option(
            "--drop-intent",
            metavar="ID",
            help="Forget a collection whose collector is dead; collect nothing.",
        ),
    ] = None,
    as_json: AsJson = False,
    store_option: StoreOptions = None,
    allow_unconditional: OneWriter = False,
) -> None:
    """Delete what no commit needs: leavings of failed saves, and with --keep old commits too.

    Safe beside a running job. Commits that a start, a reader or an agent has pinned are kept; the
    answer lists the pins, so that those of dead holders can be dropped.

    Example: ftckpt gc /data/runs/grpo-1 --keep 3 --keep-every 1000 --dry-run
    """
    if keep_every is not None and keep is None:
        raise typer.BadParameter("needs --keep: without it all commits are kept", param_hint="--keep-every")
    dropping = bool(drop_pin or drop_intent)
    if dropping and (keep is not None or abandoned or dry_run):
        raise typer.BadParameter(
            "stands alone; collect with a second call", param_hint="--drop-pin / --drop-intent"
        )
    with reporting(as_json=as_json), _writing(run, store_option, allow_unconditional) as store:
        if dropping:
            answer = _drop(store, drop_pin or (), drop_intent or ())
        else:
            answer = _collect(store, keep, keep_every, abandoned=abandoned, dry_run=dry_run, quiet=as_json)
        if as_json:
            print_json(answer)


@contextmanager
def _writing(address: str, given: Sequence[str] | None, one_writer: bool) -> Iterator[ObjectStore]:
    from ftckpt.attempts import find_run

    with opening(locate(address), parse_options(given), one_writer=one_writer) as store:
        find_run(store)
        yield store


def _collect(
    store: ObjectStore,
    keep: int | None,
    keep_every: int | None,
    *,
    abandoned: bool,
    dry_run: bool,
    quiet: bool,
) -> dict[str, Any]:
    from ftckpt.attempts import read_intents, read_pins
    from ftckpt.gc import collect
    from ftckpt.retention import Keep

    with busy("collecting"):
        done = collect(
            store,
            Keep(last=keep, every=keep_every),
            intent_id=uuid.uuid4().hex,
            abandoned=abandoned,
            dry_run=dry_run,
        )
        pins, intents = read_pins(store), read_intents(store)
    if not quiet:
        _tell(store.uri, done, pins, intents, dry_run=dry_run)
    return {
        "run": store.uri,
        "dry_run": dry_run,
        "collected": done.victims,
        "kept": done.kept,
        "objects": done.objects,
        "freed_bytes": done.freed_bytes,
        "pins": pins,
        "intents": intents,
    }


def _tell(uri: str, done: Collected, pins: list[Pin], intents: list[Intent], *, dry_run: bool) -> None:
    verb = "would delete" if dry_run else "deleted"
    print(
        f"{uri}: {verb} {len(done.victims)} commits, {len(done.objects)} objects, {size(done.freed_bytes)}; "
        f"{len(done.kept)} commits stay"
    )
    for at in done.victims:
        print(f"  {verb} {at}")
    for pin in pins:
        print(f"  pin {pin.pin} holds step {pin.step} of attempt {pin.attempt} ({pin.kind}, {pin.holder})")
    for intent in intents:
        print(f"  collection {intent.intent} is open: under way, or its collector died")


def _drop(store: ObjectStore, pins: Sequence[str], intents: Sequence[str]) -> dict[str, Any]:
    """Let go of what is named, all or none of it. What is not there is an error: it may be mistyped."""
    from ftckpt import layout
    from ftckpt.attempts import read_intents, read_pins

    there = {
        "pin": [pin.pin for pin in read_pins(store)],
        "intent": [intent.intent for intent in read_intents(store)],
    }
    for kind, named in (("pin", pins), ("intent", intents)):
        for name in named:
            if name not in there[kind]:
                raise ObjectNotFound(
                    f"ObjectNotFound: {store.uri} has no {kind} {name!r}\n"
                    f"  it has: {', '.join(there[kind]) or 'none'}\n  nothing was changed",
                    op="drop",
                    key=name,
                    uri=store.uri,
                )
    store.delete([*map(layout.pin_key, pins), *map(layout.intent_key, intents)])
    return {"run": store.uri, "dropped_pins": list(pins), "dropped_intents": list(intents)}
