"""OpenTelemetry spans of a session's saves: a listener for its events. Needs ``ftckpt[otel]``.

A save is one span, ``ftckpt.save``, with a child for every stage. They are written when the save has
ended, with the times that its events had: a listener must be quick, and stages overlap threads.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import TYPE_CHECKING

from ftckpt.errors import ExtraMissing
from ftckpt.events import Event
from ftckpt.meter import STAGES

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer

_AT_ONCE = 16
"""Saves that are remembered until they end; the oldest is forgotten beyond that."""


class Spans:
    """An ``Events`` listener: ``Session(..., events=both(to_logging, Spans(tracer)))``.

    ``tracer`` defaults to that of the program's provider.

    Raises ``ExtraMissing`` where ``opentelemetry-api`` is not installed.
    """

    def __init__(self, tracer: Tracer | None = None) -> None:
        try:
            from opentelemetry import trace
        except ImportError as error:
            raise ExtraMissing(
                "ExtraMissing: spans need the package opentelemetry-api, which is not installed\n"
                "  nothing was changed; install it with: pip install 'ftckpt[otel]'",
                extra="otel",
            ) from error
        self._tracer = tracer or trace.get_tracer("ftckpt")
        self._lock = threading.Lock()
        self._stages: OrderedDict[int, list[Event]] = OrderedDict()

    def __call__(self, event: Event) -> None:
        """Remember what belongs to a save; write its spans once it has ended."""
        if event.name in ("save.begun", "save.fence", "save.staged", "save.put"):
            with self._lock:
                self._stages.setdefault(event.fields["step"], []).append(event)
                if len(self._stages) > _AT_ONCE:
                    self._stages.popitem(last=False)
        elif event.name in ("save.committed", "save.failed"):
            with self._lock:
                stages = self._stages.pop(event.fields["step"], [])
            self._write(event, stages)

    def _write(self, last: Event, stages: list[Event]) -> None:
        from opentelemetry import trace
        from opentelemetry.trace import Status, StatusCode

        told = last.fields
        begun_s = last.unix_s - told["total_s"]
        root = self._tracer.start_span(
            "ftckpt.save", start_time=_ns(begun_s), attributes={"ftckpt.step": told["step"]}
        )
        inside = trace.set_span_in_context(root)
        since_s = begun_s
        for event in stages:
            name = _NAMES[event.name]
            fence = event.name == "save.fence"
            from_s = event.unix_s - event.fields["seconds"] if fence else since_s
            attributes = {f"ftckpt.{key}": value for key, value in event.fields.items() if key != "step"}
            self._tracer.start_span(name, inside, start_time=_ns(from_s), attributes=attributes).end(
                _ns(event.unix_s)
            )
            since_s = since_s if fence else event.unix_s
        if last.name == "save.failed":
            root.set_attribute("ftckpt.stage", told["stage"])
            root.set_status(Status(StatusCode.ERROR, told["error"]))
        else:
            self._tracer.start_span("ftckpt.settle", inside, start_time=_ns(since_s)).end(_ns(last.unix_s))
            kinds = [f"{kind}_bytes" for kind in ("raw", "stored", "reused")]
            for key in (*kinds, "attempt", "fragments", *(f"{stage}_s" for stage in STAGES)):
                root.set_attribute(f"ftckpt.{key}", told[key])
        root.end(_ns(last.unix_s))


_NAMES = {
    "save.begun": "ftckpt.prepare",
    "save.fence": "ftckpt.fence",
    "save.staged": "ftckpt.encode",
    "save.put": "ftckpt.put",
}
"""What had been going on until an event."""


def _ns(unix_s: float) -> int:
    return int(unix_s * 1e9)
