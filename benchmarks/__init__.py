"""Measurements that a person can repeat with one command each. Nothing here is part of the library."""
