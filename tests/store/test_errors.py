"""What goes wrong outside, each as one clear error, and never with a credential in it."""

from __future__ import annotations

import os
import subprocess
import threading
import time
import traceback
import uuid

import pytest

from ftckpt.clock import HandClock
from ftckpt.errors import (
    AccessDenied,
    AlreadyExists,
    BucketNotFound,
    ObjectNotFound,
    StoreError,
    StoreFull,
    StoreTimeout,
    StoreUnavailable,
    UnsafeStore,
)
from ftckpt.store import ByteRange, LocalStore, open_store
from ftckpt.store.settings import HttpSettings, s3_settings
from tests.store.scripted import Answer, failure
from tests.support.procs import free_port

KEY_ID, SECRET, TOKEN = "AKIDEXAMPLE0123", "wJalrXUtnFEMI/K7MDENG", "FwoGZXIvYXdzEXAMPLETOKEN"


def calls(store):
    return {
        "create": lambda: store.create("a", b"x"),
        "read": lambda: store.read("a"),
        "range": lambda: store.read("a", ByteRange(0, 1)),
        "size": lambda: store.size("a"),
        "scan": lambda: list(store.scan("")),
        "delete": lambda: store.delete(["a", "b"]),
    }


def everything_said(error):
    """All a log or a crash reporter could get out of an error."""
    links, link = [], error
    while link is not None:
        links.append(link)
        link = link.__cause__ or link.__context__
    texts = [str(e) + repr(e) + repr(vars(e)) for e in links]
    return "\n".join([*texts, *traceback.format_exception(error)])


@pytest.fixture(params=["s3", "fsspec+s3"])
def scheme(request):
    return request.param


def scripted_store(server, scheme, **options):
    """No retries around it: one call, one answer."""
    from ftckpt.store import fsspec, objectstore

    http = HttpSettings(options.pop("timeout_s", 10), 2, options.pop("stream_retry_s", 20))
    given = {
        "endpoint_url": server.endpoint,
        "access_key_id": KEY_ID,
        "secret_access_key": SECRET,
        "session_token": TOKEN,
        **options,
    }
    make = objectstore.s3 if scheme == "s3" else fsspec.s3fs_store
    return make("bucket", "run", s3_settings(given, {}), http)


def test_wrong_credentials_are_denied_by_every_call_at_once(weed, scheme):
    uri = f"{scheme}://{weed.bucket}/wrong"
    for wrong in ({"access_key_id": KEY_ID}, {"secret_access_key": SECRET}):
        options = {
            "access_key_id": weed.access_key,
            "secret_access_key": weed.secret_key,
            "endpoint_url": weed.endpoint,
            **wrong,
        }
        store = open_store(uri, options=options, environ={})

        for name, call in calls(store).items():
            with pytest.raises(AccessDenied, match="credentials") as caught:
                call()
            assert isinstance(caught.value, PermissionError), name
            said = everything_said(caught.value)
            assert weed.secret_key not in said and SECRET not in said


@pytest.mark.timeout(40)
def test_an_endpoint_that_is_down_is_said_to_be_within_seconds(scheme):
    options = {
        "endpoint_url": f"http://127.0.0.1:{free_port()}",
        "access_key_id": KEY_ID,
        "secret_access_key": SECRET,
    }
    clock = HandClock()
    store = open_store(f"{scheme}://bucket/run", options=options, environ={}, clock=clock)
    started_s = time.monotonic()

    for call in calls(store).values():
        with pytest.raises(StoreUnavailable, match=r"cannot connect at http://127\.0\.0\.1") as caught:
            call()
        assert caught.value.retryable
        assert isinstance(caught.value, ConnectionError)
        assert SECRET not in everything_said(caught.value)

    assert clock.now_s() < 6 * 5
    assert time.monotonic() - started_s < 30


def test_an_absent_bucket_is_named_and_not_made(weed, scheme):
    """The server would make it on the first PUT."""
    bucket = f"absent-{uuid.uuid4().hex[:12]}"
    store = open_store(f"{scheme}://{bucket}/run", environ=weed.env)

    for _ in range(2):
        with pytest.raises(BucketNotFound, match=bucket):
            store.create("a", b"x")
        with pytest.raises(BucketNotFound, match=bucket) as caught:
            list(store.scan(""))
    assert isinstance(caught.value, FileNotFoundError)


def test_a_machine_without_credentials_gets_told_so(server):
    server.answers |= {"PUT": [failure(403, "Forbidden")], "GET": [failure(403, "Forbidden")]}
    options = {"endpoint_url": server.endpoint, "metadata_endpoint": server.endpoint}
    store = open_store("s3://bucket/run", options=options, environ={})

    with pytest.raises(AccessDenied, match="credentials"):
        store.read("a")


