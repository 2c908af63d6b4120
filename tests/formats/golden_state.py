"""The state of the golden run, step by step, and what a reader has to find in it.

What is expected is made from the live state here, never by reading the run.
"""

from __future__ import annotations

import random
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import ftckpt
from ftckpt.capture.rng import generators
from ftckpt.capture.tensors import as_bytes_view, dtype_name, fresh_tensor
from ftckpt.leaf import ITEMSIZE_BYTES
from ftckpt.values import TensorRef
from tests.formats.describe import canonical, describe, in_one_line, sha256

Place = Callable[[str, torch.Tensor], Any]
"""What stands in a tree for the tensor of a leaf: the tensor itself, or a reference to the leaf."""


def every_dtype() -> dict[str, torch.Tensor]:
    """Six elements of each element type, of bits that are no round numbers."""
    made = {}
    for name, size in ITEMSIZE_BYTES.items():
        tensor = fresh_tensor((3, 2), name)
        bits = torch.arange(6 * size, dtype=torch.int64).mul(37).add(len(name)).to(torch.uint8)
        bits = bits % 2 if name == "bool" else bits
        tensor.reshape(-1).view(torch.uint8).copy_(bits)
        made[name] = tensor
    return made


def plain(place: Place, rank: int, step: int) -> dict[Any, Any]:
    """Every tag, keys of every kind, and tensors inside of it all."""
    one, two = torch.tensor([1.5, -0.0]), torch.arange(3, dtype=torch.int16) + step
    odd: list[Any] = [0, 1.5, None, True, (1, "a"), b"x", "a.b/@%\n", "", "ü", 2**70]
    parts = ["%i0", "%f1%2E5", "%n", "%bTrue", "%x", "%x", "a%2Eb%2F%40%25%0A", "%e", "ü", f"%i{2**70}"]
    parts[4] += "d6029201a161"
    parts[5] += "c40178"
    return {
        "tensors": [(place("plain.tensors.0.0", one), {"again": place("plain.tensors.0.0", one)})],
        "two": deque([place("plain.two.0", two)], 4),
        "keys": {
            key: place(f"plain.keys.{part}", torch.tensor([len(part)]))
            for key, part in zip(odd, parts, strict=True)
        },
        "numbers": [
            step,
            -1,
            127,
            128,
            -129,
            2**63,
            -(2**63),
            2**64,
            -(2**63) - 1,
            2**200,
            True,
            False,
            None,
        ],
        "floats": [0.1, -0.0, float("inf"), float("-inf"), float("nan"), complex(1.5, -0.0)],
        "texts": ["", "ü\0𝄞", "x" * 40, "y" * 300, b"", b"\0\xff" * 20],
        "tuple": ((), (1, (2, [3])), [], {}),
        "dicts": [{1: {"2": 3}}, OrderedDict([("b", 1), ("a", 2)]), Counter({"x": 3})],
        "sets": [{3, "a", (1, 2)}, frozenset({b"b", None}), set()],
        "deques": [deque([1, [2]]), deque(maxlen=0)],
        "ranges": [range(3, 9, 2), slice(None, 4, None)],
        "numpy": [
            np.float32(1.25),
            np.bool_(True),
            np.str_("a\0ü"),
            np.bytes_(b"z"),
            np.datetime64("2024-01-02T03", "h"),
            np.dtype(">f4"),
            np.dtype("<M8[25us]"),
            np.arange(6, dtype=">i2").reshape(2, 3),
            np.array(7, np.int8),
            np.empty((0, 3), np.complex128),
            np.array(["", "ab"]),
            np.array([b"q"]),
            np.array([True, False]),
        ],
        "torch": [torch.bfloat16, torch.Size([2, 0, 3]), torch.device("cuda:1"), torch.device("cpu")],
        "mine": rank,
    }


