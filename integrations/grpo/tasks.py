"""Prompts and their scorer, from a reasoning-gym data set, and the order in which prompts are used.

Knows questions, answers and ids; knows no model. Items are generated from the run seed, so every
member of a run holds the same data set without reading a file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

from ftckpt.errors import SettingsError, StateMismatch
from ftckpt.integrations.grpo.config import TaskOptions
from ftckpt.integrations.grpo.seeds import derive, permutation


class Task:
    """A data set by name. ``short`` cuts a question to what follows its last colon, without
    spaces: ``State the final answer …: 4 - 1 =`` becomes ``4-1=``, which 15 characters can spell.
    """

    def __init__(self, name: str, options: TaskOptions, size: int, seed: int, *, short: bool) -> None:
        import reasoning_gym

        self._short = short
        try:
            self._items = reasoning_gym.create_dataset(name, size=size, seed=seed, **dict(options))
        except (TypeError, ValueError, AssertionError) as error:
            raise SettingsError(
                f"reasoning-gym makes no data set {name!r} with {dict(options)}: {error}\n"
                "  nothing was started; see --task and --task-options",
                task=name,
            ) from error
        self.size = size
        self.fingerprint = _fingerprint(name, options, size, seed, self._items)

    def question(self, item: int) -> str:
        text = str(self._items[item]["question"])
        return text.rsplit(":", 1)[-1].replace(" ", "") if self._short else text

    def answer(self, item: int) -> str:
        return str(self._items[item]["answer"])

    def score(self, item: int, answer: str) -> float:
        """The data set's own score, from 0 to 1."""
        return float(self._items.score_answer(answer.strip(), self._items[item]))


def _fingerprint(name: str, options: TaskOptions, size: int, seed: int, items: Any) -> str:
    """Changes when the settings do, or when another version of the generator gives other items."""
    looked_at = sorted({0, 1, 2, size // 3, size // 2, size - 1} & set(range(size)))
    seen = [[items[i]["question"], items[i]["answer"]] for i in looked_at]
    text = json.dumps([name, sorted(dict(options).items()), size, seed, seen], default=str)
    return blake2b(text.encode(), digest_size=16).hexdigest()


class PromptSampler:
    """Which prompts a step uses: a pure function of the seed and the step, each once an epoch.

    ``ids(step)`` may be asked in any order and by anybody. The object only remembers how far
    training has come (``advance``, after a step counted), so that the checkpoint can say it and a
    resume with other data, another seed or another batch size is refused, not reinterpreted.
    """

    def __init__(
        self, *, seed: int, size: int, prompts_per_step: int, num_iterations: int, fingerprint: str
    ) -> None:
        self._size = size
        self._order: tuple[int, list[int]] = (-1, [])
        self._position = 0
        self._identity: dict[str, int | str] = {
            "seed": seed,
            "fingerprint": fingerprint,
            "prompts_per_step": prompts_per_step,
            "num_iterations": num_iterations,
        }
        self._seed, self._prompts, self._iterations = seed, prompts_per_step, num_iterations

    @property
    def position(self) -> int:
        """Prompts whose first step has counted, over all epochs."""
        return self._position

    @property
    def epoch(self) -> int:
        return self._position // self._size

    def ids(self, step: int) -> tuple[int, ...]:
        """The prompts of the generation batch that step ``step`` (from 1) is trained on."""
        assert step >= 1, step
        first = (step - 1) // self._iterations * self._prompts
        return tuple(self._item(first + i) for i in range(self._prompts))

    def advance(self, step: int) -> None:
        """Step ``step`` counted."""
        self._position = ((step - 1) // self._iterations + 1) * self._prompts

    def state_dict(self) -> dict[str, int | str]:
        return {**self._identity, "position": self._position, "epoch": self.epoch}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, mine in self._identity.items():
            if state[name] != mine:
                raise StateMismatch(
                    f"the prompts of this run are not those of the checkpoint: {name} is {mine!r},"
                    f" there it is {state[name]!r}\n"
                    f"  at position {state['position']} of other prompts some would be skipped or used twice;"
                    " nothing was loaded into the sampler\n"
                    "  resume with the task, seed, --prompts-per-step and --num-iterations of the run,"
                    " or start a new run",
                    leaf=f"sampler.{name}",
                    found=state[name],
                    expected=mine,
                )
        self._position = int(state["position"])

    def _item(self, ordinal: int) -> int:
        epoch, place = divmod(ordinal, self._size)
        if self._order[0] != epoch:
            self._order = (epoch, permutation(derive(self._seed, "epoch", epoch), self._size))
        return self._order[1][place]
