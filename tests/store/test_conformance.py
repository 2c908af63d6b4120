"""The contract of ``ObjectStore``, run over every store and every wrapper."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from ftckpt.errors import AlreadyExists, ObjectNotFound, StoreError
from ftckpt.store import ByteRange, probe


def keys_of(store, prefix=""):
    return [info.key for info in store.scan(prefix)]


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_what_was_created_is_read_back_whatever_buffer_it_came_in(store, kind):
    body = kind(bytearray(b"some bytes \x00\xff"))

    store.create("packs/000001/a-1", body)

    assert bytes(store.read("packs/000001/a-1")) == b"some bytes \x00\xff"
    assert store.size("packs/000001/a-1") == 13


def test_a_buffer_changed_after_create_does_not_change_the_object(store):
    body = bytearray(b"before")

    store.create("a", body)
    body[:] = b"after!"

    assert bytes(store.read("a")) == b"before"


def test_a_view_of_wider_items_is_stored_as_its_bytes(store):
    store.create("a", memoryview(bytearray(16)).cast("d"))

    assert bytes(store.read("a")) == bytes(16)


def test_a_second_create_is_refused_and_leaves_the_object_alone(store):
    store.create("commits/1", b"first")

    with pytest.raises(AlreadyExists):
        store.create("commits/1", b"second and longer")

    assert bytes(store.read("commits/1")) == b"first"


def test_equal_bytes_are_no_excuse_for_a_second_create(store):
    store.create("attempts/1", b"same")

    with pytest.raises(AlreadyExists):
        store.create("attempts/1", b"same")


def test_an_overwrite_leaves_its_bytes_whatever_was_there(store):
    store.create("packs/000001/a-1", b"damaged, and longer")

    for body in (b"good", memoryview(bytearray(b"better"))):
        store.overwrite("packs/000001/a-1", body)
        assert bytes(store.read("packs/000001/a-1")) == bytes(body)
    store.overwrite("packs/000001/a-2", b"absent before")

    assert keys_of(store) == ["packs/000001/a-1", "packs/000001/a-2"]
    with pytest.raises(AlreadyExists):
        store.create("packs/000001/a-2", b"x")


def test_an_empty_object_exists(store):
    store.create("empty", b"")

    assert bytes(store.read("empty")) == b""
    assert store.size("empty") == 0
    assert keys_of(store) == ["empty"]
    with pytest.raises(AlreadyExists):
        store.create("empty", b"x")


@pytest.mark.parametrize("start, end", [(0, 1), (0, 10), (3, 7), (9, 10)])
def test_a_range_gives_exactly_its_bytes(store, start, end):
    store.create("a", b"0123456789")

    assert bytes(store.read("a", ByteRange(start, end))) == b"0123456789"[start:end]


@pytest.mark.parametrize("start, end", [(0, 11), (9, 11), (10, 11), (50, 60)])
def test_a_range_outside_the_object_is_an_error_that_names_its_size(store, start, end):
    store.create("a", b"0123456789")

    with pytest.raises(StoreError, match="10") as caught:
        store.read("a", ByteRange(start, end))

    assert not caught.value.retryable
    assert caught.value.size_bytes == 10


@pytest.mark.parametrize("start, end", [(3, 3), (4, 3), (-1, 3)])
def test_a_range_of_no_bytes_cannot_be_asked_for(start, end):
    with pytest.raises(AssertionError):
        ByteRange(start, end)


def test_what_is_absent_is_not_found(store):
    store.create("a/b", b"x")

    for absent in ("c", "a", "a/b/c", "a/c"):
        for ask in (store.read, store.size, lambda key: store.read(key, ByteRange(0, 1))):
            with pytest.raises(ObjectNotFound) as caught:
                ask(absent)
            assert isinstance(caught.value, FileNotFoundError)


def test_a_scan_is_in_the_order_of_whole_keys_and_shows_sizes(store):
    # "-" and "." sort before "/", so folder by folder would be another order.
    for number, key in enumerate(["a/b", "a-b/c", "a.b", "a/a/z", "b", "a0", "a/a-z"]):
        store.create(key, bytes(number))

    found = list(store.scan(""))

    assert [info.key for info in found] == ["a-b/c", "a.b", "a/a-z", "a/a/z", "a/b", "a0", "b"]
    assert {info.key: info.size_bytes for info in found}["b"] == 4


def test_a_prefix_means_whole_parts(store):
    for key in ("a/x", "a/y/z", "ab/x", "a-b/x", "b/a/x"):
        store.create(key, b"")

    assert keys_of(store, "a") == ["a/x", "a/y/z"]
    assert keys_of(store, "a/y") == ["a/y/z"]
    assert keys_of(store, "a/x") == []
    assert keys_of(store, "none") == []


def test_a_scan_goes_on_over_many_pages(store):
    keys = [f"packs/000001/{number:04d}" for number in range(60)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda key: store.create(key, b"x"), keys))

    assert keys_of(store, "packs") == keys


def test_deleting_what_is_absent_is_fine(store):
    for key in ("a/1", "a/2", "b/1"):
        store.create(key, b"x")

    store.delete(["a/1", "a/absent", "nowhere/at/all", "b/1"])
    store.delete(["a/1"])
    store.delete([])

    assert keys_of(store) == ["a/2"]


def test_a_key_can_be_created_again_after_it_was_deleted(store):
    store.create("a/1", b"old")
    store.delete(["a/1"])

    store.create("a/1", b"new")

    assert bytes(store.read("a/1")) == b"new"


def test_keys_of_many_characters_come_back_as_they_were(store):
    keys = ["a/é ü", "a/100%25", "a/x#1", "a/q?x=1&y=2", "a/+@=~'(),;", "a/日本", "a/" + "n" * 200]
    for key in keys:
        store.create(key, key.encode())

    assert keys_of(store) == sorted(keys)
    assert [bytes(store.read(key)).decode() for key in keys] == keys


TRICKS = [
    "",
    "/",
    "/etc/x",
    "a//b",
    "a/",
    "..",
    "../x",
    "a/../../x",
    "./a",
    ".hidden",
    "a\\b",
    "a\0b",
    "a\nb",
]


TOO_LONG = ["x" * 201, "y/" * 450 + "y"]


def test_a_key_that_could_leave_the_prefix_is_refused_by_every_call(store):
    for key in (*TRICKS, *TOO_LONG):
        calls = [
            lambda key=key: store.create(key, b"x"),
            lambda key=key: store.read(key),
            lambda key=key: store.size(key),
            lambda key=key: store.delete(["fine", key]),
        ]
        if key:
            calls.append(lambda key=key: list(store.scan(key)))

        for call in calls:
            with pytest.raises(StoreError, match="not a key") as caught:
                call()
            assert not caught.value.retryable
    assert keys_of(store) == []


def test_another_instance_sees_everything_at_once(place):
    """Neither listings nor sizes come from a cache (cases J1, J2, J3)."""
    one, other = place.open(), place.open()
    assert keys_of(other) == []

    for number in range(5):
        one.create(f"a/{number}", bytes(number))

        assert keys_of(other) == [f"a/{n}" for n in range(number + 1)]
        assert other.size(f"a/{number}") == number
    other.delete(["a/3"])
    one.create("a/3", b"another length")

    assert bytes(other.read("a/3")) == b"another length"
    assert other.size("a/3") == 14


def test_of_eight_creators_of_one_key_exactly_one_wins(exclusive_place):
    place = exclusive_place
    stores = [place.open() for _ in range(8)]

    for round_number in range(place.races):
        key = f"commits/{round_number}"
        start = threading.Barrier(8)

        def create(number, key=key, start=start):
            start.wait()
            try:
                stores[number].create(key, b"%d" % number * 1000)
            except AlreadyExists:
                return None
            return number

        with ThreadPoolExecutor(8) as pool:
            winners = [n for n in pool.map(create, range(8)) if n is not None]

        assert len(winners) == 1
        assert bytes(stores[0].read(key)) == b"%d" % winners[0] * 1000


def test_a_reader_sees_all_of_an_object_or_none(exclusive_place):
    writer, reader = exclusive_place.open(), exclusive_place.open()
    body = b"\x5a" * (2 << 20)
    sizes = set()
    done = threading.Event()

    def watch():
        while not done.is_set():
            try:
                sizes.add(len(reader.read("a/big")))
            except ObjectNotFound:
                sizes.add(0)

    watcher = threading.Thread(target=watch)
    watcher.start()
    for _ in range(3):
        writer.create("a/big", body)
        writer.delete(["a/big"])
    done.set()
    watcher.join()

    assert sizes <= {0, len(body)}


def test_the_probe_agrees_and_leaves_nothing_behind(place):
    store = place.open()
    if not place.exclusive:
        with pytest.raises(StoreError, match="not exclusive"):
            probe(store)
        return

    probe(store, rounds=1)

    assert store.conditional_create
    assert keys_of(store) == []


def test_closing_twice_is_fine(store):
    store.close()
    store.close()


def test_no_run_in_the_address_means_an_empty_scan(store):
    assert keys_of(store) == []
    assert keys_of(store, "commits") == []
