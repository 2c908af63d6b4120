"""What brings a tier's steps to the far store, and outlives the trainer that made them."""

from ftckpt.agent.core import Agent, Drained, Near, drain_first

__all__ = ["Agent", "Drained", "Near", "drain_first"]
