"""State from a living peer, over real sockets."""

from __future__ import annotations

import http.client
import threading
from datetime import timedelta
from urllib.parse import urlsplit

import pytest
import torch

from ftckpt.elastic.heal import HealTransport, Published, fetch, publish
from ftckpt.errors import MembershipError
from ftckpt.leaf import ITEMSIZE_BYTES
from tests.support.procs import wait_until

MANAGER = {"step": 5, "batches_committed": 9}
SECOND = timedelta(seconds=1)


@pytest.fixture
def source():
    transport = HealTransport("127.0.0.1", attempt=2, timeout_s=2.0)
    transport.start()
    yield transport
    transport.shutdown()


def give(transport: HealTransport, step: int, state: dict) -> None:
    transport.send_checkpoint([1], step, {"user": {"ftckpt": state}, "torchft": MANAGER}, SECOND)


def test_every_element_type_and_shape_arrives_bit_for_bit(source):
    raw = torch.randint(0, 256, (64,), dtype=torch.uint8)
    state: dict[str, object] = {
        name: (raw % 2).bool() if name == "bool" else raw.view(getattr(torch, name)).reshape(2, -1)
        for name in ITEMSIZE_BYTES
    }
    state |= {
        "scalar": torch.tensor(1.5),
        "empty": torch.empty(0, 3),
        "strided": torch.arange(12.0).reshape(3, 4).T,
        "parameter": torch.nn.Parameter(torch.ones(3)),
        "plain": b"\x00\xffbytes",
        "nothing": b"",
    }
    give(source, 5, state)

    manager, found = fetch(source.metadata(), 5, "2", 2.0)

    assert manager == MANAGER
    assert list(found) == list(state)
    for name, value in state.items():
        if isinstance(value, torch.Tensor):
            assert (found[name].dtype, found[name].shape) == (value.dtype, value.shape)
            assert publish(0, {}, {name: found[name]}) == publish(0, {}, {name: value})
        else:
            assert found[name] == value


def test_a_peer_that_asks_before_the_state_is_there_waits_for_it(source):
    found = {}
    asker = threading.Thread(target=lambda: found.update(fetch(source.metadata(), 5, "2", 2.0)[1]))
    asker.start()

    give(source, 5, {"x": torch.ones(2)})
    asker.join(timeout=5)

    assert found["x"].tolist() == [1.0, 1.0]


def test_another_attempt_is_refused(source):
    give(source, 5, {"x": torch.ones(2)})

    with pytest.raises(MembershipError, match="attempt 2, not 1"):
        fetch(source.metadata(), 5, "1", 2.0)


def test_a_step_that_is_not_served_is_refused():
    transport = HealTransport("127.0.0.1", attempt=None, timeout_s=0.1)
    transport.start()
    try:
        give(transport, 5, {"x": torch.ones(2)})
        transport.disallow_checkpoint()

        with pytest.raises(MembershipError, match="step 5 is not served"):
            fetch(transport.metadata(), 5, "any", 2.0)
    finally:
        transport.shutdown()


def test_without_the_token_nothing_is_given(source):
    give(source, 5, {"x": torch.ones(2)})
    url = urlsplit(source.metadata())
    connection = http.client.HTTPConnection(url.hostname, url.port, timeout=2)

    connection.request("GET", f"/{'0' * 32}/2/5")

    assert connection.getresponse().status == 409
    connection.close()


def test_a_state_that_changes_while_it_is_sent_is_refused(source):
    live = torch.zeros(1 << 16)
    give(source, 5, {"x": live})
    live += 1

    with pytest.raises(MembershipError, match="other bytes than were published"):
        fetch(source.metadata(), 5, "2", 2.0)


def test_a_source_that_trains_on_cuts_the_reader_off(source):
    give(source, 5, {"x": torch.zeros(16 << 20)})
    url = urlsplit(source.metadata())
    connection = http.client.HTTPConnection(url.hostname, url.port, timeout=5)
    connection.request("GET", f"{url.path}/2/5")
    answer = connection.getresponse()
    answer.read(1024)

    source.disallow_checkpoint()

    with pytest.raises(http.client.IncompleteRead):
        answer.read()
    connection.close()


def test_a_source_that_is_gone_is_one_clear_error():
    transport = HealTransport("127.0.0.1", attempt=1, timeout_s=1.0)
    transport.start()
    address = transport.metadata()
    transport.shutdown()

    with pytest.raises(MembershipError, match="healing step 5 from the peer at 127"):
        fetch(address, 5, "1", 1.0)


@pytest.mark.parametrize(
    "leaf",
    [
        {"dtype": "float32", "shape": [2], "size_bytes": 12},
        {"dtype": "float32", "shape": [1 << 40], "size_bytes": 1 << 42},
        {"dtype": "Tensor", "shape": [0], "size_bytes": 0},
        {"dtype": "float32", "shape": [-2], "size_bytes": -8},
    ],
)
def test_a_header_that_lies_about_sizes_is_refused_before_memory_is_taken(source, leaf):
    import msgspec

    head = msgspec.msgpack.encode(
        {"step": 5, "manager": MANAGER, "leaves": [{"name": "x", "digest": "", **leaf}]}
    )
    with source._changed:
        source._published = Published(5, head, (memoryview(b"12345678"),))

    with pytest.raises(MembershipError, match=r"announced with a size|unknown element type"):
        fetch(source.metadata(), 5, "2", 2.0)


def test_the_server_ends_with_its_transport():
    before = threading.active_count()
    transport = HealTransport("127.0.0.1", attempt=1, timeout_s=1.0)
    transport.start()

    transport.shutdown()
    transport.shutdown()

    wait_until(lambda: threading.active_count() <= before, 5, "the server's thread to end")
