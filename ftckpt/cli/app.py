"""The command line as a whole: which commands there are.

Each command is a module of this package. Other packages (chaos, integrations) join by entry points
of the group ``ftckpt.commands``, each a ``typer.Typer``; they are imported when they are asked for.
"""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points
from typing import Any

import typer
from typer.core import TyperGroup

from ftckpt.cli.agent import agent
from ftckpt.cli.copy import copy
from ftckpt.cli.diff import diff
from ftckpt.cli.export import export
from ftckpt.cli.fork import fork
from ftckpt.cli.gc import gc
from ftckpt.cli.import_ import import_
from ftckpt.cli.ls import ls
from ftckpt.cli.resume import resume
from ftckpt.cli.run import run
from ftckpt.cli.show import show
from ftckpt.cli.verify import verify

GROUP = "ftckpt.commands"


def joined() -> dict[str, EntryPoint]:
    """Commands that other packages bring, by name."""
    return {point.name: point for point in entry_points(group=GROUP)}


class Commands(TyperGroup):
    """Our own commands, then those that joined."""

    def list_commands(self, ctx: Any) -> list[str]:
        own = super().list_commands(ctx)
        return [*own, *sorted(joined().keys() - set(own))]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        own = super().get_command(ctx, cmd_name)
        if own is not None or (point := joined().get(cmd_name)) is None:
            return own
        command = typer.main.get_command(point.load())
        command.name = cmd_name
        return command


app = typer.Typer(
    name="ftckpt",
    cls=Commands,
    help="Checkpoints for training on machines that die. A run is everything under one address.",
    epilog="Start with: ftckpt run RUN -- python train.py",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,  # a traceback with local values could show a credential
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode=None,
)
app.command(short_help="Start a job, or go on with it, under a supervisor.")(run)
app.command(short_help="Go on with a run, from nothing but its address.")(resume)
app.command(short_help="List the commits of a run.")(ls)
app.command(short_help="Show what a commit holds and who wrote it.")(show)
app.command(short_help="Read and check every byte.")(verify)
app.command(short_help="Compare two steps, leaf by leaf.")(diff)
app.command(short_help="Copy a run, or one step of it, to another address.")(copy)
app.command(short_help="Begin a new run from a step of another.")(fork)
app.command(short_help="Write a step as a checkpoint of another format.")(export)
app.command("import", short_help="Make a run of a checkpoint of another format.")(import_)
app.command(short_help="Delete what nothing needs.")(gc)
app.command(short_help="Bring what a tier of this machine holds to the run.")(agent)
