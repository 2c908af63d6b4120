"""Buckets (S3, Google, Azure) and shared memory as stores, through obstore.

Knows how obstore speaks and what its errors mean; they are translated here and nowhere else.
Refuses to know retries (``retry`` does that, so obstore's own are off but for streams, whose parts only
obstore can send again) and addresses (``opening``).

obstore's errors quote requests and answers, and an S3 answer can quote credentials back. So an
error raised here is made from the status, the server's code and its message only, with every known
secret struck out, and the original is not chained.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import obstore
from obstore.exceptions import (
    AlreadyExistsError,
    BaseError,
    NotFoundError,
    NotSupportedError,
    PermissionDeniedError,
    UnauthenticatedError,
)
from obstore.store import AzureStore, GCSStore, MemoryStore, S3Store

from ftckpt.errors import (
    AccessDenied,
    AlreadyExists,
    BucketNotFound,
    ObjectNotFound,
    SettingsError,
    StoreError,
    StoreFull,
    StoreTimeout,
    StoreUnavailable,
    UnsafeStore,
)
from ftckpt.store.api import Buffer, ByteRange, ObjectInfo
from ftckpt.store.keys import check_key, check_prefix, is_below, view
from ftckpt.store.settings import HttpSettings, S3Settings, strike_out

if TYPE_CHECKING:
    from obstore.store import ClientConfig, RetryConfig

T = TypeVar("T")

ObstoreStore = S3Store | GCSStore | AzureStore | MemoryStore


class ObjectStorage:
    """A prefix of a bucket. Made by ``s3``, ``google``, ``azure`` and ``memory`` below.

    Its threads do not survive a fork, so a forked child is refused instead of hanging. ``streaming`` makes the
    client of streams, which tries parts again.
    """

    def __init__(
        self,
        inner: ObstoreStore,
        uri: str,
        *,
        streaming: Callable[[], ObstoreStore] | None = None,
        where: str = "",
        secrets: Sequence[str] = (),
    ) -> None:
        self._inner = inner
        self._streaming = streaming
        self._streams: ObstoreStore | None = None
        self._uri = uri
        self._where = where
        self._secrets = tuple(secret for secret in secrets if secret)
        self._pid = os.getpid()
        self._in_memory = isinstance(inner, MemoryStore)
        self._bucket_seen = self._in_memory

    def __repr__(self) -> str:
        return f"ObjectStorage({self._uri!r})"

    @property
    def uri(self) -> str:
        return self._uri

    @property
    def conditional_create(self) -> bool:
        return True

    def create(self, key: str, body: Buffer) -> None:
        self._put("create", key, body)

    def read(self, key: str, at: ByteRange | None = None) -> bytes | memoryview:
        check_key(key, op="read", uri=self._uri)
        if at is None:
            body, expected_bytes = self._call("read", key, lambda: self._read_whole(key))
        else:
            expected_bytes = at.size
            body = self._read_range(key, at)
        if len(body) != expected_bytes:
            raise StoreUnavailable(
                f"read {key} in {self._uri}: the body ended after {len(body)} of {expected_bytes} bytes",
                op="read",
                key=key,
                uri=self._uri,
            )
        return body

    def size(self, key: str) -> int:
        check_key(key, op="size", uri=self._uri)
        return int(self._call("size", key, lambda: obstore.head(self._inner, key))["size"])

    def scan(self, prefix: str) -> Iterator[ObjectInfo]:
        check_prefix(prefix, uri=self._uri)
        found = self._call("scan", prefix, lambda: self._listing(prefix))
        # Servers that keep folders list "a/b" before "a-b"; key order is by whole keys.
        return iter(sorted(found, key=lambda info: info.key))

    def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            check_key(key, op="delete", uri=self._uri)
        if keys:
            try:
                self._call("delete", keys[0], lambda: obstore.delete(self._inner, list(keys)))
            except ObjectNotFound:
                if len(keys) > 1:  # which of them was absent is not known; go on with the others
                    for key in keys:
                        self.delete([key])

    def overwrite(self, key: str, body: Buffer) -> None:
        self._put("overwrite", key, body)

    def copy(self, key: str, to: str) -> None:
        """Have the server make an object of the bytes of another, if there is none of that name yet."""
        for one in (key, to):
            check_key(one, op="copy", uri=self._uri)
        self._call("copy", to, lambda: obstore.copy(self._inner, key, to, overwrite=False))

    def stream(self, key: str) -> BucketStream:
        """Begin an object that is written part by part, in a multipart upload where it is a large one."""
        check_key(key, op="stream", uri=self._uri)
        if self._streams is None:
            self._streams = self._inner if self._streaming is None else self._streaming()
        return BucketStream(self, self._streams, key)

    def close(self) -> None:
        """obstore closes its sockets when the store is dropped."""

    def _put(self, op: Literal["create", "overwrite"], key: str, body: Buffer) -> None:
        check_key(key, op=op, uri=self._uri)
        if not self._bucket_seen:
            # Some servers make an absent bucket on the first PUT: a mistyped name must not succeed.
            self._call(op, key, lambda: next(iter(obstore.list(self._inner, chunk_size=1)), None))
        flat = view(body)
        # The memory store would keep looking at the caller's buffer.
        sent = bytes(flat) if self._in_memory and not isinstance(body, bytes) else flat
        self._call(op, key, lambda: obstore.put(self._inner, key, sent, mode=op, use_multipart=False))

    def _read_whole(self, key: str) -> tuple[memoryview, int]:
        answer = obstore.get(self._inner, key)
        return memoryview(answer.bytes()), int(answer.meta["size"])

    def _read_range(self, key: str, at: ByteRange) -> memoryview:
        try:
            body = self._call(
                "read",
                key,
                lambda: memoryview(obstore.get_range(self._inner, key, start=at.start, end=at.end)),
            )
        except (ObjectNotFound, AccessDenied):
            raise
        except StoreError as error:
            if error.retryable:
                raise
            body = memoryview(b"")  # "range not satisfiable", in the words of each server
            refusal: StoreError | None = error
        else:
            refusal = None
        if len(body) == at.size:
            return body
        if (size_bytes := self.size(key)) < at.end:
            raise StoreError(
                f"read {key} in {self._uri}: bytes {at.start} to {at.end} were asked for, "
                f"but the object has {size_bytes}",
                op="read",
                key=key,
                uri=self._uri,
                size_bytes=size_bytes,
            )
        if refusal is not None and refusal.facts["status"] is not None:
            raise refusal
        return body  # too short, and not for want of bytes: ``read`` says so

    def _listing(self, prefix: str) -> list[ObjectInfo]:
        pages = obstore.list(self._inner, prefix or None, chunk_size=1000)
        return [
            ObjectInfo(line["path"], int(line["size"]))
            for page in pages
            for line in page
            if is_below(line["path"], prefix)
        ]

    def _call(self, op: str, key: str, effect: Callable[[], T]) -> T:
        if os.getpid() != self._pid or not _RUNTIME.usable():
            raise StoreError(
                f"{op} {key} in {self._uri}: this process was forked from one that used object storage, "
                "and its connections do not work here\n  nothing was sent; start workers with the "
                "'spawn' or 'forkserver' method, and open the store in the worker",
                op=op,
                key=key,
                uri=self._uri,
            )
        try:
            result = effect()
        except (BaseError, OSError) as error:
            failure = _translated(
                error,
                op=op,
                key=key,
                uri=self._uri,
                where=self._where,
                secrets=self._secrets,
                conflict_means_exists=not isinstance(self._inner, S3Store),
                worked_before=self._bucket_seen,
            )
        else:
            self._bucket_seen = True
            return result
        raise failure


_PART_BYTES = 16 << 20
"""Of a multipart upload, which may have 10,000 of them."""


class BucketStream:
    """A multipart upload. One that is given up stays unfinished in the bucket, unseen by readers, until
    the bucket's own rule for unfinished uploads removes it.
    """

    def __init__(self, store: ObjectStorage, client: ObstoreStore, key: str) -> None:
        self._store, self._key = store, key
        self._out: Any = self._call(
            lambda: obstore.open_writer(client, key, buffer_size=_PART_BYTES, max_concurrency=2)
        )

    def write(self, data: Buffer) -> None:
        held = bytes(data)  # the writer would keep looking at the caller's buffer until its part is sent
        self._call(lambda: self._out.write(held))

    def close(self) -> None:
        self._call(self._out.close)

    def abort(self) -> None:
        self._out = None

    def _call(self, effect: Callable[[], T]) -> T:
        return self._store._call("stream", self._key, effect)  # noqa: SLF001 - the two are one thing


def s3(bucket: str, prefix: str, settings: S3Settings, http: HttpSettings) -> ObjectStorage:
    """Settings win over the environment, also where obstore would look there by itself."""
    config: dict[str, Any] = {
        "region": settings.region,
        "virtual_hosted_style_request": not settings.path_style,
        # Every record and chunk is checked against its own digest; hashing bodies once more costs CPU.
        "unsigned_payload": True,
        "conditional_put": "etag",
        "copy_if_not_exists": "header: If-None-Match: *",
        **settings.extra,
    }
    if settings.endpoint_url:
        config["endpoint"] = settings.endpoint_url
        config["aws_endpoint_url_s3"] = settings.endpoint_url
    keys = settings.credentials
    provider = None
    if keys is not None:
        access_key_id, secret_access_key, session_token = keys

        def provider() -> Any:
            return {
                "access_key_id": access_key_id,
                "secret_access_key": secret_access_key,
                "token": session_token,
                "expires_at": None,
            }

    def client(retries: RetryConfig) -> S3Store:
        return S3Store(
            bucket,
            prefix=prefix or None,
            config=config,  # type: ignore[arg-type]
            client_options=_client(http, allow_http=settings.allow_http),
            retry_config=retries,
            credential_provider=provider,
        )

    uri = _address("s3", bucket, prefix)
    return _storage(client, uri, http, where=settings.endpoint_url or "", secrets=settings.secrets)


def google(bucket: str, prefix: str, config: dict[str, Any], http: HttpSettings) -> ObjectStorage:
    def client(retries: RetryConfig) -> GCSStore:
        return GCSStore(
            bucket,
            prefix=prefix or None,
            config=config,  # type: ignore[arg-type]
            client_options=_client(http, allow_http=False),
            retry_config=retries,
        )

    return _storage(client, _address("gs", bucket, prefix), http, secrets=_texts(config))


def azure(container: str, prefix: str, config: dict[str, Any], http: HttpSettings) -> ObjectStorage:
    def client(retries: RetryConfig) -> AzureStore:
        return AzureStore(
            container,
            prefix=prefix or None,
            config=config,  # type: ignore[arg-type]
            client_options=_client(http, allow_http=str(config.get("endpoint", "")).startswith("http://")),
            retry_config=retries,
        )

    return _storage(client, _address("az", container, prefix), http, secrets=_texts(config))


def _storage(
    client: Callable[[RetryConfig], ObstoreStore],
    uri: str,
    http: HttpSettings,
    *,
    where: str = "",
    secrets: Sequence[str],
) -> ObjectStorage:
    """A client without retries, and another with them once a stream is opened."""
    once: RetryConfig = {"max_retries": 0, "retry_timeout": timedelta(0)}
    again: RetryConfig = {"max_retries": 1000, "retry_timeout": timedelta(seconds=http.stream_retry_s)}
    inner = _made(uri, secrets, lambda: client(once))
    return ObjectStorage(inner, uri, streaming=lambda: client(again), where=where, secrets=secrets)


def _made(uri: str, secrets: Sequence[str], make: Callable[[], T]) -> T:
    """What ``make`` gives. What a client says of its own settings is told as ours."""
    try:
        return make()
    except (BaseError, ValueError) as error:  # the latter of a character that no address has
        failure = SettingsError(
            f"{uri}: the store cannot be opened: {strike_out(_short(str(error)), secrets)}\n"
            "  nothing was sent; check the store options and the environment",
            uri=uri,
        )
    raise failure  # not chained: the original may quote a secret


def memory(name: str) -> ObjectStorage:
    """The store of that name in this process: one per name, however often it is opened."""
    with _MEMORY_LOCK:
        inner = _MEMORIES.setdefault(name, MemoryStore())
    return ObjectStorage(inner, f"memory://{name}")


class _Runtime:
    """Whether obstore's threads, which are one per process and start at first use, are ours."""

    def __init__(self) -> None:
        self._pid: int | None = None

    def usable(self) -> bool:
        if self._pid is None:
            self._pid = os.getpid()
        return self._pid == os.getpid()


