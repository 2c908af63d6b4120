"""J9 and its siblings: a store that throttles, slows down, fails or goes away while a step is saved.

Training goes on, the save ends or fails by its deadline, memory stays within its budgets, and the next
save is good.
"""

from __future__ import annotations

import hashlib
import threading
import time
import uuid
from collections.abc import Iterator

import obstore
import pytest
import torch
from obstore.store import S3Store

import ftckpt
from ftckpt.chaos.faults.gateway import SLOW_DOWN, Asked, Cut, Forget, Gateway, Refuse
from ftckpt.chaos.faults.store import Delay, Fault, FaultyStore, Pause, Run
from ftckpt.clock import SystemClock
from ftckpt.errors import PacksGone, SaveError, SaveFailed, StoreUnavailable, TooManyFailedSaves
from ftckpt.events import silent
from ftckpt.store import LimitStore, RetryStore, open_store
from ftckpt.writer import WriteSettings
from tests.session.toy import Heard, Toy
from tests.support.procs import wait_until
from tests.support.weed import Weed, start_weed

CHUNK = 64 << 10


@pytest.fixture
def gateway(weed) -> Iterator[Gateway]:
    with Gateway(weed) as opened:
        yield opened


@pytest.fixture
def own_weed(tmp_path) -> Iterator[Weed]:
    """A server of the test's own, to be killed."""
    with start_weed(tmp_path / "weed") as server:
        yield server


class Trainer:
    """A model whose state is a few MiB, with AdamW; every step changes all of it."""

    def __init__(self, width: int = 256) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Linear(width, width)
        self.optim = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.state = {"model": self.model, "optim": self.optim}
        self.train()

    def train(self) -> None:
        self.optim.zero_grad()
        self.model(torch.ones(2, self.model.in_features)).square().sum().backward()
        self.optim.step()

    def weight(self) -> torch.Tensor:
        return self.model.weight.detach().clone()


def session(uri, trainer, endpoint, weed, heard, **options):
    keys = {"access_key_id": weed.access_key, "secret_access_key": weed.secret_key}
    settings = {"save_every": 2, "codec": "raw", "chunk_bytes": CHUNK, "events": heard} | options
    return ftckpt.Session(uri, trainer.state, store_options={"endpoint_url": endpoint, **keys}, **settings)


def small_packs(running) -> None:
    """Several packs a save, so that an outage meets one in the middle."""
    engine = running._entered.engine
    settings = engine._settings
    engine._settings = WriteSettings(
        codec=settings.codec, patience=settings.patience, pack_bytes=2 * CHUNK, max_pack_bytes=2 * CHUNK
    )


def restores(uri, weed, step: int, weight: torch.Tensor) -> None:
    fresh = Trainer()
    options = {
        "endpoint_url": weed.endpoint,
        "access_key_id": weed.access_key,
        "secret_access_key": weed.secret_key,
    }
    commit = ftckpt.restore(uri, fresh.state, store_options=options)
    assert commit.step == step
    assert torch.equal(fresh.weight(), weight)


def lottery(chance: float, number: int) -> bool:
    """The same numbers win in every run."""
    return hashlib.blake2b(str(number).encode(), digest_size=4).digest()[0] < 256 * chance


# --- J9: throttling ------------------------------------------------------------------------------


def test_a_third_of_all_calls_is_told_to_slow_down_and_every_save_completes(gateway, weed):
    """J9: back-off with jitter; the retries are counted; calls at once stay within the cap."""
    uri, heard, trainer = weed.uri(uuid.uuid4().hex), Heard(), Trainer()
    with session(uri, trainer, gateway.endpoint, weed, heard) as running:
        small_packs(running)
        gateway.rule = lambda asked: SLOW_DOWN if lottery(0.3, asked.number) else None
        for _ in running.steps(until=4):
            trainer.train()
        gateway.rule = lambda _asked: None

    assert [event["step"] for event in heard.named("save.committed")] == [0, 2, 4]
    retries = heard.named("store.retry")
    assert len(retries) > 5 and {event["error"] for event in retries} == {"StoreUnavailable"}
    assert len({event["wait_s"] for event in retries}) > len(retries) // 2, "the waits are drawn"
    restores(uri, weed, 4, trainer.weight())


