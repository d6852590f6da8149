"""Imports, and so registers, every rule about allocations. Those about conversions come with `allocation.convert`."""

from allocation.rules import batch, grid, memory, model, options, placement, roles, syntax, words

__all__ = ["batch", "grid", "memory", "model", "options", "placement", "roles", "syntax", "words"]
