"""J4: credentials that run out in the middle of a save are renewed, and the save ends well."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

import ftckpt
from ftckpt.chaos.faults.gateway import EXPIRED, SLOW_DOWN, Gateway, Refuse, only
from ftckpt.clock import HandClock
from ftckpt.errors import AccessDenied, CredentialsExpired, SettingsError, StoreUnavailable
from ftckpt.store import ByteRange, open_store
from tests.session.toy import Heard, Toy
from tests.support.procs import wait_until

SECRET = "a-secret-of-the-client"


@pytest.fixture
def gateway(weed) -> Iterator[Gateway]:
    with Gateway(weed) as opened:
        yield opened


@pytest.fixture
def uri(weed) -> str:
    return weed.uri(uuid.uuid4().hex)


class Vault:
    """A credential provider: counts how often it was asked, and gives what it is told to."""

    def __init__(self, *keys: str) -> None:
        self.keys, self.asked = list(keys), 0

    def __call__(self) -> dict[str, str]:
        self.asked += 1
        key = self.keys.pop(0) if len(self.keys) > 1 else self.keys[0]
        return {"access_key_id": key, "secret_access_key": SECRET, "token": f"token of {key}"}


def store_at(uri, gateway, *, environ=None, clock=None, **options):
    given = {"endpoint_url": gateway.endpoint, **options}
    return open_store(uri, options=given, environ=environ or {}, clock=clock, retry_deadline_s=20)


def calls(store) -> dict:
    return {
        "create": lambda: store.create(f"c/{uuid.uuid4().hex}", b"x"),
        "read": lambda: store.read("a"),
        "range": lambda: store.read("a", ByteRange(0, 1)),
        "size": lambda: store.size("a"),
        "scan": lambda: list(store.scan("")),
        "delete": lambda: store.delete(["absent"]),
    }


@pytest.mark.parametrize(
    "scheme, name",
    [("s3", name) for name in ("create", "read", "range", "size", "scan", "delete")]
    + [("fsspec+s3", "create"), ("fsspec+s3", "size")],  # making one of these costs a second of CPU
)
def test_every_call_goes_on_with_fresh_credentials_when_the_old_ones_expired(uri, gateway, scheme, name):
    """J4: whatever call meets the end of the old key is made again with the new one."""
    vault = Vault("old", "new")
    gateway.rule = only({"old", "new"})
    store = store_at(uri.replace("s3", scheme, 1), gateway, credential_provider=vault)
    store.create("a", b"x")

    gateway.rule = only({"new"})
    calls(store)[name]()

    assert vault.asked == 2
    assert gateway.log[-1].access_key == "new"


def test_a_save_during_which_the_key_expires_is_complete_and_restores(gateway, weed):
    """J4: the third pack is refused; the provider then gives another key."""
    vault, heard = Vault("old", "new"), Heard()
    packs = []

    def rule(asked):
        if asked.method == "PUT" and asked.key.count("/packs/000001/000000000001/"):
            packs.append(asked)
        return EXPIRED if asked.access_key == "old" and len(packs) >= 3 else None

    gateway.rule = rule
    state = {"t": torch.arange(200_000, dtype=torch.int64)}
    options = {"endpoint_url": gateway.endpoint, "credential_provider": vault}
    uri = weed.uri(uuid.uuid4().hex)
    with ftckpt.Session(
        uri, state, store_options=options, events=heard, codec="raw", chunk_bytes=100_000
    ) as session:
        session._entered.engine._settings = small_packs(session._entered.engine._settings)
        state["t"] += 1
        commit = session.save(1).wait(40)

    assert commit.step == 1 and len(packs) > 5
    assert len(heard.named("store.credentials_renewed")) == 1
    assert "old" not in repr(heard) and SECRET not in repr(heard)
    found = {"t": torch.zeros(200_000, dtype=torch.int64)}
    ftckpt.restore(uri, found, store_options=options)
    assert torch.equal(found["t"], state["t"])


def small_packs(settings):
    return replace(settings, pack_bytes=200_000, max_pack_bytes=200_000)


def test_many_threads_that_meet_the_end_of_a_key_ask_for_one_other(uri, gateway):
    """J4: the provider is asked once, not once a call."""
    vault = Vault("old", "new")
    gateway.rule = only({"old", "new"})
    store = store_at(uri, gateway, credential_provider=vault)
    store.create("a", b"x")
    gateway.rule = only({"new"})

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda n: store.create(f"b/{n}", b"x"), range(24)))

    assert vault.asked == 2
    assert len(list(store.scan("b"))) == 24


def test_keys_that_come_late_are_waited_for(uri, gateway):
    """J4: the provider still has the old key for a while: the call is repeated within its deadline."""
    vault = Vault("old", "old", "old", "old", "new")
    gateway.rule = only({"old", "new"})
    clock = HandClock()
    store = store_at(uri, gateway, credential_provider=vault, clock=clock)
    store.create("a", b"x")
    gateway.rule = only({"new"})

    assert bytes(store.read("a")) == b"x"
    assert vault.asked == 5 and 0 < clock.now_s() < 20


def test_keys_that_never_come_end_in_a_clear_error_within_the_deadline(uri, gateway):
    """J4: after that, it says what ran out and what to renew, and no secret."""
    gateway.rule = only({"old"})
    clock = HandClock()
    store = store_at(uri, gateway, credential_provider=Vault("old"), clock=clock)
    store.create("a", b"x")
    gateway.rule = only(())

    for name, call in calls(store).items():
        begun_s = clock.now_s()
        with pytest.raises(CredentialsExpired, match="credential_provider") as caught:
            call()
        assert isinstance(caught.value, PermissionError), name
        assert "gave up after" in str(caught.value) and SECRET not in repr(caught.value)
        assert clock.now_s() - begun_s <= 20


def test_keys_that_are_refused_from_the_start_are_an_error_at_once(uri, gateway):
    """J4: nothing to wait for: they never worked, and no others are there."""
    clock = HandClock()
    gateway.rule = only(())
    store = store_at(uri, gateway, credential_provider=Vault("old"), clock=clock)

    with pytest.raises(AccessDenied, match="ExpiredToken"):
        store.create("a", b"x")
    assert clock.now_s() == 0


def test_a_plain_refusal_is_final_when_nobody_has_other_keys(uri, gateway):
    clock = HandClock()
    store = store_at(uri, gateway, credential_provider=Vault("old"), clock=clock)
    store.create("a", b"x")
    gateway.rule = lambda _asked: Refuse(403, "AccessDenied")

    with pytest.raises(AccessDenied) as caught:
        store.read("a")
    assert not caught.value.retryable and clock.now_s() == 0


def test_a_key_that_was_replaced_is_refused_as_unknown_and_renewed_too(uri, gateway):
    """J4, a sibling: the server forgot the old key."""
    gateway.rule = lambda asked: None if asked.access_key == "new" else Refuse(403, "InvalidAccessKeyId")
    store = store_at(uri, gateway, credential_provider=Vault("old", "new"))

    store.create("a", b"x")

    assert bytes(store.read("a")) == b"x"


def test_variables_are_looked_at_again(uri, gateway):
    """J4, a sibling: something in this process renews AWS_* now and then."""
    environ = {"AWS_ACCESS_KEY_ID": "old", "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_SESSION_TOKEN": "t1"}
    gateway.rule = only({"old", "new"})
    store = store_at(uri, gateway, environ=environ)
    store.create("a", b"x")
    gateway.rule = only({"new"})
    environ |= {"AWS_ACCESS_KEY_ID": "new", "AWS_SESSION_TOKEN": "t2"}

    assert bytes(store.read("a")) == b"x"


def test_the_credentials_file_is_looked_at_again(uri, gateway, tmp_path):
    """J4, a sibling: a sidecar rewrites the file."""
    path = tmp_path / "credentials"

    def written(key: str) -> None:
        path.write_text(f"[job]\naws_access_key_id = {key}\naws_secret_access_key = {SECRET}%\n")

    written("old")
    gateway.rule = only({"old", "new"})
    store = store_at(uri, gateway, environ={"AWS_SHARED_CREDENTIALS_FILE": str(path), "AWS_PROFILE": "job"})
    store.create("a", b"x")
    gateway.rule = only({"new"})
    written("new")

    assert bytes(store.read("a")) == b"x"


def test_a_provider_that_fails_when_it_is_needed_is_waited_for(uri, gateway):
    """J4: its own error may quote a secret, so only its kind is told."""
    answers = iter(["old", ConnectionError(f"no vault, {SECRET}"), "new"])

    def provider():
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return {"access_key_id": answer, "secret_access_key": SECRET}

    gateway.rule = only({"old", "new"})
    store = store_at(uri, gateway, credential_provider=provider, clock=HandClock())
    store.create("a", b"x")
    gateway.rule = only({"new"})

    assert bytes(store.read("a")) == b"x"


async def _asynchronous():
    return {}


@pytest.mark.parametrize(
    "provider, words",
    [
        ("text", "plain function"),
        (_asynchronous, "plain function"),
        (lambda: None, "must return a dict"),
        (lambda: {"access_key_id": "only half"}, "must return a dict"),
        (lambda: {"access_key_id": 5, "secret_access_key": "x"}, "must be text"),
        (lambda: 1 / 0, "failed with ZeroDivisionError"),
    ],
)
def test_a_provider_that_gives_no_credentials_is_refused_when_the_store_is_opened(provider, words):
    with pytest.raises(SettingsError, match=words):
        open_store("s3://bucket/run", options={"credential_provider": provider}, environ={})


def test_a_provider_and_fixed_keys_contradict_each_other():
    options = {"credential_provider": Vault("a"), "access_key_id": "b", "secret_access_key": "c"}
    with pytest.raises(SettingsError, match="contradict"):
        open_store("s3://bucket/run", options=options, environ={})


def test_training_outlives_credentials_that_are_never_renewed(gateway, weed):
    """J4: saves fail, each is told at a boundary, and the first good one comes with good keys."""
    keys, heard, toy = {"old"}, Heard(), Toy()
    gateway.rule = only(keys)
    vault = Vault("old")
    with ftckpt.Session(
        weed.uri(uuid.uuid4().hex),
        toy.state,
        save_every=2,
        deadline_s=3,
        retry_deadline_s=0.1,
        store_options={"endpoint_url": gateway.endpoint, "credential_provider": vault},
        events=heard,
    ) as session:
        wait_until(lambda: heard.named("save.committed"), 20, "step 0")
        keys.clear()
        for step in session.steps(until=8):
            toy.train(step)
            if step == 3:
                wait_until(lambda: heard.named("save.failed"), 20, "a save to fail")
                keys.add("new")
                vault.keys = ["new"]

    assert any("credentials ran out" in event["error"] for event in heard.named("session.save_failed"))
    assert heard.named("save.committed")[-1]["step"] == 8


def test_throttling_is_not_taken_for_a_refusal(uri, gateway):
    """The provider is not asked again for what is none of its business."""
    vault = Vault("old", "new")
    store = store_at(uri, gateway, credential_provider=vault, clock=HandClock())
    store.create("a", b"x")
    gateway.rule = lambda _asked: SLOW_DOWN

    with pytest.raises(StoreUnavailable, match="SlowDown"):
        store.read("a")
    assert vault.asked == 1
