"""State from a living peer: one HTTP GET of tensors and bytes, checked before use.

A checkpoint transport for torchft's Manager. The body is a length, a msgpack header and the raw
bytes of every leaf with its digest: no pickle, nothing is executed. A source serves live memory
without copying; the digests were taken when it was published, so a reader that was overtaken by a
write refuses what it got and the step is repeated. Source and reader must be of one attempt: a
zombie never heals a newer job, nor is healed by it.

One source per reader, nothing is resumed: a heal that breaks is begun again in the next turn.
"""

from __future__ import annotations

import http.client
import secrets
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BufferedIOBase
from math import prod
from typing import Any, Protocol
from urllib.parse import urlsplit

import msgspec
import torch
import xxhash
from torch import Tensor
from torchft.checkpointing.transport import CheckpointTransport

from ftckpt.errors import MembershipError
from ftckpt.leaf import ITEMSIZE_BYTES
from ftckpt.manifest import MAX_LEAF_BYTES, MAX_NDIM

KEY = "ftckpt"
"""Under which a ``HealState`` is registered with the Manager."""
BLOCK_BYTES = 1 << 20
MAX_HEADER_BYTES = 64 << 20
STRIDE_BYTES = 32 << 20
"""Memory is made for so many bytes of a leaf before they have come."""


class HealState(Protocol):
    """The state a group gives to a peer that is behind, and takes from one that is ahead.

    Both are called on the thread that calls ``ReplicaGroup.begin``, or while it is blocked there.
    """

    def save(self) -> dict[str, object]:
        """Tensors and ``bytes`` by name, aliasing live memory. Local shards, never DTensors: peers
        with the same rank have the same shards. Cheap; no collective.
        """
        ...

    def load(self, state: dict[str, object]) -> None:
        """Overwrite the live state in place with what a peer's ``save`` gave. Tensors are on the CPU."""
        ...


class Leaf(msgspec.Struct, frozen=True, forbid_unknown_fields=False):
    """One value of the body. ``dtype`` is empty for plain bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    size_bytes: int
    digest: str


class Header(msgspec.Struct, frozen=True):
    """What comes before the bytes."""

    step: int
    manager: dict[str, int]
    leaves: tuple[Leaf, ...]


@dataclass(frozen=True, slots=True)
class Published:
    """A state ready to be served."""

    step: int
    head: bytes
    bodies: tuple[memoryview, ...]

    @property
    def size_bytes(self) -> int:
        return 8 + len(self.head) + sum(body.nbytes for body in self.bodies)


class HealTransport(CheckpointTransport[dict[str, Any]]):  # type: ignore[misc]  # torchft is untyped
    """Serve and fetch heal states. ``start`` first; ``shutdown`` ends the server's thread."""

    def __init__(self, host: str, attempt: int | None, timeout_s: float) -> None:
        self._host = host
        self.attempt = attempt
        self.timeout_s = timeout_s
        self._token = secrets.token_hex(16)
        self._changed = threading.Condition()
        self._published: Published | None = None
        self._server: _Server | None = None

    def start(self) -> None:
        """Listen on a free port of ``host``."""
        self._server = _Server((self._host, 0), self)
        threading.Thread(
            target=self._server.serve_forever, args=(0.1,), name="ftckpt-heal", daemon=True
        ).start()

    def metadata(self) -> str:
        assert self._server is not None, "start the transport first"
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"http://{host}:{self._server.server_address[1]}/{self._token}"

    def send_checkpoint(
        self, dst_ranks: list[int], step: int, state_dict: dict[str, Any], timeout: timedelta
    ) -> None:
        published = publish(step, state_dict["torchft"], state_dict["user"][KEY])
        with self._changed:
            self._published = published
            self._changed.notify_all()

    def disallow_checkpoint(self) -> None:
        with self._changed:
            self._published = None

    def recv_checkpoint(self, src_rank: int, metadata: str, step: int, timeout: timedelta) -> dict[str, Any]:
        manager, state = fetch(metadata, step, self._name(), min(timeout.total_seconds(), self.timeout_s))
        return {"user": {KEY: state}, "torchft": manager}

    def shutdown(self, wait: bool = True) -> None:
        server, self._server = self._server, None
        if server is not None:
            server.shutdown()
            server.server_close()

    def answer(self, path: str) -> Published | str:
        """What to serve under ``/token/attempt/step``, or why nothing. A healer may ask before this
        group has learnt of it, so this waits.
        """
        parts = path.strip("/").split("/")
        if len(parts) != 3 or not secrets.compare_digest(parts[0], self._token) or not parts[2].isdecimal():
            return "no such state here"
        if parts[1] != self._name():
            return f"this group is of attempt {self._name()}, not {parts[1]}"
        step = int(parts[2])
        with self._changed:
            self._changed.wait_for(lambda: self._serves(step), self.timeout_s)
            found = self._published
        return found if found is not None and found.step == step else f"step {step} is not served"

    def _name(self) -> str:
        return "any" if self.attempt is None else str(self.attempt)

    def serving(self, published: Published) -> bool:
        """Whether the state may still be sent: it may not once its owner trains on."""
        return self._published is published

    def _serves(self, step: int) -> bool:
        return self._published is not None and self._published.step == step


