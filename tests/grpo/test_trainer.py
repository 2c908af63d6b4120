"""The promise: the bits of a run do not depend on who took part in it."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch

import ftckpt
from ftckpt.capture import Frozen
from ftckpt.events import silent
from ftckpt.integrations.grpo import GRPOConfig, GRPOTrainer
from ftckpt.integrations.grpo.adapter import adapter
from ftckpt.integrations.grpo.digest import digests
from ftckpt.slots import Alone
from tests.grpo.conftest import SMALL, Remembered
from tests.grpo.quorum import Quorum, train_together


@pytest.fixture(scope="module")
def undisturbed():
    """Digests and metrics of six steps by one participant."""
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)
    trainer = GRPOTrainer(SMALL, metrics=Remembered())
    trainer.train()
    return digests(trainer), trainer._metrics.lines


def learning(lines):
    """The figures that follow from the state: not who took part, nor how long it took."""
    return [(step, {k: v for k, v in one.items() if k not in {"groups", "step_s"}}) for step, one in lines]


def give_state(source, target):
    """What a heal or a restore does: every component of the adapter's state, by its own methods."""
    given, taken = adapter.state(source), adapter.state(target)
    for name, component in given.items():
        if not isinstance(component, Frozen):
            taken[name].load_state_dict(copy.deepcopy(component.state_dict()))


@pytest.mark.parametrize("members", [2, 3, 5])
def test_the_state_after_six_steps_has_the_same_bits_for_any_number_of_participants(
    build, undisturbed, members
):
    """Five members on four slots: one of them has none, and still ends with the same state."""
    quorum = Quorum(4, members)
    trainers = [build(member) for member in quorum.members]

    train_together(quorum, trainers)

    for trainer in trainers:
        assert digests(trainer) == undisturbed[0]
    assert learning(trainers[0]._metrics.lines) == learning(undisturbed[1])


def test_every_slot_is_generated_once_by_whoever_it_belongs_to(build):
    quorum = Quorum(4, 3)
    trainers = [build(member, steps=4) for member in quorum.members]

    train_together(quorum, trainers)

    assert [trainer.slots_generated for trainer in trainers] == [2, 2, 4]  # 1, 1 and 2 slots; 2 generations
    assert [trainer._metrics.steps for trainer in trainers] == [[1, 2, 3, 4], [], []]


@pytest.mark.parametrize("broken", [False, True])
def test_a_failed_vote_changes_nothing_and_no_rollout_is_made_again(build, undisturbed, broken):
    """Step 3 generates, step 4 reuses. With ``broken`` a peer was lost before the exchange."""
    quorum = Quorum(4, 2, failing=frozenset({3, 4}), broken=broken)
    trainers = [build(member) for member in quorum.members]
    states = []
    for trainer in trainers:
        watch_votes(trainer, states)

    train_together(quorum, trainers)

    assert [digests(trainer) for trainer in trainers] == [undisturbed[0]] * 2
    assert [trainer.slots_generated for trainer in trainers] == [2 * 3, 2 * 3]
    assert [turn.step for turn in quorum.members[0].turns] == [1, 2, 3, 3, 4, 4, 5, 6]
    assert learning(trainers[0]._metrics.lines) == learning(undisturbed[1])
    assert len(states) == 4 and all(before == after for before, after in states)


def watch_votes(trainer, states):
    """Append the state before and after each step whose vote failed."""
    train_step = trainer.train_step

    def watched(step, metrics):
        before = without_rng(digests(trainer))
        counted = train_step(step, metrics)
        if not counted:
            states.append((before, without_rng(digests(trainer))))
        return counted

    trainer.train_step = watched


def without_rng(found):
    return {name: value for name, value in found.items() if name != "rng"}


@pytest.mark.parametrize("at", [2, 3])
def test_a_healed_group_goes_on_from_where_the_others_are(build, undisturbed, at):
    """
    The survivor stands at step ``at``; the newcomer has nothing, has already made rollouts for step
    1 from weights that it loses, and is healed while it asks for step 1. After step 3 it is healed
    in the middle of a generation batch, which then comes from the peer too.
    """
    quorum = Quorum(4, 2)
    survivor = build(Alone(4), steps=at)
    survivor.train()
    newcomer = build(quorum.members[1])
    survivor.group, survivor.config = quorum.members[0], replace(SMALL)

    def heal():
        give_state(survivor, newcomer)
        return at

    quorum.members[1].heal = heal

    train_together(quorum, [survivor, newcomer])

    assert [digests(trainer) for trainer in (survivor, newcomer)] == [undisturbed[0]] * 2
    assert quorum.members[1].turns[0].step == at + 1 and quorum.members[1].turns[0].healed