# The three things here that outlive a store, because what they describe does: obstore's runtime is
# one per process, and a memory store must be found again by its name.
_RUNTIME = _Runtime()
_MEMORIES: dict[str, MemoryStore] = {}
_MEMORY_LOCK = threading.Lock()

_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>([^<]{1,100})</Code>")
_MESSAGE = re.compile(r"<Message>([^<]{1,300})</Message>")
_KIND = re.compile(r"HttpError \{\s*kind: (\w+)")
_QUERY = re.compile(r"\?\S+")
_CREDENTIAL_CODES = frozenset(
    {
        "ExpiredToken",
        "InvalidToken",
        "TokenRefreshRequired",
        "AuthorizationHeaderMalformed",
        "InvalidAccessKeyId",
    }
)
_BUCKET_CODES = frozenset({"NoSuchBucket", "ContainerNotFound"})
_FULL_CODES = frozenset({"QuotaExceeded", "XMinioStorageFull", "InsufficientStorage"})
_MACHINE_CREDENTIALS = "http://169.254.169.254/"
"""Where a client without keys asks the cloud machine that it runs on."""


def _translated(
    error: BaseException,
    *,
    op: str,
    key: str,
    uri: str,
    where: str,
    secrets: Sequence[str],
    conflict_means_exists: bool,
    worked_before: bool,
) -> StoreError:
    text = str(error)
    head, _, debug = text.partition("\n\nDebug source:")
    status = int(found.group(1)) if (found := _STATUS.search(head)) else None
    code = found.group(1) if (found := _CODE.search(head)) else ""
    said = found.group(1) if (found := _MESSAGE.search(head)) else ""
    kind = found.group(1) if (found := _KIND.search(debug)) else ""
    at = f" at {where}" if where else ""
    what = f"{op} {key or 'everything'} in {uri}"
    answer = strike_out(
        ": ".join(part for part in (str(status or ""), code, said) if part) or _short(head), secrets
    )
    facts: dict[str, object] = {"op": op, "key": key, "uri": uri, "status": status, "code": code}

    if code in _BUCKET_CODES:
        return BucketNotFound(
            f"{what}: there is no such bucket{at} ({answer})\n  nothing was written; check the name, "
            "or make the bucket first",
            **facts,
        )
    if _MACHINE_CREDENTIALS in head and worked_before:
        return StoreUnavailable(f"{what}: the machine's credentials could not be renewed", **facts)
    if _MACHINE_CREDENTIALS in head or (isinstance(error, UnauthenticatedError) and status is None):
        return AccessDenied(
            f"{what}: no credentials were found\n  nothing was sent; set AWS_ACCESS_KEY_ID and "
            "AWS_SECRET_ACCESS_KEY, or give them in store_options",
            **facts,
        )
    if (
        isinstance(error, PermissionDeniedError | UnauthenticatedError)
        or status in (401, 403)
        or code in _CREDENTIAL_CODES
    ):
        return AccessDenied(
            f"{what}: access denied{at} ({answer})\n  nothing was changed; check the credentials and "
            "what they may do",
            **facts,
        )
    if isinstance(error, AlreadyExistsError) and (status != 409 or conflict_means_exists):
        return AlreadyExists(f"{what}: an object of that name exists and was left alone", **facts)
    if status == 409:  # S3: two writers at this moment, nobody knows yet who wins
        return StoreUnavailable(f"{what}: another create of that key is under way{at} ({answer})", **facts)
    if isinstance(error, NotFoundError | FileNotFoundError) or status == 404:
        return ObjectNotFound(f"{what}: there is no such object", **facts)
    if status == 507 or code in _FULL_CODES:
        return StoreFull(
            f"{what}: the store is full{at} ({answer})\n  nothing became visible; free some space (`ftckpt gc`)",
            **facts,
        )
    if status == 408 or kind == "Timeout" or code == "RequestTimeout":
        return StoreTimeout(f"{what}: no answer in time{at}; it may have taken effect", **facts)
    if isinstance(error, NotSupportedError) or status == 501:
        return UnsafeStore(
            f"{what}: the server does not know this kind of request{at} ({answer})\n  ftckpt needs "
            "conditional puts (If-None-Match) to make commits exclusive",
            **facts,
        )
    if "redirect without LOCATION" in head or status in (301, 307):
        return StoreError(
            f"{what}: the server sends us elsewhere{at}, which usually means another region\n"
            "  nothing was changed; set AWS_REGION to the bucket's region",
            **facts,
        )
    if status is not None and (status == 429 or status >= 500):
        return StoreUnavailable(f"{what}: the server could not serve it{at} ({answer})", **facts)
    if kind == "Connect":
        return StoreUnavailable(
            f"{what}: cannot connect{at}\n  check the endpoint and that the server runs",
            connected=False,
            **facts,
        )
    if kind:  # Interrupted, Request, Decode, Unknown: the connection broke below us
        return StoreUnavailable(f"{what}: the connection broke{at} ({answer})", **facts)
    return StoreError(f"{what}: {answer}{at}", **facts)


def _short(text: str) -> str:
    """The first line; query strings go, because a signed URL is a credential."""
    return _QUERY.sub("", text.splitlines()[0])[:300] if text else "no reason given"


def _client(http: HttpSettings, *, allow_http: bool) -> ClientConfig:
    return {
        "allow_http": allow_http,
        "timeout": timedelta(seconds=http.timeout_s),
        "connect_timeout": timedelta(seconds=http.connect_timeout_s),
    }


def _address(scheme: str, bucket: str, prefix: str) -> str:
    return f"{scheme}://{bucket}/{prefix}".rstrip("/")


def _texts(config: dict[str, Any]) -> list[str]:
    return [value for value in config.values() if isinstance(value, str) and len(value) >= 8]
