"""siiRL: verl's engine settings, all engines on one pool of GPUs. Keys as in `siirl/params/model_args.py`.

ETP left out is 1 here, and the reference does not follow the actor.
"""

from __future__ import annotations

from allocation.convert import verl
from allocation.convert.system import System
from allocation.diagnostics import Finding
from allocation.plan import Plan

_SIIRL = verl.Dialect("siiRL", etp_follows_tp=False, ref_follows_actor=False)


def read(text: str) -> tuple[str, list[Finding]]:
    """The engines of siiRL's settings."""
    return verl.reader(_SIIRL, text)


def write(plan: Plan) -> str:
    """Hydra overrides; every engine uses all GPUs."""
    return verl.lines(verl.settings(plan, _SIIRL, own_pool=False))


SYSTEM = System("siirl", "siiRL", read, write, verl.ONE_POOL, even="each")