@pytest.mark.parametrize("stop", [1, 4])
def test_a_run_resumed_at_any_step_ends_with_the_same_bits_and_the_same_figures(build, undisturbed, stop):
    first = build(steps=stop)
    first.train()
    torch.rand(5)

    second = build()
    give_state(first, second)
    second.train()

    assert digests(second) == undisturbed[0]
    assert learning(first._metrics.lines + second._metrics.lines) == learning(undisturbed[1])


def test_the_reference_is_the_policy_before_any_training(build):
    """Taken from restored weights, it would make the divergence zero at every restart."""
    trained, fresh = build(steps=2), build()
    trained.train()

    give_state(trained, fresh)

    for name, value in fresh.reference.state_dict().items():
        assert value.equal(trained.reference.state_dict()[name])
    assert not fresh.actor.state_dict()["lm_head.weight"].equal(
        fresh.reference.state_dict()["lm_head.weight"]
    )
    assert not any(p.requires_grad for p in fresh.reference.parameters())


def test_rollouts_name_the_weights_that_made_them(build):
    trainer = build(steps=3)

    trainer.train()

    assert (trainer.buffer.generation_step, trainer.buffer.weight_version, trainer.buffer.next_use) == (
        3,
        2,
        1,
    )
    assert trainer.counters.state_dict() == {
        "step": 3,
        "prompts": 16,
        "answers": 32,
        "tokens": trainer.counters.tokens,
    }
    assert trainer.sampler.position == 16


def test_the_learning_rate_rises_over_the_warm_up(build):
    trainer = build(steps=4, warmup_steps=3, lr=3e-4)

    trainer.train()

    assert [line["lr"] for _, line in trainer._metrics.lines] == pytest.approx([1e-4, 2e-4, 3e-4, 3e-4])


def test_the_first_use_of_a_batch_has_ratio_one(build):
    """The learner's own forward gave the log-probabilities, so nothing is clipped at first."""
    trainer = build(steps=2, lr=5e-2, warmup_steps=0)

    trainer.train()

    first, second = (line for _, line in trainer._metrics.lines)
    assert first["clipped"] == 0 and first["kl"] == 0
    assert second["clipped"] > 0 and second["kl"] > 0


def test_what_wrap_asks_is_answered(build):
    class Session:
        restored = "step 7"

        def steps(self, until):
            return iter(range(8, until + 1))

    trainer, lonely = build(Quorum(4, 1).members[0]), build(Alone(4), critic=False)
    adapter.connect(trainer, Session())

    assert adapter.matches(trainer) and not adapter.matches(object())
    assert set(adapter.state(trainer)) - set(adapter.state(lonely)) == {
        "critic",
        "critic_optim",
        "critic_schedule",
    }
    assert adapter.settings(trainer)["replica_group"] is trainer.group
    assert adapter.settings(lonely) == {"save_every": 20, "keep": 3, "run_seed": 0, "derives_seeds": True}
    assert list(trainer.steps(until=10)) == [8, 9, 10] and trainer.restored == "step 7"


def structure(trainer):
    """Classes, dtypes, what is trained, hooks and groups: everything of a model but its numbers."""
    found = []
    for name, component in adapter.state(trainer).items():
        module = component.value if isinstance(component, Frozen) else component
        if isinstance(module, torch.nn.Module):
            found += [(name, at, type(one), len(one._forward_hooks)) for at, one in module.named_modules()]
            found += [(name, at, p.dtype, p.shape, p.requires_grad) for at, p in module.named_parameters()]
        elif isinstance(module, torch.optim.Optimizer):
            found += [
                (name, type(module), {**group, "params": len(group["params"])})
                for group in module.param_groups
            ]
        else:
            found.append((name, type(module)))
    return found


def test_a_resume_builds_what_the_first_start_built(build, tmp_path):
    """F10"""
    structures = []
    for restored in (None, 0):
        trainer = build()
        with ftckpt.wrap(trainer, tmp_path, events=silent) as session:
            assert (session.restored and session.restored.step) == restored
            structures.append(structure(trainer))

    assert structures[0] == structures[1]


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_the_tiny_policy_learns():
    config = GRPOConfig(steps=100, slots=1, lr=1e-3, warmup_sft_steps=80)
    trainer = GRPOTrainer(config, metrics=Remembered())

    trainer.train()

    rewards = [line["reward"] for _, line in trainer._metrics.lines]
    assert sum(rewards[-20:]) / 20 > sum(rewards[:20]) / 20 + 0.04  # 0.31 and 0.41 when written