def publish(step: int, manager: Mapping[str, int], state: Mapping[str, object]) -> Published:
    """Describe a state so that it can be sent. Aliases CPU tensors; others are copied to the CPU."""
    leaves, bodies = [], []
    for name, value in state.items():
        if isinstance(value, Tensor):
            body = _bytes_of(value)
            dtype, shape = str(value.dtype).removeprefix("torch."), tuple(value.shape)
            assert dtype in ITEMSIZE_BYTES, f"{name} has dtype {dtype}"
        else:
            assert isinstance(value, bytes), f"{name} is a {type(value).__name__}, not a tensor or bytes"
            body, dtype, shape = memoryview(value), "", (len(value),)
        bodies.append(body)
        leaves.append(Leaf(name, dtype, shape, body.nbytes, xxhash.xxh3_128_hexdigest(body)))
    head = msgspec.msgpack.encode(Header(step, dict(manager), tuple(leaves)))
    return Published(step, head, tuple(bodies))


def fetch(
    address: str, step: int, attempt: str, timeout_s: float
) -> tuple[dict[str, int], dict[str, object]]:
    """Get a peer's state: the Manager's numbers and the leaves by name, all of them verified.

    Raises ``MembershipError`` when the peer refuses, goes away, or sends bytes that are not what it
    announced. Nothing was changed.
    """
    deadline_s = time.monotonic() + timeout_s
    url = urlsplit(address)
    connection = http.client.HTTPConnection(url.hostname or "", url.port, timeout=timeout_s)
    try:
        connection.request("GET", f"{url.path}/{attempt}/{step}")
        answer = connection.getresponse()
        if answer.status != http.client.OK:
            raise MembershipError(
                f"the peer at {url.netloc} does not give its state of step {step}: {answer.reason}",
                step=step,
            )
        header = _read_header(answer)
        return header.manager, {leaf.name: _read_leaf(answer, leaf, deadline_s) for leaf in header.leaves}
    except (OSError, EOFError, RecursionError, http.client.HTTPException, msgspec.MsgspecError) as e:
        raise MembershipError(
            f"healing step {step} from the peer at {url.netloc} failed: {type(e).__name__}: {e}\n"
            "  nothing was changed; the step is repeated",
            step=step,
        ) from e
    finally:
        connection.close()


def _read_header(stream: http.client.HTTPResponse) -> Header:
    size_bytes = int.from_bytes(_exactly(stream, 8), "little")
    if size_bytes > MAX_HEADER_BYTES:
        raise MembershipError(f"the header of a heal claims {size_bytes} bytes, more than is allowed")
    return msgspec.msgpack.decode(_exactly(stream, size_bytes), type=Header)


