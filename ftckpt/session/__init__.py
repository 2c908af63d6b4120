"""The context around a trainer: restores on entering, saves at step boundaries, stops well."""

from ftckpt.session.core import Session
from ftckpt.session.once import restore
from ftckpt.session.settings import HealState, Members, Settings

__all__ = ["HealState", "Members", "Session", "Settings", "restore"]
