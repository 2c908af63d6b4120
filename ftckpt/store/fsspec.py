"""Any other address through fsspec, and s3fs on request.

fsspec promises a namespace, not a protocol: most of its file systems check and then write, so two
creators can both win (its local one let several win in 58 of 200 races). ``conditional_create`` is
true only where the server decides; elsewhere a run must have exactly one writer, and whoever
opens such a store has to say that this is understood.

Listings and sizes never come from a cache.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeVar

import fsspec

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

T = TypeVar("T")

_LONGEST_WAIT_S = 20.0
_MOST_TRIES = 100


class FsspecStore:
    """A folder of an fsspec file system. Made by ``s3fs_store`` and ``other`` below. ``streaming`` makes the
    file system of streams, if that is another one.
    """

    def __init__(
        self,
        fs: Any,
        root: str,
        uri: str,
        *,
        conditional: bool,
        streaming: Callable[[], Any] | None = None,
        where: str = "",
        secrets: Sequence[str] = (),
    ) -> None:
        self._fs = fs
        self._streaming = streaming
        self._streams: Any = None
        self._root = root.rstrip("/")
        self._uri = uri
        self._conditional = conditional
        self._where = where
        self._secrets = tuple(secret for secret in secrets if secret)
        self._pid = os.getpid()
        self._bucket_seen = not conditional

    def __repr__(self) -> str:
        return f"FsspecStore({self._uri!r})"

    @property
    def uri(self) -> str:
        return self._uri

    @property
    def conditional_create(self) -> bool:
        return self._conditional

    def create(self, key: str, body: Buffer) -> None:
        """Where ``conditional_create`` is false: a look, then a write. One writer only."""
        self._put("create", key, body)

    def read(self, key: str, at: ByteRange | None = None) -> bytes | memoryview:
        check_key(key, op="read", uri=self._uri)
        size_bytes = self.size(key)
        if at is not None and at.end > size_bytes:
            raise StoreError(
                f"read {key} in {self._uri}: bytes {at.start} to {at.end} were asked for, "
                f"but the object has {size_bytes}",
                op="read",
                key=key,
                uri=self._uri,
                size_bytes=size_bytes,
            )
        body: bytes
        if at is None:
            body = self._call("read", key, lambda: self._fs.cat_file(self._path(key)))
            expected_bytes = size_bytes
        else:
            start, end = at.start, at.end
            body = self._call("read", key, lambda: self._fs.cat_file(self._path(key), start=start, end=end))
            expected_bytes = at.size
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
        return self._call("size", key, lambda: self._file_size(key))

    def scan(self, prefix: str) -> Iterator[ObjectInfo]:
        check_prefix(prefix, uri=self._uri)
        found = self._call("scan", prefix, lambda: self._listing(prefix))
        return iter(sorted(found, key=lambda info: info.key))

    def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            check_key(key, op="delete", uri=self._uri)
            path = self._path(key)
            try:
                self._call("delete", key, lambda path=path: self._fs.rm_file(path))  # type: ignore[misc]
            except ObjectNotFound:
                continue

    def overwrite(self, key: str, body: Buffer) -> None:
        """As atomic as the file system's own writing."""
        self._put("overwrite", key, body)

    def stream(self, key: str) -> FsspecStream:
        """Begin an object that is written part by part. Whether readers see it grow is the file system's
        affair.
        """
        check_key(key, op="stream", uri=self._uri)
        if self._streams is None:
            self._streams = self._fs if self._streaming is None else self._streaming()
        return FsspecStream(self, self._streams, key)

    def close(self) -> None:
        """The connections belong to fsspec, which closes them when the file system is dropped."""

    def _path(self, key: str) -> str:
        return f"{self._root}/{key}"

    def _put(self, op: Literal["create", "overwrite"], key: str, body: Buffer) -> None:
        check_key(key, op=op, uri=self._uri)
        if not self._bucket_seen:
            # Some servers make an absent bucket on the first PUT: a mistyped name must not succeed.
            self._call(op, key, lambda: self._fs.find(f"{self._root}/{key}"))
        flat = view(body)
        sent = body if isinstance(body, bytes) else bytes(flat)  # botocore takes no views
        if self._conditional:
            # A chunk size above the body's keeps it one PUT: no multipart upload to leave behind.
            one_put = max(flat.nbytes, 1) + 1
            self._call(op, key, lambda: self._fs.pipe_file(self._path(key), sent, mode=op, chunksize=one_put))
        else:
            self._call(op, key, lambda: self._look_then_write(key, sent, spare=op == "create"))

    def _look_then_write(self, key: str, body: bytes, *, spare: bool) -> None:
        path = self._path(key)
        self._fs.invalidate_cache()
        if spare and self._fs.exists(path):
            raise FileExistsError(errno.EEXIST, "exists", path)
        self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)
        self._fs.pipe_file(path, body)

    def _file_size(self, key: str) -> int:
        self._fs.invalidate_cache()
        found = self._fs.info(self._path(key))
        if found["type"] != "file":
            raise FileNotFoundError(errno.ENOENT, "not a file", key)
        return int(found["size"])

    def _listing(self, prefix: str) -> list[ObjectInfo]:
        self._fs.invalidate_cache()
        top = f"{self._root}/{prefix}" if prefix else self._root
        found: dict[str, dict[str, Any]] = self._fs.find(top, detail=True)
        below = f"{self._root}/"
        listed = [
            ObjectInfo(path[len(below) :], int(info["size"]))
            for path, info in found.items()
            if path.startswith(below)
        ]
        return [info for info in listed if is_below(info.key, prefix)]

    def _call(self, op: str, key: str, effect: Callable[[], T]) -> T:
        if os.getpid() != self._pid:
            raise StoreError(
                f"{op} {key} in {self._uri}: this store was opened before the process forked\n"
                "  nothing was sent; open the store in the worker",
                op=op,
                key=key,
                uri=self._uri,
            )
        try:
            result = effect()
        except Exception as error:  # fsspec's implementations raise whatever their clients raise
            failure = _translated(
                error, op=op, key=key, uri=self._uri, where=self._where, secrets=self._secrets
            )
        else:
            self._bucket_seen = True
            return result
        raise failure  # not chained: the original may quote a request with its credentials


