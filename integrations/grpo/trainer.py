"""GRPO in one loop, for members that come and go.

A step's batch is cut into slots. A member generates, scores and differentiates the slots it is
given, each alone and in one shape; sums run along one tree over all slots. So the weights after a
step have the same bits whoever took part, and a member that is new, healed or resumed repeats what
the others did rather than something like it.

What must survive is in the attributes that ``adapter.py`` lists: actor, critic, their optimizers
and schedules, sampler, buffer, counters. The rest follows from the config.

Left out on purpose: an inference engine (the actor samples for itself), asynchronous rollouts,
mixed precision, gradient accumulation inside a slot, entropy bonus, adaptive KL, reward models,
multi-turn answers, evaluation, dropout.
"""

from __future__ import annotations

import copy
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from ftckpt.integrations.grpo import loss as grpo
from ftckpt.integrations.grpo.buffer import RolloutBuffer
from ftckpt.integrations.grpo.config import GRPOConfig
from ftckpt.integrations.grpo.metrics import Metrics, open_metrics
from ftckpt.integrations.grpo.model import Critic, load_policy, warm_up
from ftckpt.integrations.grpo.rollouts import answer_logp, answer_values, columns, pack, roll, unpack
from ftckpt.integrations.grpo.seeds import seed_everything
from ftckpt.integrations.grpo.tasks import PromptSampler, Task
from ftckpt.slots import Alone, SlotGroup

FIGURES = ("loss", "kl", "clipped", "value_loss")
"""What a slot reports beside its gradient, in the gradient's last elements."""


@dataclass(slots=True)
class Counters:
    """How far training has come. ``step`` is also the version of the weights."""

    step: int = 0
    prompts: int = 0
    answers: int = 0
    tokens: int = 0

    def state_dict(self) -> dict[str, int]:
        return asdict(self)

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        for name in asdict(self):
            setattr(self, name, int(state[name]))


