"""The GRPO trainer that ships with ftckpt: small enough to read in one sitting, real enough to use.

``trainer.py`` is the loop, ``__main__.py`` the command, ``adapter.py`` what ``ftckpt.wrap`` asks.
Needs the extra ``ftckpt[grpo]``. Nothing heavy is imported until a model is built.
"""

from __future__ import annotations

from ftckpt.integrations.grpo.config import GRPOConfig
from ftckpt.integrations.grpo.trainer import GRPOTrainer

__all__ = ["GRPOConfig", "GRPOTrainer"]