class FsspecStream:
    """A file that fsspec has open for writing."""

    def __init__(self, store: FsspecStore, fs: Any, key: str) -> None:
        self._store, self._key, self._path = store, key, store._path(key)  # noqa: SLF001 - the two are one thing
        self._out: Any = self._call(lambda: self._open(fs))

    def write(self, data: Buffer) -> None:
        self._call(lambda: self._out.write(view(data)))

    def close(self) -> None:
        self._call(self._out.close)

    def abort(self) -> None:
        discard = getattr(self._out, "discard", None)
        if discard is not None:
            self._call(discard)
        else:
            self._call(self._out.close)
            self._store.delete([self._key])

    def _open(self, fs: Any) -> Any:
        fs.makedirs(self._path.rpartition("/")[0], exist_ok=True)
        return fs.open(self._path, "wb")

    def _call(self, effect: Callable[[], T]) -> T:
        return self._store._call("stream", self._key, effect)  # noqa: SLF001


def s3fs_store(bucket: str, prefix: str, settings: S3Settings, http: HttpSettings) -> FsspecStore:
    """S3 through s3fs, whose create is conditional at the server."""
    if settings.extra:
        name = min(settings.extra)
        raise SettingsError(f"store option {name!r} is known for s3:// but not for fsspec+s3://", option=name)
    key, secret, token = settings.credentials or (None, None, None)

    def client(retries: Mapping[str, object]) -> Any:
        fs = fsspec.filesystem(
            "s3",
            key=key,
            secret=secret,
            token=token,
            client_kwargs={"endpoint_url": settings.endpoint_url, "region_name": settings.region},
            config_kwargs={
                "s3": {"addressing_style": "path" if settings.path_style else "virtual"},
                "connect_timeout": http.connect_timeout_s,
                "read_timeout": http.timeout_s,
                "retries": retries,
            },
            use_listings_cache=False,
            skip_instance_cache=True,
        )
        fs.retries = 1  # ours are outside, or botocore's
        return fs

    root = f"{bucket}/{prefix}".rstrip("/")
    return FsspecStore(
        client({"max_attempts": 0}),
        root,
        f"fsspec+s3://{root}",
        conditional=True,
        streaming=lambda: client({"total_max_attempts": _tries(http.stream_retry_s), "mode": "standard"}),
        where=settings.endpoint_url or "",
        secrets=settings.secrets,
    )


def _tries(limit_s: float) -> int:
    """How often botocore has to try so that it goes on for about that long: it waits up to 1, 2, 4, … 20 s, half
    of that on average, and takes a number of tries instead of a time.
    """
    tries, spent_s = 1, 0.0
    while spent_s < limit_s and tries < _MOST_TRIES:
        spent_s += min(_LONGEST_WAIT_S, 2.0 ** (tries - 1)) / 2
        tries += 1
    return tries


def other(scheme: str, rest: str, options: dict[str, Any]) -> FsspecStore:
    """Any scheme that fsspec knows; ``options`` go to its file system."""
    try:
        fs = fsspec.filesystem(scheme, use_listings_cache=False, skip_instance_cache=True, **options)
    except (ImportError, ValueError) as error:
        raise SettingsError(
            f"no store for {scheme}://: {error}\n  known without fsspec: a path, file, memory, s3, gs, az",
            scheme=scheme,
        ) from error
    secrets = [value for value in options.values() if isinstance(value, str) and len(value) >= 8]
    root = str(fs._strip_protocol(f"{scheme}://{rest}"))  # noqa: SLF001 (its documented hook)
    return FsspecStore(fs, root, f"fsspec+{scheme}://{rest}".rstrip("/"), conditional=False, secrets=secrets)


