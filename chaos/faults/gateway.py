"""An S3 server on a bad day: a real one behind a gateway that refuses, cuts and forgets on request.

The gateway has access keys of its own, as gateways do: whatever key a client signs with, what is let
through is signed again with the server's. So a test decides which keys are good at what moment.

``rule`` looks at each request and says what becomes of it; it may be replaced at any time. Knows
HTTP; knows nothing of checkpoints.
"""

from __future__ import annotations

import http.client
import re
import threading
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Self
from urllib.parse import unquote, urlsplit

from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

from ftckpt.chaos.s3server import S3Server

_OURS = frozenset(
    {
        "authorization",
        "connection",
        "host",
        "x-amz-content-sha256",
        "x-amz-date",
        "x-amz-security-token",
        "transfer-encoding",
    }
)
_KEY_ID = re.compile(r"Credential=([^/]+)/")


@dataclass(frozen=True, slots=True)
class Asked:
    """One request. ``key`` is the path without the bucket, ``query`` what follows it; ``access_key``
    whoever signed it.
    """

    number: int
    method: str
    key: str
    access_key: str
    query: str
    size_bytes: int = 0

    @property
    def is_listing(self) -> bool:
        return self.method == "GET" and "list-type=2" in self.query


@dataclass(frozen=True, slots=True)
class Refuse:
    """Answer in the server's place; nothing happens to the objects."""

    status: int
    code: str


@dataclass(frozen=True, slots=True)
class Cut:
    """Let it through, and break the connection after ``keep`` of the answer's body."""

    keep: float = 0.5


@dataclass(frozen=True, slots=True)
class Forget:
    """Let it through, and break the connection before the answer."""


Rule = Callable[[Asked], Refuse | Cut | Forget | None]

SLOW_DOWN = Refuse(503, "SlowDown")
EXPIRED = Refuse(400, "ExpiredToken")


def let_through(_asked: Asked) -> None:
    """No faults."""


def only(good: Collection[str]) -> Rule:
    """Requests signed with another key are told that it has expired. ``good`` may change meanwhile."""
    return lambda asked: None if asked.access_key in good else EXPIRED


class Gateway:
    """Listens on loopback in front of ``server``, for as long as it is entered."""

    def __init__(self, server: S3Server, rule: Rule = let_through) -> None:
        self.rule = rule
        self.log: list[Asked] = []
        self._server = server
        self._lock = threading.Lock()
        self._listener = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._listener.daemon_threads = True

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._listener.server_address[1]}"

    def __enter__(self) -> Self:
        threading.Thread(target=self._listener.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._listener.shutdown()
        self._listener.server_close()

    def note(self, method: str, path: str, signature: str, size_bytes: int) -> Asked:
        found = _KEY_ID.search(signature)
        parts = urlsplit(path)
        key = unquote(parts.path).lstrip("/").partition("/")[2]
        with self._lock:
            asked = Asked(
                len(self.log) + 1,
                method,
                key,
                found.group(1) if found else "",
                parts.query,
                size_bytes,
            )
            self.log.append(asked)
        return asked

    def pass_on(
        self, method: str, path: str, headers: dict[str, str], body: bytes
    ) -> tuple[int, list[tuple[str, str]], bytes]:
        """What the server itself answers."""
        server = self._server
        request = AWSRequest(method=method, url=server.endpoint + path, data=body, headers=headers)
        S3SigV4Auth(Credentials(server.access_key, server.secret_key), "s3", server.region).add_auth(request)
        host = urlsplit(server.endpoint)
        connection = http.client.HTTPConnection(host.hostname or "", host.port, timeout=30)
        try:
            connection.request(method, path, body, dict(request.headers.items()))
            answer = connection.getresponse()
            return answer.status, answer.getheaders(), answer.read()
        finally:
            connection.close()


def _handler(gateway: Gateway) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True  # or every body waits for the acknowledgement of its head

        def log_message(self, *args: object) -> None:
            """Nobody reads it."""

        def answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            asked = gateway.note(self.command, self.path, self.headers.get("Authorization", ""), len(body))
            fate = gateway.rule(asked)
            with suppress(ConnectionError):  # a client that gave up has left
                if isinstance(fate, Refuse):
                    text = f"<Error><Code>{fate.code}</Code><Message>injected</Message></Error>".encode()
                    self.reply(fate.status, [("Content-Type", "application/xml")], text)
                    return
                kept = {name: value for name, value in self.headers.items() if name.lower() not in _OURS}
                try:
                    status, headers, found = gateway.pass_on(self.command, self.path, kept, body)
                except (OSError, http.client.HTTPException):
                    self.close_connection = True
                    return
                if isinstance(fate, Forget):
                    self.close_connection = True
                    return
                self.reply(status, headers, found, fate.keep if isinstance(fate, Cut) else None)

        def reply(
            self, status: int, headers: list[tuple[str, str]], body: bytes, keep: float | None = None
        ) -> None:
            self.send_response_only(status)
            for name, value in headers:
                if name.lower() not in ("transfer-encoding", "connection", "content-length"):
                    self.send_header(name, value)
            length = dict(headers).get("Content-Length") if self.command == "HEAD" else None
            self.send_header("Content-Length", length or str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body if keep is None else body[: int(len(body) * keep)])
            if keep is not None:
                self.close_connection = True

        do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = answer

    return Handler