def test_all_calls_are_throttled_for_a_while_and_the_save_completes(gateway, weed):
    """J9: fifty refusals in a row, whatever is asked."""
    uri, heard, trainer = weed.uri(uuid.uuid4().hex), Heard(), Trainer()
    refused: list[Asked] = []

    def rule(asked: Asked):
        if "/packs/000001/000000000002" in asked.key and len(refused) == 0:
            refused.append(asked)
        if 0 < len(refused) < 50:
            refused.append(asked)
            return SLOW_DOWN
        return None

    with session(uri, trainer, gateway.endpoint, weed, heard) as running:
        small_packs(running)
        gateway.rule = rule
        for _ in running.steps(until=2):
            trainer.train()

    assert len(refused) >= 50 and not heard.named("save.failed")
    restores(uri, weed, 2, trainer.weight())


@pytest.mark.parametrize(
    "fate", [Refuse(500, "InternalError"), Refuse(429, "TooManyRequests"), Forget(), Cut(0.3)]
)
def test_other_passing_faults_on_the_wire_are_survived_by_save_and_restore(gateway, weed, fate):
    """J9, J12: errors of the server's own, answers that were lost, and bodies that break off."""
    uri, heard, trainer = weed.uri(uuid.uuid4().hex), Heard(), Trainer()
    gateway.rule = lambda asked: fate if lottery(0.2, asked.number) else None
    with session(uri, trainer, gateway.endpoint, weed, heard) as running:
        for _ in running.steps(until=2):
            trainer.train()

    fresh = Trainer()
    with session(uri, fresh, gateway.endpoint, weed, Heard()) as running:
        assert running.restored.step == 2
        assert torch.equal(fresh.weight(), trainer.weight())
    assert not heard.named("save.failed")
    assert len(gateway.log) > 50 and any(lottery(0.2, asked.number) for asked in gateway.log)


def test_no_more_puts_at_once_than_the_cap(tmp_path):
    """J9: the cap holds whatever the encoders and the packs would like."""
    now, most, lock = [0], [0], threading.Lock()

    def enter(_call):
        with lock:
            now[0] += 1
            most[0] = max(most[0], now[0])
        time.sleep(0.02)
        with lock:
            now[0] -= 1

    faulty = FaultyStore(open_store(tmp_path / "run"), [Fault(Run(enter), op="create", prefix="packs")])
    trainer = Trainer()
    with ftckpt.Session(
        "ignored",
        trainer.state,
        store=LimitStore(faulty, max_calls=2),
        events=Heard(),
        chunk_bytes=CHUNK,
        codec="raw",
    ) as running:
        small_packs(running)
        trainer.train()
        running.save(1).wait(30)

    assert most[0] == 2


# --- outages -------------------------------------------------------------------------------------


def outage(uri, weed, break_it, mend_it, *, deadline_s: float, retry_s: float, steps: int = 12):
    """Train, take the store away in the middle of a save, train on, give it back, train on."""
    heard, trainer = Heard(), Trainer()
    in_save = threading.Event()
    keys = {"access_key_id": weed.access_key, "secret_access_key": weed.secret_key}
    real = open_store(
        uri,
        options={"endpoint_url": weed.endpoint, "timeout_s": 5, "connect_timeout_s": 2, **keys},
        retry_deadline_s=retry_s,
        events=heard,
    )
    # The second pack of step 2: some of the save is there already.
    store = FaultyStore(
        real, [Fault(Run(lambda _c: in_save.set()), op="create", prefix="packs/000001/000000000002", nth=2)]
    )
    staging = 4 << 20
    with ftckpt.Session(
        "ignored",
        trainer.state,
        store=store,
        save_every=2,
        codec="raw",
        chunk_bytes=CHUNK,
        deadline_s=deadline_s,
        fence_deadline_s=1,
        staging_bytes=staging,
        events=heard,
    ) as running:
        small_packs(running)
        wait_until(lambda: heard.named("save.committed"), 30, "step 0")
        pool, engine = running._entered.pool, running._entered.engine
        slowest_s = 0.0
        for step in running.steps(until=steps):
            begun_s = time.monotonic()
            trainer.train()
            slowest_s = max(slowest_s, time.monotonic() - begun_s)
            assert pool.used_bytes <= staging
            assert engine.pending <= engine._settings.backlog + steps
            if step == 3:
                assert in_save.wait(30)
                break_it()
            if step == 6:
                wait_until(lambda: heard.named("save.failed"), 4 * deadline_s + 20, "the save to end")
                mend_it()
    assert heard.named("save.committed")[-1]["step"] == steps
    assert pool.used_bytes == 0
    restores(uri, weed, steps, trainer.weight())
    return heard


