"""Ways to break things: what stands between a healthy part and the one that uses it."""

from __future__ import annotations
