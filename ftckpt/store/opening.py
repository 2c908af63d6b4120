"""From an address to a store: which kind, with which settings, wrapped in retry and limit.

The only place that reads the ``AWS_*`` variables: when a store is opened, and again when the
credentials it was opened with are refused.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Mapping
from urllib.parse import unquote, urlsplit

from ftckpt.address import split
from ftckpt.bounds import DAY_S, SHORTEST_S, require_number
from ftckpt.clock import Clock, SystemClock
from ftckpt.errors import SettingsError, UnsafeStore
from ftckpt.events import Events, silent
from ftckpt.store.api import ObjectStore, StreamingStore
from ftckpt.store.files import Files
from ftckpt.store.limit import LimitStore
from ftckpt.store.local import LocalStore
from ftckpt.store.renewing import Opened, RenewingStore
from ftckpt.store.retry import RetryStore
from ftckpt.store.settings import HttpSettings, S3Settings, s3_settings

_OURS = ("max_calls", "timeout_s", "connect_timeout_s")


def open_store(
    uri: str | os.PathLike[str],
    *,
    options: Mapping[str, object] | None = None,
    allow_unconditional: bool = False,
    retry_deadline_s: float = 60.0,
    events: Events = silent,
    clock: Clock | None = None,
    environ: Mapping[str, str] | None = None,
) -> ObjectStore:
    """The store at an address. No I/O: a wrong bucket or key shows at the first call.

    * a path or ``file:///path``: a local folder
    * ``memory://name``: in this process, one per name
    * ``s3://bucket/prefix``, ``gs://…``, ``az://…``: buckets, through obstore
    * ``fsspec+s3://bucket/prefix``: S3 through s3fs
    * any other scheme, or ``fsspec+scheme://…``: through fsspec, refused unless
      ``allow_unconditional``, because creates are not exclusive there: one writer only

    ``options`` win over the ``AWS_*`` variables and may also hold ``max_calls`` (calls at once, 32),
    ``timeout_s`` (one request with its body, 60) and ``connect_timeout_s`` (5). For S3 they may hold a
    ``credential_provider``: a function without arguments that returns a dict with ``access_key_id``,
    ``secret_access_key`` and ``token``, asked again when what it gave last is refused.

    Raises ``SettingsError`` for an address or option that means nothing, ``UnsafeStore`` as above.
    """
    inner, store = _opened(uri, options, retry_deadline_s, events, clock, environ)
    if not inner.conditional_create and not allow_unconditional:
        raise UnsafeStore(
            f"{inner.uri}: creates are not exclusive there, so two writers could both believe they committed\n"
            "  nothing was written; choose a path, s3://, gs:// or az://, or pass allow_unconditional=True "
            "and make sure that there is exactly one writer",
            uri=inner.uri,
        )
    return store


def open_files(
    uri: str | os.PathLike[str],
    *,
    options: Mapping[str, object] | None = None,
    retry_deadline_s: float = 60.0,
    events: Events = silent,
    clock: Clock | None = None,
    environ: Mapping[str, str] | None = None,
) -> Files:
    """What other tools keep at an address: the addresses and options of ``open_store``. No I/O."""
    inner, store = _opened(uri, options, retry_deadline_s, events, clock, environ)
    return Files(store, inner.stream)


def _opened(
    uri: str | os.PathLike[str],
    options: Mapping[str, object] | None,
    retry_deadline_s: float,
    events: Events,
    clock: Clock | None,
    environ: Mapping[str, str] | None,
) -> tuple[StreamingStore, ObjectStore]:
    """The store at an address, bare, and wrapped in retry and limit."""
    options = dict(options or {})
    deadline_s = require_number("retry_deadline_s", retry_deadline_s, low=SHORTEST_S, high=DAY_S)
    max_calls = int(require_number("max_calls", options.get("max_calls", 32), low=1, high=1024, whole=True))
    http = HttpSettings(
        timeout_s=require_number("timeout_s", options.get("timeout_s", 60.0), low=SHORTEST_S, high=3600),
        connect_timeout_s=require_number(
            "connect_timeout_s", options.get("connect_timeout_s", 5.0), low=SHORTEST_S, high=600
        ),
        stream_retry_s=deadline_s,
    )
    rest = {name: value for name, value in options.items() if name not in _OURS}
    inner = _bare(os.fspath(uri), rest, http, os.environ if environ is None else environ, events)
    return inner, RetryStore(
        LimitStore(inner, max_calls=max_calls),
        deadline_s=deadline_s,
        clock=clock or SystemClock(),
        events=events,
        rng=random.Random(),
    )


def server_side(
    source: str,
    dest: str,
    *,
    options: Mapping[str, object] | None = None,
    environ: Mapping[str, str] | None = None,
) -> Callable[[str, str], None] | None:
    """How objects below one address are copied to another without their bytes passing through here;
    ``None`` where that cannot be: not one bucket, or no bucket at all. Takes the two keys.
    """
    (scheme, here), (other, there) = split(source), split(dest)
    bucket = here.partition("/")[0]
    if scheme != other or scheme not in ("s3", "gs", "az") or bucket != there.partition("/")[0]:
        return None
    from ftckpt.store.objectstore import ObjectStorage

    rest = {name: value for name, value in (options or {}).items() if name not in _OURS}
    inside = os.environ if environ is None else environ
    whole = _bucket(scheme, f"{scheme}://{bucket}", bucket, rest, HttpSettings(), inside)().store
    assert isinstance(whole, ObjectStorage)
    below, beside = (place.partition("/")[2].strip("/") for place in (here, there))
    return lambda key, to: whole.copy(f"{below}/{key}".lstrip("/"), f"{beside}/{to}".lstrip("/"))


def _bare(
    uri: str, options: dict[str, object], http: HttpSettings, environ: Mapping[str, str], events: Events
) -> StreamingStore:
    if not uri.strip():
        raise SettingsError("the address of the run is empty", uri=uri)
    scheme, rest = split(uri)
    if not scheme:
        _no_options(options, "a folder")
        return LocalStore(uri)
    if scheme == "file":
        _no_options(options, "a folder")
        host, slash, path = rest.partition("/")
        if host not in ("", "localhost") or not slash:
            raise SettingsError(f"{uri}: a file address has three slashes, as in file:///data/run", uri=uri)
        return LocalStore(unquote(f"/{path}"))
    if scheme == "memory":
        _no_options(options, "memory")
        from ftckpt.store import objectstore

        return objectstore.memory(rest.strip("/"))

    _no_credentials_in(uri, scheme)
    if scheme in ("s3", "gs", "az", "fsspec+s3"):
        opening = _bucket(scheme, uri, rest, options, http, environ)
        return RenewingStore(opening, events=events)
    from ftckpt.store import fsspec

    return fsspec.other(scheme.removeprefix("fsspec+"), rest, options)


def _bucket(
    scheme: str,
    uri: str,
    rest: str,
    options: dict[str, object],
    http: HttpSettings,
    environ: Mapping[str, str],
) -> Callable[[], Opened]:
    bucket, _, prefix = rest.partition("/")
    prefix = prefix.strip("/")
    if not bucket:
        raise SettingsError(f"{uri}: the address names no bucket", uri=uri)
    if "?" in rest or "#" in rest:
        raise SettingsError(f"{scheme}://{bucket}: an address has no ? or #; settings go into store_options")
    if "//" in prefix or any(part in (".", "..") for part in prefix.split("/")):
        raise SettingsError(f"{uri}: a part of the address is empty, '.' or '..'", uri=uri)
    from ftckpt.store import objectstore

    if scheme == "gs":
        return lambda: Opened(objectstore.google(bucket, prefix, options, http), None, renewable=True)
    if scheme == "az":
        return lambda: Opened(objectstore.azure(bucket, prefix, options, http), None, renewable=True)

    def opening() -> Opened:
        settings = s3_settings(options, environ)
        return Opened(make(bucket, prefix, settings, http), settings.credentials, settings.renewable)

    make: Callable[[str, str, S3Settings, HttpSettings], StreamingStore] = objectstore.s3
    if scheme != "s3":
        from ftckpt.store import fsspec

        make = fsspec.s3fs_store
    return opening


def _no_options(options: Mapping[str, object], kind: str) -> None:
    if options:
        raise SettingsError(f"store option {min(options)!r} has no meaning for {kind}", option=min(options))


def _no_credentials_in(uri: str, scheme: str) -> None:
    try:
        parts = urlsplit(uri)
    except ValueError as error:
        raise SettingsError(f"{scheme}://…: not an address ({error})") from error
    if parts.password or (parts.username and scheme in ("s3", "gs", "az", "fsspec+s3")):
        raise SettingsError(
            f"{scheme}://…@{parts.hostname}: the address holds a user name or password\n"
            "  addresses are logged; give credentials as store_options or in the environment"
        )
