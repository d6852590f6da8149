"""Every constraint: one small function each, with its reason in the docstring and its source.

A rule's parameters name its inputs (`trainer`, `model`, `batch`, …); `registry.run_rules` runs those that have it.
"""

from importlib import import_module
from pkgutil import iter_modules


def register_all() -> None:
    """Import, and so register, every rule about allocations. `allocation.convert` registers those about conversions."""
    for module in iter_modules(__path__):
        import_module(f"{__name__}.{module.name}")