_CREDENTIAL_CODES = frozenset(
    {"ExpiredToken", "InvalidToken", "TokenRefreshRequired", "AuthorizationHeaderMalformed"}
)
_ACCESS_NAMES = frozenset({"NoCredentialsError", "PartialCredentialsError", "TokenRetrievalError"})
_CONNECT_NAMES = frozenset({"EndpointConnectionError", "ConnectTimeoutError", "ProxyConnectionError"})
_TIMEOUT_NAMES = frozenset({"ReadTimeoutError", "ServerTimeoutError", "TimeoutError", "FSTimeoutError"})
_BROKEN_NAMES = frozenset(
    {
        "ConnectionClosedError",
        "HTTPClientError",
        "IncompleteReadError",
        "ResponseStreamingError",
        "ClientPayloadError",
        "ServerDisconnectedError",
        "ClientOSError",
        "ClientConnectorError",
        "ContentLengthError",
    }
)


def _translated(
    error: Exception, *, op: str, key: str, uri: str, where: str, secrets: Sequence[str]
) -> StoreError:
    status, code, said = _answer(error)
    names = {kind.__name__ for kind in type(error).__mro__}
    at = f" at {where}" if where else ""
    what = f"{op} {key or 'everything'} in {uri}"
    parts = [str(status or ""), code, said] if code else [type(error).__name__, str(error)]
    answer = strike_out(": ".join(part for part in parts if part), secrets)[:300]
    facts: dict[str, object] = {"op": op, "key": key, "uri": uri, "status": status, "code": code}
    number = error.errno if isinstance(error, OSError) else None

    if code in ("NoSuchBucket", "ContainerNotFound"):
        return BucketNotFound(
            f"{what}: there is no such bucket{at} ({answer})\n  nothing was written; check the name, "
            "or make the bucket first",
            **facts,
        )
    if isinstance(error, PermissionError) or status in (401, 403) or code in _CREDENTIAL_CODES:
        return AccessDenied(
            f"{what}: access denied{at} ({answer})\n  nothing was changed; check the credentials and "
            "what they may do",
            **facts,
        )
    if names & _ACCESS_NAMES:
        return AccessDenied(f"{what}: no credentials were found\n  nothing was sent", **facts)
    if isinstance(error, FileExistsError) or code == "PreconditionFailed" or status == 412:
        return AlreadyExists(f"{what}: an object of that name exists and was left alone", **facts)
    if isinstance(error, FileNotFoundError | NotADirectoryError | IsADirectoryError) or status == 404:
        return ObjectNotFound(f"{what}: there is no such object", **facts)
    if number in (errno.ENOSPC, errno.EDQUOT) or status == 507:
        return StoreFull(
            f"{what}: the store is full{at} ({answer})\n  free some space (`ftckpt gc`)", **facts
        )
    if number == errno.EROFS:
        return AccessDenied(f"{what}: the file system is read-only\n  nothing was changed", **facts)
    if names & _CONNECT_NAMES:
        return StoreUnavailable(
            f"{what}: cannot connect{at}\n  check the endpoint and that the server runs",
            connected=False,
            **facts,
        )
    if isinstance(error, TimeoutError) or names & _TIMEOUT_NAMES or status == 408:
        return StoreTimeout(f"{what}: no answer in time{at}; it may have taken effect", **facts)
    if isinstance(error, ConnectionError) or names & _BROKEN_NAMES:
        return StoreUnavailable(f"{what}: the connection broke{at} ({answer})", **facts)
    if status == 501:
        return UnsafeStore(
            f"{what}: the server does not know this kind of request{at} ({answer})\n  ftckpt needs "
            "conditional puts (If-None-Match) to make commits exclusive",
            **facts,
        )
    if status is not None and (status in (409, 429) or status >= 500):
        return StoreUnavailable(f"{what}: the server could not serve it{at} ({answer})", **facts)
    return StoreError(f"{what}: {answer}{at}", **facts)


def _answer(error: Exception) -> tuple[int | None, str, str]:
    """HTTP status, code and message of an S3 answer, wherever in the chain botocore put it."""
    link: BaseException | None = error
    while link is not None:
        response = getattr(link, "response", None)
        if isinstance(response, dict):
            said = response.get("Error", {})
            status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
            return status, str(said.get("Code", "")), str(said.get("Message", ""))
        link = link.__cause__
    return None, "", ""