BAD_DAYS = [
    ("PUT", failure(409, "ConditionalRequestConflict"), StoreUnavailable, True),
    ("PUT", failure(412, "PreconditionFailed"), AlreadyExists, False),
    ("PUT", failure(501, "NotImplemented"), UnsafeStore, False),
    ("PUT", failure(503, "SlowDown"), StoreUnavailable, True),
    ("GET", failure(404, "NoSuchKey"), ObjectNotFound, False),
    ("GET", failure(404, "NoSuchBucket"), BucketNotFound, False),
    ("GET", Answer(body=b"0123456789", cut_at=4), StoreUnavailable, True),
]
MORE_BAD_DAYS = [
    ("PUT", failure(400, "ExpiredToken"), AccessDenied, False),
    ("PUT", failure(400, "InvalidArgument"), StoreError, False),
    ("PUT", failure(403, "AccessDenied"), AccessDenied, False),
    ("PUT", failure(429, "TooManyRequests"), StoreUnavailable, True),
    ("PUT", failure(500, "InternalError"), StoreUnavailable, True),
    ("PUT", failure(507, "XMinioStorageFull"), StoreFull, False),
    ("GET", failure(503, "SlowDown"), StoreUnavailable, True),
]


@pytest.mark.parametrize(
    "scheme, method, answer, kind, retryable",
    [
        *(("s3", *day) for day in BAD_DAYS + MORE_BAD_DAYS),
        *(("fsspec+s3", *day) for day in BAD_DAYS),  # fewer: each of its clients costs half a second
    ],
    ids=lambda value: str(value.status) if isinstance(value, Answer) else None,
)
def test_answers_of_a_server_on_a_bad_day_get_their_name(server, scheme, method, answer, kind, retryable):
    """Above all: 409 is not "exists", it is "ask again" (protocol, section 2)."""
    server.answers[method] = [answer]
    server.answers["HEAD"] = [Answer(headers={"Content-Length": "10"})]
    store = scripted_store(server, scheme)

    with pytest.raises(StoreError) as caught:
        if method == "PUT":
            store.create("a", b"x")
        else:
            store.read("a")

    assert type(caught.value) is kind
    assert caught.value.retryable is retryable
    assert len([1 for seen, path, _ in server.requests if seen == method and "list-type" not in path]) == 1


@pytest.mark.parametrize("size_bytes", [1000, 60 << 20])
def test_whatever_a_stream_sends_is_sent_again_when_the_server_is_busy(server, scheme, size_bytes):
    """A part that fails would fail the export: nobody has the bytes before it any more."""
    busy = failure(503, "ServiceUnavailable")
    begun = Answer(
        body=b"<InitiateMultipartUploadResult><UploadId>u</UploadId></InitiateMultipartUploadResult>"
    )
    ended = Answer(body=b"<CompleteMultipartUploadResult><ETag>e</ETag></CompleteMultipartUploadResult>")
    server.answers |= {"POST": [busy, begun, ended], "PUT": [busy, Answer()]}
    server.answers["HEAD"] = [Answer()]

    stream = scripted_store(server, scheme).stream("big")
    for start in range(0, size_bytes, 1 << 20):
        stream.write(bytes(min(1 << 20, size_bytes - start)))
    stream.close()

    large = size_bytes > 1000
    assert sum(method == "POST" for method, *_ in server.requests) == (3 if large else 0)
    assert sum(method == "PUT" for method, *_ in server.requests) >= 2


def test_a_stream_to_a_server_that_stays_busy_fails_by_its_deadline(server, scheme):
    server.answers |= {"PUT": [failure(503, "ServiceUnavailable")], "HEAD": [Answer()]}

    stream = scripted_store(server, scheme, stream_retry_s=0.5).stream("a")
    stream.write(b"x")
    with pytest.raises(StoreUnavailable, match="stream a in") as caught:
        stream.close()

    assert not isinstance(caught.value, StoreTimeout)


def test_a_short_body_without_an_error_is_caught_by_its_length(server, scheme):
    """Case J12, the silent half: the server says 4 bytes and sends 4, but 10 were asked for."""
    server.answers["HEAD"] = [Answer(headers={"Content-Length": "20"})]
    server.answers["GET"] = [
        Answer(206, b"0123", {"Content-Range": "bytes 0-3/20"}),
        Answer(206, b"0123456789", {"Content-Range": "bytes 0-9/20"}),
    ]
    store = scripted_store(server, scheme)

    with pytest.raises(StoreUnavailable):
        store.read("a", ByteRange(0, 10))
    assert bytes(store.read("a", ByteRange(0, 10))) == b"0123456789"


@pytest.mark.parametrize("method", ["PUT", "GET"])
def test_a_server_that_does_not_answer_is_a_timeout(server, scheme, method):
    never = threading.Event()
    server.answers[method] = [Answer(after=never)]
    server.answers["HEAD"] = [Answer(headers={"Content-Length": "1"})]
    store = scripted_store(server, scheme, timeout_s=0.5)

    with pytest.raises(StoreTimeout) as caught:
        store.create("a", b"x") if method == "PUT" else store.read("a")
    never.set()

    assert caught.value.retryable