def test_a_server_that_is_killed_in_mid_save_and_comes_back_costs_no_step_of_training(own_weed):
    """J: SIGKILL for the server; training goes on; saves fail by their deadline and are told of at the
    boundary; the first save after it is back is good."""
    uri = own_weed.uri("run")
    heard = outage(uri, own_weed, own_weed.kill9, own_weed.restart, deadline_s=3, retry_s=1)

    told = heard.named("session.save_failed")
    assert told and all("step" in event["error"] for event in told)
    assert heard.named("store.retry")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_server_that_is_away_for_a_minute_costs_no_step_of_training(own_weed):
    """J: the whole minute, with retries of half a minute."""

    def back_after_a_minute():
        time.sleep(max(0.0, 60 - (time.monotonic() - killed[0])))
        own_weed.restart()

    killed = [0.0]

    def kill():
        killed[0] = time.monotonic()
        own_weed.kill9()

    outage(own_weed.uri("run"), own_weed, kill, back_after_a_minute, deadline_s=20, retry_s=10)


def test_a_bucket_that_is_deleted_is_told_and_never_taken_for_a_place_to_save(own_weed):
    """J: its objects are gone, and a server that makes buckets by itself takes new ones: no such save is
    acknowledged, because nobody would find its run; training goes on and leaving says so."""
    uri, heard, trainer = own_weed.uri("run"), Heard(), Trainer()
    with pytest.raises(SaveError):  # noqa: SIM117
        with session(
            uri, trainer, own_weed.endpoint, own_weed, heard, deadline_s=3, retry_deadline_s=1
        ) as running:
            wait_until(lambda: heard.named("save.committed"), 30, "step 0")
            for step in running.steps(until=8):
                trainer.train()
                if step == 3:
                    wait_until(lambda: len(heard.named("save.committed")) == 2, 30, "step 2")
                    empty(own_weed)
                if step == 5:
                    wait_until(lambda: heard.named("save.failed"), 30, "the save of step 4 to fail")
    failed = heard.named("session.save_failed")
    assert failed and {event["step"] for event in heard.named("save.committed")} == {0, 2}


def empty(weed) -> None:
    store = S3Store(
        weed.bucket,
        endpoint=weed.endpoint,
        access_key_id=weed.access_key,
        secret_access_key=weed.secret_key,
        region=weed.region,
        virtual_hosted_style_request=False,
        client_options={"allow_http": True},
    )
    keys = [line["path"] for page in obstore.list(store) for line in page]
    obstore.delete(store, keys)


def test_a_slow_store_holds_up_neither_training_nor_memory(tmp_path):
    """J: every call takes a third of a second; what is staged stays within its budget."""
    trainer, heard, staging = Trainer(), Heard(), 4 << 20
    slow = FaultyStore(open_store(tmp_path / "run"))
    with ftckpt.Session(
        "ignored",
        trainer.state,
        store=slow,
        save_every=3,
        codec="raw",
        chunk_bytes=CHUNK,
        staging_bytes=staging,
        events=heard,
    ) as running:
        small_packs(running)
        wait_until(lambda: heard.named("save.committed"), 30, "step 0")
        slow.plan = [Fault(Delay(0.3), op="create", prefix="packs")]
        for _ in running.steps(until=9):
            trainer.train()
            assert running._entered.pool.used_bytes <= staging
    assert [event["step"] for event in heard.named("save.committed")] == [0, 3, 6, 9]


def test_saves_that_come_faster_than_an_absent_store_fails_them_are_given_up_at_once(tmp_path):
    """J: the backlog is full and the store is silent: the trainer is not made to wait for it."""
    toy, heard, away = Toy(), Heard(), threading.Event()

    def fail(call):
        if away.is_set():
            raise StoreUnavailable(f"{call.op} {call.key}: away", op=call.op, key=call.key)

    store = RetryStore(
        FaultyStore(open_store(tmp_path / "run"), [Fault(Run(fail))]),
        deadline_s=8,
        clock=SystemClock(),
        events=heard,
    )
    with ftckpt.Session(
        "ignored", toy.state, store=store, save_every=1, deadline_s=8, events=heard
    ) as running:
        engine = running._entered.engine
        wait_until(lambda: heard.named("save.committed"), 30, "step 0")
        engine._settings = WriteSettings(patience=engine._settings.patience, stall_s=0.5)
        away.set()
        begun_s = time.monotonic()
        for step in running.steps(until=12):
            toy.train(step)
            if step == 10:
                waited_s = time.monotonic() - begun_s
                away.clear()
                wait_until(lambda: engine.pending == 0, 60, "the saves to end")
    assert heard.named("save.stalled")
    assert waited_s < 7, "ten saves of at most eight seconds each would be more than a minute"
    assert heard.named("save.committed")[-1]["step"] == 12


# --- stores whose calls do not return ------------------------------------------------------------