def _read_leaf(stream: http.client.HTTPResponse, leaf: Leaf, deadline_s: float) -> object:
    if leaf.dtype and leaf.dtype not in ITEMSIZE_BYTES:
        raise MembershipError(f"{leaf.name} has the unknown element type {leaf.dtype!r}", leaf=leaf.name)
    itemsize_bytes = ITEMSIZE_BYTES[leaf.dtype] if leaf.dtype else 1
    sound = len(leaf.shape) <= MAX_NDIM and min(leaf.shape, default=0) >= 0
    sound = sound and prod(n or 1 for n in leaf.shape) * itemsize_bytes <= MAX_LEAF_BYTES
    numel = prod(leaf.shape) if sound else -1
    left_bytes = stream.length if stream.length is not None else 0
    if numel * itemsize_bytes != leaf.size_bytes or not 0 <= leaf.size_bytes <= left_bytes:
        raise MembershipError(
            f"{leaf.name} is announced with a size that does not fit its shape", leaf=leaf.name
        )
    buffer = _read_bytes(stream, leaf, deadline_s)
    if xxhash.xxh3_128_hexdigest(buffer) != leaf.digest:
        raise MembershipError(
            f"{leaf.name} arrived with other bytes than were published\n"
            "  nothing was changed; the step is repeated",
            leaf=leaf.name,
        )
    if not leaf.dtype:
        return bytes(buffer)
    dtype: torch.dtype = getattr(torch, leaf.dtype)
    if not buffer:
        return torch.empty(leaf.shape, dtype=dtype)
    return torch.frombuffer(buffer, dtype=torch.uint8).view(dtype).reshape(leaf.shape)


def _read_bytes(stream: http.client.HTTPResponse, leaf: Leaf, deadline_s: float) -> bytearray:
    """A leaf's bytes. Memory grows with what has come, not with what was announced."""
    buffer = bytearray()
    while len(buffer) < leaf.size_bytes:
        at = len(buffer)
        buffer.extend(bytes(min(leaf.size_bytes - at, STRIDE_BYTES)))
        with memoryview(buffer) as view:
            while at < len(view):
                if time.monotonic() > deadline_s:
                    raise TimeoutError(f"out of time at {leaf.name}")
                count = stream.readinto(view[at : at + BLOCK_BYTES])
                if not count:
                    raise EOFError(f"the body ends inside {leaf.name}")
                at += count
    return buffer


def _exactly(stream: http.client.HTTPResponse, size_bytes: int) -> bytes:
    data = stream.read(size_bytes)
    if len(data) != size_bytes:
        raise EOFError(f"the body ends after {len(data)} of {size_bytes} bytes")
    return data


def _bytes_of(tensor: Tensor) -> memoryview:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    if not flat.numel():
        return memoryview(b"")
    return flat.view(torch.uint8).numpy().data


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, address: tuple[str, int], transport: HealTransport) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self.transport = transport
        super().__init__(address, _Handler)

    def handle_error(self, request: object, client_address: object) -> None:
        """A reader that went away is its own news: it repeats the step."""


class _Handler(BaseHTTPRequestHandler):
    server: _Server

    def setup(self) -> None:
        super().setup()
        self.connection.settimeout(self.server.transport.timeout_s)

    def do_GET(self) -> None:
        found = self.server.transport.answer(self.path)
        if isinstance(found, str):
            self.send_error(409, found)
            return
        self.send_response(200)
        self.send_header("Content-Type", "application/octet-stream")
        self.send_header("Content-Length", str(found.size_bytes))
        self.end_headers()
        _send(self.wfile, found, self.server.transport)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Events are the room's own business; an access log is nobody's."""


def _send(out: BufferedIOBase, published: Published, transport: HealTransport) -> None:
    out.write(len(published.head).to_bytes(8, "little"))
    out.write(published.head)
    for block in _blocks(published.bodies):
        if not transport.serving(published):
            return  # the reader sees the body end early
        out.write(block)


def _blocks(bodies: tuple[memoryview, ...]) -> Iterator[memoryview]:
    for body in bodies:
        for start in range(0, body.nbytes, BLOCK_BYTES):
            yield body[start : start + BLOCK_BYTES]
