"""What ``ftckpt.wrap`` asks about this trainer: what its state is, and where its steps come from.

Found by the entry point ``grpo`` in the group ``ftckpt.adapters``. Uses public names only; a
trainer of your own needs no more than these four functions.
"""

from __future__ import annotations

from typing import Any

from ftckpt.integrations.grpo.trainer import GRPOTrainer
from ftckpt.slots import Alone


class GRPOAdapter:
    """The four answers. Holds nothing."""

    def matches(self, trainer: object) -> bool:
        return isinstance(trainer, GRPOTrainer)

    def state(self, trainer: GRPOTrainer) -> dict[str, object]:
        """Component name to live object. The reference never changes, so it is stored once a run."""
        from ftckpt.capture import Frozen

        state: dict[str, object] = {
            "actor": trainer.actor,
            "reference": Frozen(trainer.reference),
            "optim": trainer.optim,
            "schedule": trainer.schedule,
            "sampler": trainer.sampler,
            "buffer": trainer.buffer,
            "counters": trainer.counters,
        }
        if trainer.critic is not None:
            state["critic"] = trainer.critic
            state["critic_optim"] = trainer.critic_optim
            state["critic_schedule"] = trainer.critic_schedule
        return state

    def settings(self, trainer: GRPOTrainer) -> dict[str, Any]:
        """Keyword settings of the session, where the caller gave none."""
        settings: dict[str, Any] = {
            "save_every": trainer.config.save_every,
            "keep": trainer.config.keep,
            "run_seed": trainer.config.seed,
            "derives_seeds": True,
        }
        if trainer.config.mtbf_s:
            settings["mtbf_s"] = trainer.config.mtbf_s
        if not isinstance(trainer.group, Alone):
            settings["replica_group"] = trainer.group
        return settings

    def connect(self, trainer: GRPOTrainer, session: Any) -> None:
        """The session has been entered: the trainer's state is restored, its steps are the session's."""
        trainer.steps = session.steps
        trainer.restored = session.restored


adapter = GRPOAdapter()
