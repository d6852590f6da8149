"""Every constraint: one small function each, with its reason in the docstring and its source.

Importing this package registers them all.
"""

from allocation.rules import batch, grid, model, placement, run_file, settings, words

__all__ = ["batch", "grid", "model", "placement", "run_file", "settings", "words"]