class Golden:
    """The live state at step 0, of one rank. ``shard`` cuts a tensor along a dimension over the ranks."""

    def __init__(
        self, rank: int = 0, shard: Callable[[torch.Tensor, int], torch.Tensor] | None = None
    ) -> None:
        random.seed(5)
        np.random.seed(5)  # noqa: NPY002 - the global one is what is saved
        torch.manual_seed(5)
        self.rank = rank
        self.shard = shard or (lambda tensor, _dim: tensor)
        self.generator = torch.Generator().manual_seed(7)
        self.actor = torch.nn.Linear(8, 4)
        self.optim = torch.optim.AdamW(self.actor.parameters(), lr=0.01)
        self.weight = torch.randn(64, 64, generator=self.generator).mul(0.02).bfloat16()
        self.wholes = {
            "sharded.rows": (torch.randn(11, 6, generator=self.generator), 0),
            "sharded.columns": (torch.arange(35, dtype=torch.int32).reshape(5, 7), 1),
            "sharded.one": (torch.tensor([[2.5]], dtype=torch.float64), 0),
        }
        bytes_ = torch.randint(0, 256, (4096,), generator=self.generator)
        self.state: dict[str, Any] = {
            "actor": self.actor,
            "optim": self.optim,
            "policy": {"weight": self.weight},
            "reference": ftckpt.Frozen({"weight": self.weight.clone()}),
            "sharded": {name.partition(".")[2]: self.shard(*one) for name, one in self.wholes.items()},
            "dtypes": every_dtype(),
            "shapes": [torch.tensor(3.5), torch.zeros(0, 3), torch.zeros(2, 0), torch.ones(1, 1, 1, 1)],
            "alone": torch.tensor([7, 8], dtype=torch.uint8),
            "bytes": {
                "noise": bytes_.to(torch.uint8),
                "counts": torch.arange(700, dtype=torch.int64) * 3,
                "text": torch.arange(4096).remainder(7).to(torch.uint8),
            },
            "plain": {},
            "cursor": ftckpt.PerRank({"at": torch.tensor([rank, 9]), "n": rank}, on_resize="reseed"),
        }
        self.at(0)

    def at(self, step: int) -> None:
        """Put what is a function of the step into the state."""
        tree = plain(lambda _name, tensor: tensor, 0, step)
        tree["mine"] = ftckpt.PerRank([self.rank, torch.tensor(self.rank)], on_resize="reseed")
        first = tree["tensors"][0][0]
        tree["tensors"] = [(first, {"again": first})]
        self.state["plain"].clear()
        self.state["plain"].update(tree)

    def train(self, step: int) -> None:
        """One step: some bits of the policy, the small model, the value that counts steps."""
        generator = torch.Generator().manual_seed(step)
        self.weight.mul_(1 + 0.01 * (torch.randn(64, 64, generator=generator) > 1.5))
        self.actor(torch.randn(3, 8, generator=generator)).square().mean().backward()
        self.optim.step()
        self.optim.zero_grad()
        self.at(step)

    def expected(self, group: str = "g0") -> dict[str, Any]:
        """Every leaf that this rank has, as a reader must find it: tensors by their bytes, values by what
        they are. A value that is long is there as a digest.
        """
        mine = f"{group}.{self.rank}"
        tensors = {
            **{f"actor.{name}": p for name, p in self.actor.named_parameters()},
            "policy.weight": self.weight,
            "reference.weight": self.state["reference"].value["weight"],
            **{name: whole for name, (whole, _) in self.wholes.items()},
            **{f"dtypes.{name}": tensor for name, tensor in self.state["dtypes"].items()},
            **{f"shapes.{number}": tensor for number, tensor in enumerate(self.state["shapes"])},
            "alone.value": self.state["alone"],
            **{f"bytes.{name}": tensor for name, tensor in self.state["bytes"].items()},
            f"cursor.at@{mine}": self.state["cursor"].value["at"],
            f"plain.mine.1@{mine}": self.state["plain"]["mine"].value[1],
        }
        for name, p in self.actor.named_parameters():
            for key, tensor in self.optim.state.get(p, {}).items():
                tensors[f"optim.state.actor.{name}.{key}"] = tensor

        def refer(name: str, tensor: torch.Tensor) -> TensorRef:
            tensors[name] = tensor
            return TensorRef(name)

        step = self.state["plain"]["numbers"][0]
        trees = {
            name: {"kind": "tree", "tree": tree} for name, tree in self._trees(refer, mine, step).items()
        }
        trees[f"rng@{mine}"] = {"kind": "rng", "tree": generators()}
        trees |= {f"plain.mine@{mine}": [self.rank, TensorRef(f"plain.mine.1@{mine}")]}
        trees["actor"] = {
            "kind": "module",
            "tree": {name: TensorRef(f"actor.{name}") for name, _ in self.actor.named_parameters()},
        }
        return {
            "tensors": {name: told(tensor) for name, tensor in sorted(tensors.items())},
            "values": {name: shortened(tree) for name, tree in sorted(trees.items())},
        }

    def spell_out(self) -> Any:
        """The values of ``plain`` in full, as a reader must find them at the step that this state is of."""
        step = self.state["plain"]["numbers"][0]
        refer = lambda name, _tensor: TensorRef(name)
        return self._trees(refer, f"g0.{self.rank}", step)["plain"]

    def _trees(self, refer: Place, mine: str, step: int) -> dict[str, Any]:
        own = plain(refer, self.rank, step) | {"mine": TensorRef("plain.mine@")}
        keyed = {
            name: {key: TensorRef(f"{name}.{key}") for key in self.state[name]}
            for name in ("policy", "sharded", "dtypes", "bytes")
        }
        return {
            **keyed,
            "reference": {"weight": TensorRef("reference.weight")},
            "shapes": [TensorRef(f"shapes.{number}") for number in range(4)],
            "alone": TensorRef("alone.value"),
            "plain": own,
            f"cursor@{mine}": {"at": TensorRef(f"cursor.at@{mine}"), "n": self.rank},
        }


def told(tensor: torch.Tensor) -> str:
    """A tensor in one line."""
    raw = bytes(as_bytes_view(tensor.detach().contiguous()))
    return in_one_line(dtype_name(tensor.dtype), tensor.shape, raw)


def shortened(tree: Any) -> Any:
    """A description, or its digest if it is long."""
    description = describe(tree)
    return (
        description if len(canonical(description)) < 200 else {"sha256": sha256(canonical(description))[:32]}
    )
