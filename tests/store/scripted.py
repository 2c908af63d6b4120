"""An HTTP server that gives scripted answers: what an S3 server says on a bad day."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import ClassVar, Self


@dataclass(frozen=True)
class Answer:
    status: int = 200
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)
    after: threading.Event | None = None
    """Wait for it before answering."""
    cut_at: int | None = None
    """Send only so many bytes of the body, then close the connection."""


def failure(status: int, code: str, message: str = "scripted") -> Answer:
    body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{message}</Message></Error>"
    return Answer(status, body.encode())


EMPTY_LISTING = Answer(
    body=b"<ListBucketResult><Name>b</Name><KeyCount>0</KeyCount><IsTruncated>false</IsTruncated></ListBucketResult>"
)


class ScriptedServer:
    """Give ``answers`` by method ("PUT", "GET", "HEAD", "POST", "LIST"); the last one of each is repeated."""

    def __init__(self) -> None:
        self.answers: dict[str, list[Answer]] = {"LIST": [EMPTY_LISTING]}
        self.requests: list[tuple[str, str, dict[str, str]]] = []
        self._lock = threading.Lock()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()

    def next_answer(self, method: str, path: str, headers: dict[str, str]) -> Answer:
        with self._lock:
            self.requests.append((method, path, headers))
            kind = "LIST" if method == "GET" and "list-type=2" in path else method
            answers = self.answers.get(kind) or [failure(500, "NothingScripted")]
            return answers.pop(0) if len(answers) > 1 else answers[0]

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        script = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            dates: ClassVar[dict[str, str]] = {
                "Last-Modified": "Wed, 21 Oct 2015 07:28:00 GMT",
                "ETag": '"scripted"',
            }

            def log_message(self, *args: object) -> None:
                pass

            def answer(self) -> None:
                self.rfile.read(int(self.headers.get("Content-Length", 0)))
                given = script.next_answer(self.command, self.path, dict(self.headers))
                if given.after is not None:
                    given.after.wait(20)
                with suppress(ConnectionError):  # a client that timed out has left
                    self.send(given)

            def send(self, given: Answer) -> None:
                self.send_response(given.status)
                for name, value in {
                    **self.dates,
                    "Content-Length": str(len(given.body)),
                    **given.headers,
                }.items():
                    self.send_header(name, value)
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(given.body[: given.cut_at])
                if given.cut_at is not None:
                    self.close_connection = True

            do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = answer

        return Handler
