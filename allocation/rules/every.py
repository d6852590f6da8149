"""Import, and so register, every rule about allocations. `allocation.convert` registers those about conversions."""

from allocation.rules import batch, grid, memory, model, options, placement, roles, syntax, words

__all__ = ["batch", "grid", "memory", "model", "options", "placement", "roles", "syntax", "words"]
