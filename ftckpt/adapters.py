"""How a session is put around somebody's trainer: a small protocol, found by entry point.

An adapter says what the state is, how the session should be set, and how the trainer is told where
steps end. The core knows no trainer; whoever writes one registers an adapter under the entry point
group ``ftckpt.adapters``.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from importlib.metadata import entry_points
from typing import Any, Protocol

from ftckpt.errors import SettingsError
from ftckpt.session import Session

GROUP = "ftckpt.adapters"


class Adapter(Protocol):
    """What makes a trainer wrappable. Stateless; one object for all trainers of a kind."""

    def matches(self, trainer: Any) -> bool:
        """Whether this adapter knows that trainer. Must not import what is not imported yet."""
        ...

    def state(self, trainer: Any) -> Mapping[str, object]:
        """Everything that must come back after a death, by component name."""
        ...

    def settings(self, trainer: Any) -> Mapping[str, Any]:
        """Keyword settings for the ``Session``; what the caller of ``wrap`` gives wins."""
        ...

    def connect(self, trainer: Any, session: Session) -> None:
        """Make the trainer take its steps from ``session.steps``. Called once the session is entered
        and the state is restored.
        """
        ...


class _Wrapped(Session):
    """A session that connects its trainer when it is entered."""

    def __init__(self, adapter: Adapter, trainer: Any, uri: str | os.PathLike[str], **settings: Any) -> None:
        super().__init__(uri, adapter.state(trainer), **settings)
        self._adapter, self._trainer = adapter, trainer

    def __enter__(self) -> Session:  # type: ignore[override]
        super().__enter__()
        self._adapter.connect(self._trainer, self)
        return self


def wrap(trainer: Any, uri: str | os.PathLike[str], **settings: Any) -> Session:
    """A session around a trainer: ``with ftckpt.wrap(trainer, uri) as ckpt: trainer.train()``.

    ``settings`` are those of ``Session`` and win over the adapter's.

    Raises:
        SettingsError: no adapter knows this trainer.
    """
    adapters = list(found())
    for adapter in adapters:
        if adapter.matches(trainer):
            return _Wrapped(adapter, trainer, uri, **{**adapter.settings(trainer), **settings})
    kind = type(trainer)
    raise SettingsError(
        f"SettingsError: no adapter knows {kind.__module__}.{kind.__qualname__}\n"
        f"  installed adapters: {', '.join(ep.name for ep in entry_points(group=GROUP)) or 'none'}\n"
        "  use ftckpt.Session(uri, state) around your loop, or register an ftckpt.adapters.Adapter",
        trainer=kind.__qualname__,
    )


def found() -> Iterable[Adapter]:
    """Every installed adapter."""
    for point in sorted(entry_points(group=GROUP), key=lambda point: point.name):
        yield point.load()
