"""A small run with a real model, and places that die, for tests of other formats."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from ftckpt.chaos.faults.store import Crash
from ftckpt.events import silent
from ftckpt.session import Session
from ftckpt.store import Files, LocalStore
from ftckpt.store.api import Buffer, ByteRange, ObjectInfo

SHARD_BYTES = 20_000


def tiny(*, seed: int = 0, tied: bool = True) -> LlamaForCausalLM:
    """A Llama of 90 KB."""
    torch.manual_seed(seed)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64}
    return LlamaForCausalLM(LlamaConfig(**shape, **heads, tie_word_embeddings=tied)).eval()


def train_step(model: Any, optim: torch.optim.Optimizer) -> None:
    model(input_ids=torch.arange(8)[None]).logits.square().sum().backward()
    optim.step()
    optim.zero_grad()


def state_of(model: torch.nn.Module) -> dict[str, Any]:
    buffer = {"cursor": 3, "seen": torch.arange(6.0).reshape(2, 3), "names": ["a", None, 2.5]}
    return {"actor": model, "optim": torch.optim.AdamW(model.parameters()), "buffer": buffer}


def train(run: Path, model: torch.nn.Module, until: int = 1) -> dict[str, Any]:
    """A run of that model, trained; its state at the end."""
    state = state_of(model)
    with Session(run, state, save_every=1, events=silent) as ckpt:
        for _ in ckpt.steps(until=until):
            train_step(model, state["optim"])
    return state


def weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    """Equal names, dtypes and bits."""
    return a.keys() == b.keys() and all(
        a[name].dtype == b[name].dtype and torch.equal(a[name], b[name]) for name in a
    )


class Mortal:
    """A folder whose user dies at the ``nth`` change it makes, and changes nothing more."""

    def __init__(self, folder: Path, nth: int | None = None) -> None:
        self._inner = LocalStore(folder)
        self._nth = nth
        self._lock = threading.Lock()
        self.changes = 0

    @property
    def files(self) -> Files:
        return Files(self, self.stream)

    @property
    def uri(self) -> str:
        return self._inner.uri

    @property
    def conditional_create(self) -> bool:
        return True

    def change(self) -> None:
        with self._lock:
            self.changes += 1
            if self._nth is not None and self.changes >= self._nth:
                raise Crash(f"died at change {self.changes}")

    def create(self, key: str, body: Buffer) -> None:
        self.change()
        self._inner.create(key, body)
        self.change()

    def read(self, key: str, at: ByteRange | None = None) -> bytes | memoryview:
        return self._inner.read(key, at)

    def size(self, key: str) -> int:
        return self._inner.size(key)

    def scan(self, prefix: str) -> Iterator[ObjectInfo]:
        return self._inner.scan(prefix)

    def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            self.change()
            self._inner.delete([key])

    def close(self) -> None:
        pass

    def stream(self, key: str) -> MortalStream:
        self.change()
        return MortalStream(self._inner.stream(key), self.change)


class MortalStream:
    def __init__(self, inner: Any, change: Callable[[], None]) -> None:
        self._inner, self._change = inner, change

    def write(self, data: Buffer) -> None:
        self._inner.write(data)

    def close(self) -> None:
        try:
            self._change()
        except Crash:
            os.close(self._inner._fd)  # as the kernel does
            raise
        self._inner.close()
        self._change()

    def abort(self) -> None:
        """The dead remove nothing."""
