"""Interop: what others wrote comes in, what others read goes out."""
