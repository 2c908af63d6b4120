"""Prometheus metrics and OpenTelemetry spans of real sessions, with the real libraries."""

from __future__ import annotations

import sys

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

import ftckpt
from ftckpt.chaos.faults.store import Fail, Fault, FaultyStore
from ftckpt.errors import ExtraMissing, SaveError, StoreFull
from ftckpt.events import Event, both
from ftckpt.metrics import Prometheus
from ftckpt.store import open_store
from ftckpt.telemetry import Spans
from tests.session.test_fences import Job, held_save
from tests.session.toy import Heard, Toy

FULL = Fail(error=StoreFull("injected: no space"))


def job(folder, events) -> None:
    """Saves 0, 1 and 3 become readable, 2 does not."""
    fault = Fault(FULL, op="create", prefix="packs/000001/000000000002")
    store, toy = FaultyStore(open_store(folder), [fault]), Toy()
    with ftckpt.Session("ignored", toy.state, store=store, events=events) as session:
        for step in (1, 2, 3):
            toy.train(step)
            if step == 2:
                with pytest.raises(SaveError):
                    session.save(step).wait(20)
            else:
                session.save(step).wait(20)


# --- Prometheus ----------------------------------------------------------------------------------


def test_a_scrape_says_what_the_saves_of_a_job_took_and_which_failed(tmp_path):
    registry, heard = CollectorRegistry(), Heard()
    job(tmp_path / "run", both(heard, Prometheus(registry)))

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(name, labels)

    done = heard.named("save.committed")
    assert value("ftckpt_commits_total") == 3 == value("ftckpt_save_seconds_count")
    assert value("ftckpt_save_failures_total", stage="put") == 1
    assert value("ftckpt_committed_step") == value("ftckpt_finished_step") == 3
    assert value("ftckpt_failed_saves_in_row") == 0
    assert value("ftckpt_save_bytes_total", kind="raw") == sum(told["raw_bytes"] for told in done)
    assert value("ftckpt_save_bytes_total", kind="put") == sum(t["bytes"] for t in heard.named("save.put"))
    encode_s = value("ftckpt_save_stage_seconds_total", stage="encode")
    assert encode_s == pytest.approx(sum(told["encode_s"] for told in done))
    assert value("ftckpt_save_stall_seconds_count") == len(heard.named("save.begun"))


def test_every_name_is_as_prometheus_asks_for(tmp_path):
    """Prefixed, base units, and counters that end in _total; scraped text that parses."""
    registry = CollectorRegistry()
    job(tmp_path / "run", Prometheus(registry))

    families = list(text_string_to_metric_families(generate_latest(registry).decode()))

    assert families
    for family in families:
        assert family.name.startswith("ftckpt_") and family.documentation.endswith("."), family
        assert not family.name.endswith(("_ms", "_mb", "_s", "_kb")), family.name
        if family.type == "counter":
            assert all(s.name.endswith(("_total", "_created")) for s in family.samples), family.name


def test_fences_and_failures_in_a_row_are_seen_while_they_last(tmp_path):
    registry = CollectorRegistry()
    held = Job(tmp_path / "run")
    metrics = Prometheus(registry)
    held.session._events = both(held.session._events, metrics)
    with held_save(held) as handle:
        held.step()
        held.gate.release()
        handle.wait(20)
    metrics(Event("save.failed", {"step": 2, "stage": "put", "error": "x", "total_s": 1.0}))
    metrics(Event("a.later.version", {"says": "something new"}))

    assert registry.get_sample_value("ftckpt_fence_seconds_count") == 1
    assert registry.get_sample_value("ftckpt_fence_staged_bytes_total") > 0
    assert registry.get_sample_value("ftckpt_failed_saves_in_row") == 1


# --- OpenTelemetry -------------------------------------------------------------------------------


@pytest.fixture
def exporter():
    return InMemorySpanExporter()


@pytest.fixture
def tracer(exporter):
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    yield provider.get_tracer("test")
    provider.shutdown()


def test_a_save_is_a_span_whose_stages_follow_each_other_inside_it(tmp_path, exporter, tracer):
    job(tmp_path / "run", Spans(tracer))

    spans = exporter.get_finished_spans()
    roots = {span.attributes["ftckpt.step"]: span for span in spans if span.name == "ftckpt.save"}
    assert sorted(roots) == [0, 1, 2, 3]
    root = roots[3]
    children = [span for span in spans if span.parent and span.parent.span_id == root.context.span_id]
    assert [c.name for c in children] == ["ftckpt.prepare", "ftckpt.encode", "ftckpt.put", "ftckpt.settle"]
    times = [root.start_time] + [c.end_time for c in children]
    assert times == sorted(times) and children[-1].end_time == root.end_time
    assert all(root.start_time <= c.start_time <= c.end_time for c in children)
    assert root.attributes["ftckpt.raw_bytes"] > 0 and root.status.status_code is not StatusCode.ERROR


def test_a_failed_save_is_a_span_with_an_error_and_its_stage(tmp_path, exporter, tracer):
    job(tmp_path / "run", Spans(tracer))

    (failed,) = [s for s in exporter.get_finished_spans() if s.status.status_code is StatusCode.ERROR]
    assert failed.attributes["ftckpt.step"] == 2 and failed.attributes["ftckpt.stage"] == "put"
    assert "no space" in failed.status.description


def test_saves_that_never_end_do_not_pile_up(tracer):
    spans = Spans(tracer)
    for step in range(1000):
        spans(Event("save.begun", {"step": step, "seconds": 0.0}))

    assert len(spans._stages) <= 16


# --- without the extras --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "module, listener, extra",
    [("prometheus_client", Prometheus, "metrics"), ("opentelemetry", Spans, "otel")],
)
def test_a_missing_package_is_named_with_the_extra_that_brings_it(monkeypatch, module, listener, extra):
    monkeypatch.setitem(sys.modules, module, None)

    with pytest.raises(ExtraMissing, match=rf"pip install 'ftckpt\[{extra}\]'") as missing:
        listener()

    assert missing.value.extra == extra and isinstance(missing.value, ImportError)
