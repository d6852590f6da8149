"""Families of models by `model_type`: each file of this folder has FAMILIES, and nothing else names its families."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pkgutil import iter_modules

from allocation.families.family import USUAL, Family, Fsdp, Megatron, Server

__all__ = ["FAMILIES", "TRAINED", "USUAL", "Family", "Fsdp", "Megatron", "Server", "families_with"]

FAMILIES: dict[str, Family] = {
    name: family
    for file in sorted(each.name for each in iter_modules(__path__) if each.name != "family")
    for name, family in import_module(f"{__name__}.{file}").FAMILIES.items()
}


def families_with(has: Callable[[Family], object]) -> tuple[str, ...]:
    """Return the names of the families for which `has` is true."""
    return tuple(name for name, family in FAMILIES.items() if has(family))


# Families whose models runs of areal-like train, by backend
TRAINED = {
    "megatron": families_with(lambda family: family.megatron),
    "fsdp": families_with(lambda family: family.under_fsdp),
}