class GRPOTrainer:
    """Trains ``config.model`` on ``config.task``, as one member of ``group``.

    Building it is a pure function of the config: every member, every restart, builds the same
    actor, and the reference is taken from it before anything is restored. When a process group of
    more than one rank exists, actor, critic and reference are sharded over it (FSDP2).

    ``steps(until=…)`` yields the steps to train; ``ftckpt.wrap`` puts the session's in its place.
    """

    def __init__(
        self, config: GRPOConfig, group: SlotGroup | None = None, metrics: Metrics | None = None
    ) -> None:
        self.config = config
        self.group: SlotGroup = group if group is not None else Alone(config.slots)
        self.mesh: DeviceMesh | None = _inner_mesh(config.device)
        self.rank = self.mesh.get_local_rank() if self.mesh else 0
        self.world = self.mesh.size() if self.mesh else 1
        config.check_world(self.world)
        assert self.group.total_slots == config.slots, (self.group.total_slots, config.slots)

        tiny = config.model == "tiny"
        self.task = Task(config.task, config.task_options, config.task_size, config.seed, short=tiny)
        self.policy = load_policy(config.model, seed=config.seed, device=config.device, chat=config.chat)
        length = config.prompt_tokens + config.answer_tokens
        warm_up(self.policy, self.task, steps=config.warmup_sft_steps, seed=config.seed, length=length)
        self.actor: nn.Module = self.policy.model
        self.reference: nn.Module = copy.deepcopy(self.actor).requires_grad_(requires_grad=False)
        self.critic: nn.Module | None = _critic(self.actor, config) if config.critic else None
        if self.mesh:
            for model in self.models:
                _shard(model, self.mesh)

        self.optim: Optimizer = AdamW(self.actor.parameters(), lr=config.lr, weight_decay=config.weight_decay)
        self.schedule = LambdaLR(self.optim, _rising(config.warmup_steps))
        self.critic_optim: Optimizer | None = None
        self.critic_schedule: LambdaLR | None = None
        if self.critic:
            self.critic_optim = AdamW(
                self.critic.parameters(), lr=config.critic_lr, weight_decay=config.weight_decay
            )
            self.critic_schedule = LambdaLR(self.critic_optim, _rising(config.warmup_steps))

        self.sampler = PromptSampler(
            seed=config.seed,
            size=config.task_size,
            prompts_per_step=config.prompts_per_step,
            num_iterations=config.num_iterations,
            fingerprint=self.task.fingerprint,
        )
        self.buffer = RolloutBuffer(
            slots=config.slots,
            rows=config.rows_per_slot,
            columns=columns(config),
            num_iterations=config.num_iterations,
        )
        self.counters = Counters()

        self.steps: Callable[..., Iterable[int]] = self._own_steps
        self.restored: object = None
        self.slots_generated = 0  # by this process in this life: not state, but what tests and people ask
        self._metrics = metrics
        self._made: dict[
            tuple[int, int], Tensor
        ] = {}  # (step, slot) -> packed rollouts, until the step counts

    @property
    def models(self) -> list[nn.Module]:
        return [model for model in (self.actor, self.reference, self.critic) if model is not None]

    # --- the loop ----------------------------------------------------------------------------

    def train(self) -> None:
        """Train up to ``config.steps``, from wherever the counters stand."""
        metrics = self._metrics if self._metrics is not None else open_metrics(self.config.out, sys.stdout)
        try:
            for step in self.steps(until=self.config.steps):
                self.train_step(step, metrics)
        finally:
            metrics.close()

    def train_step(self, step: int, metrics: Metrics) -> bool:
        """Try one step. False: a member was lost, nothing has changed, try it again.

        After a heal the step trained is the one the others are at, not ``step``.
        """
        started_s = time.monotonic()
        # Rollouts take longest, so they are made before the quorum meets: a member that dies
        # meanwhile is noticed before it can spoil the step. The share is a guess.
        self._generate(step, self.group.expected_slots)
        turn = self.group.begin(step)
        step = turn.step
        assert step == self.counters.step + 1, (step, self.counters.step)
        if turn.healed:
            self._made.clear()  # made by weights that are no longer ours
        seed_everything(self.config.seed, step)

        batch = self.buffer.batch_for(step)
        if batch is None:
            self._generate(step, turn.slots)
            batch = self.group.exchange(turn, {slot: self._made[step, slot] for slot in turn.slots})

        # The sum is a mean of slot means. Both networks' gradients travel in one vector.
        flat = self.group.reduce(turn, self._slot_gradient(batch), self._numel, torch.float32)
        flat = flat.to(self.config.device).div_(self.config.slots)
        figures = dict(zip(FIGURES, flat[-len(FIGURES) :].tolist(), strict=True))
        figures["grad_norm"] = self._write_gradients(flat)

        if not self.group.vote():
            self._drop_gradients()
            return False  # the rollouts stay in _made: they cost most of the step

        figures["lr"] = self.schedule.get_last_lr()[0]
        for optim, schedule in self._learners:
            optim.step()
            schedule.step()
        self._drop_gradients()
        self._count(step, batch)
        figures |= self._batch_figures(batch)
        # A library may have drawn random numbers during the step; the state after it must not tell.
        seed_everything(self.config.seed, step + 1)
        if turn.index == 0 and self.rank == 0:
            figures |= {"groups": len(turn.participants), "step_s": time.monotonic() - started_s}
            metrics.write(step, _in_order(figures))
        return True

    def _own_steps(self, until: int) -> Iterator[int]:
        while self.counters.step < until:
            yield self.counters.step + 1

    def _count(self, step: int, batch: Tensor) -> None:
        """Move everything that says how far we are: only ever after a vote."""
        first_use = self.buffer.generation_step == 0
        self.buffer.used(batch, step, weight_version=step - 1)
        self.sampler.advance(step)
        self.counters.step = step
        if first_use:
            rows_BC = batch.flatten(0, 1)
            self.counters.prompts += self.config.prompts_per_step
            self.counters.answers += len(rows_BC)
            self.counters.tokens += int(unpack(rows_BC, self.config).mask_BT.sum())
        self._made.clear()

    # --- rollouts ----------------------------------------------------------------------------

    def _generate(self, step: int, slots: Iterable[int]) -> None:
        """Make the rollouts of those slots, unless they exist or the step reuses a batch."""
        if step != self.counters.step + 1 or self.buffer.batch_for(step) is not None:
            return
        prompts = self.sampler.ids(step)
        for slot in slots:
            if (step, slot) in self._made:
                continue
            first = slot * self.config.prompts_per_slot
            of_slot = prompts[first : first + self.config.prompts_per_slot]
            mine = len(of_slot) // self.world
            part = roll(
                self.policy,
                self.reference,
                self.critic,
                self.task,
                self.config,
                of_slot[self.rank * mine : (self.rank + 1) * mine],
                step=step,
                weight_version=self.counters.step,
            )
            self._made[step, slot] = self._whole_slot(pack(part))
            self.slots_generated += 1
        for model in self.models:
            _reshard(model)

    def _whole_slot(self, part_BC: Tensor) -> Tensor:
        """Every rank's part of a slot, on every rank."""
        if self.mesh is None:
            return part_BC
        here = part_BC.to(self.config.device)
        parts = [torch.empty_like(here) for _ in range(self.world)]
        dist.all_gather(parts, here, group=self.mesh.get_group())
        return torch.cat(parts).cpu()

    # --- gradients ---------------------------------------------------------------------------

    def _slot_gradient(self, batch: Tensor) -> Callable[[int], Tensor]:
        """What ``reduce`` asks for: the gradient of one slot, actor then critic, then its figures."""

        def gradient(slot: int) -> Tensor:
            self._drop_gradients()
            total, figures = self._slot_loss(batch[slot])
            total.backward()
            if self.mesh:
                dist.all_reduce(figures, group=self.mesh.get_group())
                figures /= self.world
            flat = torch.cat([*(_local_gradient(p) for p in self._parameters), figures])
            self._drop_gradients()  # the tree holds up to log2(slots) + 1 of these already
            return flat

        return gradient

    def _slot_loss(self, packed_BC: Tensor) -> tuple[Tensor, Tensor]:
        config, P = self.config, self.config.prompt_tokens
        slot = unpack(packed_BC, config).rows(self.rank, self.world).to(config.device)
        mask_BT = slot.mask_BT

        if self.critic is None:
            advantage_BT = grpo.group_advantages(slot.reward_B, config.samples_per_prompt)[:, None]
        else:
            # The critic stands in for the siblings' mean: it can tell one token from the next.
            advantage_BT = slot.reward_B[:, None] - slot.value_BT
        logp_BT = answer_logp(self.actor, slot.tokens_BL, slot.width_B, P, config.temperature)
        policy_BT = grpo.clipped_ratio(logp_BT, slot.logp_BT, advantage_BT, config.clip)
        kl_BT = grpo.kl_k3(logp_BT, slot.ref_logp_BT)
        loss = grpo.mean_over_answers(policy_BT + config.kl_coef * kl_BT, mask_BT)
        total, value_loss = loss, torch.zeros_like(loss)
        if self.critic is not None:
            value_BT = answer_values(self.critic, slot.tokens_BL, slot.width_B, P)
            value_loss = grpo.mean_over_answers(grpo.value_error(value_BT, slot.reward_B), mask_BT)
            total = loss + value_loss  # the two networks share no parameter
        with torch.no_grad():
            kl = grpo.mean_over_answers(kl_BT, mask_BT)
            clipped = grpo.is_clipped(logp_BT, slot.logp_BT, config.clip)
            figures = [loss, kl, grpo.mean_over_answers(clipped, mask_BT), value_loss]
            return total, torch.stack(figures).detach()

    def _write_gradients(self, flat: Tensor) -> float:
        """Put the mean gradient into ``.grad``, clipped for each network alone. The actor's norm."""
        norms = []
        offset = 0
        for optim, _ in self._learners:
            parameters = _parameters_of(optim)
            sizes = [_local(p).numel() for p in parameters]
            mine = flat[offset : offset + sum(sizes)]
            offset += sum(sizes)
            parts = torch.split(mine, sizes)
            square = torch.stack([part.double().square().sum() for part in parts]).sum()
            if self.mesh:
                dist.all_reduce(square, group=self.mesh.get_group())
            norm = float(square.sqrt())
            mine *= min(1.0, self.config.grad_clip / (norm + 1e-6))
            for parameter, part in zip(parameters, parts, strict=True):
                parameter.grad = _like(parameter, part)
            norms.append(norm)
        return norms[0]

    def _drop_gradients(self) -> None:
        for optim, _ in self._learners:
            optim.zero_grad()

    @property
    def _learners(self) -> list[tuple[Optimizer, LambdaLR]]:
        learners = [(self.optim, self.schedule)]
        if self.critic_optim is not None and self.critic_schedule is not None:
            learners.append((self.critic_optim, self.critic_schedule))
        return learners

    @property
    def _parameters(self) -> list[nn.Parameter]:
        """In the order of the flat gradient."""
        return [p for optim, _ in self._learners for p in _parameters_of(optim)]

    @property
    def _numel(self) -> int:
        return sum(_local(p).numel() for p in self._parameters) + len(FIGURES)

    def _batch_figures(self, batch: Tensor) -> dict[str, float]:
        whole = unpack(batch.flatten(0, 1), self.config)
        return {
            "reward": float(whole.reward_B.mean()),
            "right": float((whole.reward_B == 1).float().mean()),
            "answer_tokens": float(whole.mask_BT.sum(dim=1).mean()),
        }