def hung(tmp_path, prefix: str = "packs/000001/000000000001") -> tuple[FaultyStore, Pause]:
    """A store in which the first create under ``prefix`` does not return, as on a folder whose server is gone."""
    pause = Pause(timeout_s=60)
    return FaultyStore(open_store(tmp_path / "run"), [Fault(pause, op="create", prefix=prefix, nth=1)]), pause


def test_a_call_that_never_returns_fails_its_save_at_the_deadline_and_training_hears_of_it_meanwhile(
    tmp_path,
):
    """J: the thread of saves hangs with the call; deadline, reports and the limit do not."""
    toy, heard, (store, pause) = Toy(), Heard(), hung(tmp_path)
    with pytest.raises(TooManyFailedSaves, match="has not answered for") as stop:  # noqa: SIM117
        with ftckpt.Session(
            "ignored", toy.state, store=store, deadline_s=0.5, max_failed_saves=1, events=heard
        ) as running:
            for step in running.steps(until=1000):
                toy.train(step)
                if step == 1:
                    saved = running.save(1)
                    assert pause.arrived.wait(30)
                if step == 2:
                    wait_until(lambda: running._entered.engine._hanging_s > 0.5, 30, "the deadline to pass")
                time.sleep(0.05)
    pause.release()

    assert step > 2, "training went on until a second boundary found the call still hanging"
    assert isinstance(saved.error, SaveFailed) and "earlier commits are intact" in str(saved.error)
    assert any("step 1 is not known to be saved" in note for note in stop.value.__notes__)


def test_whoever_waits_for_a_save_on_a_store_that_hangs_hears_of_the_deadline_and_the_next_save_is_good(
    tmp_path,
):
    toy, (store, pause) = Toy(), hung(tmp_path)
    with ftckpt.Session("ignored", toy.state, store=store, deadline_s=0.5, events=silent) as running:
        with pytest.raises(SaveFailed, match="has not answered for"):
            running.save(1).wait()
        pause.release()
        assert running.save(2).wait(30).step == 2

    with ftckpt.open(tmp_path / "run") as found:
        assert found.verify() == []
        assert [commit.step for commit in found.commits()] == [2, 0]


def test_the_last_save_waits_for_a_silent_store_that_others_are_given_up_on(tmp_path):
    """No training follows that could go on meanwhile, and the store comes back within the deadline."""
    toy, heard, (store, pause) = Toy(), Heard(), hung(tmp_path)
    with ftckpt.Session("ignored", toy.state, store=store, save_every=1, events=heard) as running:
        engine = running._entered.engine
        engine._settings = WriteSettings(patience=engine._settings.patience, stall_s=0.3)
        for step in running.steps(until=4):
            toy.train(step)
            if step == 4:
                assert [event["step"] for event in heard.named("save.stalled")] == [3]
                threading.Timer(1.0, pause.release).start()

    assert [event["step"] for event in heard.named("save.failed")] == [3]
    with ftckpt.open(tmp_path / "run") as found:
        assert found.verify() == []
        assert [commit.step for commit in found.commits()][:3] == [4, 2, 1]


# --- packs that somebody deletes -----------------------------------------------------------------


def test_packs_of_earlier_steps_that_were_deleted_fail_one_save_and_the_next_writes_everything(tmp_path):
    """A run of which somebody else deletes objects goes on from a whole step, and says what is gone."""
    trainer, frozen = Trainer(32), torch.nn.Linear(32, 32)
    state = {**trainer.state, "base": ftckpt.Frozen(frozen)}
    with ftckpt.Session(tmp_path / "run", state, keep=None, events=silent) as running:
        running.save(1).wait(30)
        engine = running._entered.engine
        engine._settings = WriteSettings(patience=engine._settings.patience, look_again_s=0.001)
        running.save(2).wait(30)
        gone = [path for path in (tmp_path / "run/packs").rglob("*") if path.is_file()]
        for path in gone:
            path.unlink()

        with pytest.raises(SaveFailed, match="are no longer in") as failure:
            running.save(3).wait(30)
        assert isinstance(failure.value.__cause__, PacksGone)
        assert {f"{tmp_path}/run/{key}" for key in failure.value.__cause__.packs} <= set(map(str, gone))
        running.save(4).wait(30)

    fresh = Trainer(32)
    base = torch.nn.Linear(32, 32)
    assert ftckpt.restore(tmp_path / "run", {**fresh.state, "base": ftckpt.Frozen(base)}).step == 4
    assert torch.equal(base.weight, frozen.weight) and torch.equal(fresh.weight(), trainer.weight())
