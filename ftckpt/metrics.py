"""Prometheus metrics of a session: a listener for its events. Needs the extra ``ftckpt[metrics]``.

Only counts what events say; it never asks a session, a store or a clock. Serving the registry is the
program's business (``prometheus_client.start_http_server``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ftckpt.errors import ExtraMissing
from ftckpt.events import Event
from ftckpt.meter import STAGES

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

_SAVE_BUCKETS_S = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500)
_STALL_BUCKETS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)


class Prometheus:
    """An ``Events`` listener: ``Session(..., events=both(to_logging, Prometheus()))``.

    ``registry`` defaults to the library's own; a registry holds one listener. Bytes that a save ``put``
    are this process's; ``raw``, ``stored`` and ``reused`` are those of the whole commit.

    Raises ``ExtraMissing`` where ``prometheus_client`` is not installed.
    """

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        try:
            from prometheus_client import REGISTRY, Counter, Gauge, Histogram
        except ImportError as error:
            raise ExtraMissing(
                "ExtraMissing: Prometheus metrics need the package prometheus_client, which is not installed\n"
                "  nothing was changed; install it with: pip install 'ftckpt[metrics]'",
                extra="metrics",
            ) from error
        into = REGISTRY if registry is None else registry
        self._committed = Counter("ftckpt_commits_total", "Saves that became readable.", registry=into)
        self._failed = Counter(
            "ftckpt_save_failures_total", "Saves that did not, by stage.", ["stage"], registry=into
        )
        self._row = Gauge("ftckpt_failed_saves_in_row", "Failed saves since the last commit.", registry=into)
        self._stale = Counter(
            "ftckpt_stale_saves_total", "Saves in which a trained component had not changed.", registry=into
        )
        self._seconds = Histogram(
            "ftckpt_save_seconds",
            "From the call of save() until the step was readable.",
            buckets=_SAVE_BUCKETS_S,
            registry=into,
        )
        self._stall = Histogram(
            "ftckpt_save_stall_seconds",
            "Training stood still in save().",
            buckets=_STALL_BUCKETS_S,
            registry=into,
        )
        self._fence = Histogram(
            "ftckpt_fence_seconds",
            "Training was held back by a fence.",
            buckets=_STALL_BUCKETS_S,
            registry=into,
        )
        self._fenced = Counter("ftckpt_fence_staged_bytes_total", "Bytes that fences staged.", registry=into)
        self._stages = Counter(
            "ftckpt_save_stage_seconds_total",
            "Where the seconds of saves went; threads add up.",
            ["stage"],
            registry=into,
        )
        self._bytes = Counter(
            "ftckpt_save_bytes_total",
            "Bytes of commits: raw, stored, reused; put by this process.",
            ["kind"],
            registry=into,
        )
        self._packs = Counter("ftckpt_packs_total", "Packs that this process put.", registry=into)
        self._step = Gauge("ftckpt_committed_step", "The newest step that is readable.", registry=into)
        self._when = Gauge("ftckpt_committed_timestamp_seconds", "When it became readable.", registry=into)
        self._finished = Gauge("ftckpt_finished_step", "The last finished optimizer step.", registry=into)
        self._interval = Gauge("ftckpt_save_interval_seconds", 'What save_every="auto" chose.', registry=into)
        self._restores = Counter("ftckpt_restores_total", "Restores on entering.", registry=into)
        self._restored = Counter("ftckpt_restored_bytes_total", "Bytes fetched by them.", registry=into)
        self._heals = Counter("ftckpt_heals_total", "States taken from living peers.", registry=into)
        self._retries = Counter("ftckpt_store_retries_total", "Store calls tried again.", registry=into)
        self._freed = Counter("ftckpt_collected_bytes_total", "Bytes that collections freed.", registry=into)
        self._on: Mapping[str, Callable[[Event], None]] = {
            "save.committed": self._on_committed,
            "save.failed": self._on_failed,
            "save.stale": lambda _event: self._stale.inc(),
            "save.begun": lambda event: self._stall.observe(event.fields["capture_s"]),
            "save.put": self._on_put,
            "save.fence": self._on_fence,
            "save.interval": lambda event: self._interval.set(event.fields["seconds"]),
            "session.step": lambda event: self._finished.set(event.fields["step"]),
            "session.restored": self._on_restored,
            "session.healed": lambda _event: self._heals.inc(),
            "store.retry": lambda _event: self._retries.inc(),
            "gc.collected": lambda event: self._freed.inc(event.fields["freed_bytes"]),
        }

    def __call__(self, event: Event) -> None:
        """Count one event; those it does not know are let pass."""
        if event.name in self._on:
            self._on[event.name](event)

    def _on_committed(self, event: Event) -> None:
        told: Mapping[str, Any] = event.fields
        self._committed.inc()
        self._row.set(0)
        self._seconds.observe(told["total_s"])
        self._step.set(told["step"])
        self._when.set(event.unix_s)
        for kind in ("raw", "stored", "reused"):
            self._bytes.labels(kind).inc(told[f"{kind}_bytes"])
        for stage in STAGES:
            self._stages.labels(stage).inc(told[f"{stage}_s"])

    def _on_failed(self, event: Event) -> None:
        self._failed.labels(event.fields["stage"]).inc()
        self._row.inc()

    def _on_put(self, event: Event) -> None:
        self._packs.inc(event.fields["packs"])
        self._bytes.labels("put").inc(event.fields["bytes"])

    def _on_fence(self, event: Event) -> None:
        self._fence.observe(event.fields["seconds"])
        self._fenced.inc(event.fields["staged_bytes"])

    def _on_restored(self, event: Event) -> None:
        self._restores.inc()
        self._restored.inc(event.fields["bytes"])
        self._finished.set(event.fields["step"])