# --- sharding inside a group: what differs between a tensor and a DTensor is all below ---------


def _inner_mesh(device: str) -> DeviceMesh | None:
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    return init_device_mesh(torch.device(device).type, (dist.get_world_size(),))


def _shard(model: nn.Module, mesh: DeviceMesh) -> None:
    """FSDP2 over the ranks of the group: every decoder layer, then the rest."""
    body: Any = model.body if isinstance(model, Critic) else model.model
    for layer in body.layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    fully_shard(model, mesh=mesh, reshard_after_forward=True)


def _reshard(model: nn.Module) -> None:
    """Give back what a forward without backward may have left gathered: otherwise the next
    forward would use weights from before the optimizer step.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _local(parameter: Tensor) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def _local_gradient(parameter: nn.Parameter) -> Tensor:
    if parameter.grad is None:
        return torch.zeros_like(_local(parameter).detach()).flatten()
    return _local(parameter.grad).flatten()


def _like(parameter: nn.Parameter, part: Tensor) -> Tensor:
    """A flat local gradient in the parameter's own shape and layout."""
    if isinstance(parameter, DTensor):
        local = part.view(parameter.to_local().shape)
        return DTensor.from_local(
            local,
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )
    return part.view_as(parameter)


def _parameters_of(optim: Optimizer) -> list[nn.Parameter]:
    return [p for group in optim.param_groups for p in group["params"]]


def _critic(actor: nn.Module, config: GRPOConfig) -> nn.Module:
    return Critic(actor).to(config.device).eval()


def _rising(warmup_steps: int) -> Callable[[int], float]:
    """The share of the full learning rate for the n-th update (from 0)."""

    def share(update: int) -> float:
        return min(1.0, (update + 1) / max(1, warmup_steps))

    return share


def _in_order(figures: Mapping[str, float]) -> dict[str, float]:
    first = ("reward", "right", "loss", "kl")
    return {name: figures[name] for name in (*first, *(n for n in figures if n not in first))}