def test_no_credential_is_in_any_error_even_when_the_server_quotes_them_back(server, scheme):
    quoted = f"key {KEY_ID} secret {SECRET} token {TOKEN}"
    for status, code in ((403, "SignatureDoesNotMatch"), (500, "InternalError"), (400, "InvalidArgument")):
        answer = failure(status, code, quoted)
        answer = Answer(
            status, answer.body.replace(b"</Error>", f"<Canonical>{quoted}</Canonical></Error>".encode())
        )
        server.answers |= {key: [answer] for key in ("PUT", "GET", "HEAD", "POST", "DELETE", "LIST")}
        store = scripted_store(server, scheme)

        for name, call in calls(store).items():
            with pytest.raises(StoreError) as caught:
                call()
            said = everything_said(caught.value)
            for secret in (KEY_ID, SECRET, TOKEN):
                assert secret not in said, (name, status)


def test_no_credential_is_in_the_repr_of_a_store_or_its_settings_or_in_an_event(server, scheme):
    events = []
    server.answers |= {"GET": [failure(503, "SlowDown", f"{SECRET} {TOKEN}")], "HEAD": [failure(503, "x")]}
    options = {
        "endpoint_url": server.endpoint,
        "access_key_id": KEY_ID,
        "secret_access_key": SECRET,
        "session_token": TOKEN,
    }
    store = open_store(
        f"{scheme}://bucket/run", options=options, environ={}, clock=HandClock(), events=events.append
    )
    with pytest.raises(StoreUnavailable):
        store.read("a")

    said = repr(store) + str(store) + store.uri + repr(events) + repr(s3_settings(options, {}))

    assert len(events) > 3
    for secret in (KEY_ID, SECRET, TOKEN):
        assert secret not in said


def test_settings_and_not_the_environment_sign_the_request(server, monkeypatch):
    """A token of the environment with a key of the options would be nobody's credential."""
    monkeypatch.setenv("AWS_SESSION_TOKEN", "token-of-somebody-else")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key-of-somebody-else")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret-of-somebody-else")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:1")
    server.answers["PUT"] = [Answer()]
    options = {"endpoint_url": server.endpoint, "access_key_id": KEY_ID, "secret_access_key": SECRET}

    open_store("s3://bucket/run", options=options).create("a", b"x")

    (headers,) = [headers for method, _, headers in server.requests if method == "PUT"]
    assert f"Credential={KEY_ID}/" in headers["authorization"]
    assert "x-amz-security-token" not in headers
    assert headers["if-none-match"] == "*"
    assert headers["x-amz-content-sha256"] == "UNSIGNED-PAYLOAD"


# --- folders ------------------------------------------------------------------------------------


def test_a_full_disk_is_said_to_be_full_and_nothing_half_written_stays(small_disk):
    store = LocalStore(small_disk / "run")
    store.create("packs/1", bytes(300_000))

    with pytest.raises(StoreFull, match="No space left") as caught:
        store.create("packs/2", bytes(2_000_000))

    assert not caught.value.retryable
    assert [info.key for info in store.scan("")] == ["packs/1"]
    store.create("packs/3", bytes(300_000))
    assert store.size("packs/1") == 300_000


def test_a_read_only_folder_denies_writing_and_allows_reading(small_disk):
    store = LocalStore(small_disk / "run")
    store.create("a", b"x")
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)

    for call in (lambda: store.create("b", b"x"), lambda: store.delete(["a"])):
        with pytest.raises(AccessDenied, match=r"[Rr]ead-only") as caught:
            call()
        assert isinstance(caught.value, PermissionError)
    with pytest.raises(AccessDenied):
        LocalStore(small_disk / "another").create("a", b"x")

    assert store.read("a") == b"x"
    with pytest.raises(AlreadyExists):
        store.create("a", b"y")


def test_a_file_in_the_place_of_the_folder_is_named(tmp_path):
    (tmp_path / "run").write_bytes(b"a file")

    for store in (LocalStore(tmp_path / "run"), LocalStore(tmp_path / "run" / "below")):
        with pytest.raises(StoreError, match=r"[Nn]ot a (folder|directory)"):
            store.create("a", b"x")
    with pytest.raises(StoreError, match="not a folder"):
        list(LocalStore(tmp_path / "run").scan(""))

    assert (tmp_path / "run").read_bytes() == b"a file"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere; the read-only mount stands for it")
def test_a_folder_of_somebody_else_is_denied(tmp_path):
    tmp_path.chmod(0o555)

    with pytest.raises(AccessDenied):
        LocalStore(tmp_path / "run").create("a", b"x")
