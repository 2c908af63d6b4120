"""Decisions about bytes, made before any byte moves: all pure, no torch, no I/O."""
