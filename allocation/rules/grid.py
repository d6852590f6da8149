"""Every numeric constraint of one engine: one small function each, with its reason and its source."""

import math
from collections.abc import Iterator

from allocation.diagnostics import Problem
from allocation.grid import AXES
from allocation.registry import STATE, rule
from allocation.resolve import Engine


@rule("ALLOC-EP-DIVIDES", source=f"{STATE}:880", megatron="expert_model_parallel_size")
def expert_grid_divides_world(trainer: Engine) -> Iterator[Problem]:
    """The experts have a separate grid over the same GPUs: etp·ep·pp must divide their number, and the quotient is
    the expert data parallel size. The smallest world is pp·lcm(tp·cp, etp·ep)."""
    if trainer.backend.folds and trainer.world % trainer.expert_block:
        product = f"{trainer.ep}·{trainer.etp}·{trainer.pp} = {trainer.expert_block}"
        message = f"`{trainer.says('ep')}` does not fit: e·t·p = {product} does not divide {trainer.world} GPU{'s' * (trainer.world > 1)}"
        help = f"this layout needs a multiple of {trainer.smallest_world} GPUs"
        yield Problem(message, trainer.spans("ep", "etp", "pp"), help)


@rule("ALLOC-FOLD-DATA", source=f"{STATE}:880: EDP is derived, never an input", megatron="expert_data_parallel_size")
def expert_data_parallel_agrees(trainer: Engine) -> Iterator[Problem]:
    """A `d` in `ffn` only states the expert data parallel size; its value follows from the other sizes."""
    if "ffn_dp" in trainer.written and trainer.ffn_dp != trainer.edp:
        leave = f"{trainer.world} GPUs / (e·t·p = {trainer.expert_block}) leave d{trainer.edp}"
        message = f"`d{trainer.ffn_dp}` in ffn, but {leave}"
        yield Problem(message, trainer.spans("ffn_dp"), f"write `d{trainer.edp}` or leave d out of ffn")


@rule("ALLOC-ORDER", source=f"{STATE}:470", megatron="order")
def order_names_axes(order: str) -> Iterator[Problem]:
    """The rank order names each axis once."""
    if sorted(order.split("-")) != sorted(AXES):
        yield Problem(f"the rank order `{order}` does not name tp, cp, ep, dp and pp once each")


@rule("ALLOC-ORDER-PIPELINE", source=f"{STATE}:898", megatron="order")
def pipeline_order(trainer: Engine, order: str) -> Iterator[Problem]:
    """Both grids must have the same pipeline groups.

    If pp is not last, this requires equal DP and EDP, and as many ranks between one stage and the next.
    """
    if order.endswith("pp") or trainer.pp == 1 or not trainer.backend.folds:
        return
    inner = order.partition("pp")[0].split("-")
    dense = {"tp": trainer.tp, "cp": trainer.cp, "dp": trainer.dp}
    expert = {"tp": trainer.etp, "ep": trainer.ep, "dp": trainer.edp}
    apart, experts_apart = (math.prod(sizes.get(axis, 1) for axis in inner) for sizes in (dense, expert))
    needs = f"rank order `{order}` with pp {trainer.pp} needs"
    if trainer.edp != trainer.dp:
        message = f"{needs} equal dp ({trainer.dp}) and expert dp ({trainer.edp})"
    elif apart != experts_apart:
        message = f"{needs} stages equally far apart in both grids: {apart} ranks in attn, {experts_apart} in ffn"
    else:
        return
    yield Problem(message, trainer.spans("pp", "ep"), "use an order that ends in pp")


@rule("ALLOC-VPP-PIPELINE", source=f"{STATE}:828", megatron="virtual_pipeline_model_parallel_size")
def virtual_stages_need_pipeline(trainer: Engine) -> Iterator[Problem]:
    """Virtual stages interleave a pipeline; without one there is nothing to interleave."""
    if trainer.vpp > 1 and trainer.pp == 1:
        message = f"`{trainer.says('vpp')}` needs a pipeline, but p is 1"
        yield Problem(message, trainer.spans("vpp", "pp"), "write p2 or more")


@rule("ALLOC-SERVER-EP", source="SGLang server_args.py: ep_size divides tp_size", megatron=None)
def server_experts_in_replica(server: Engine) -> Iterator[Problem]:
    """A server spreads its experts over the tensor-parallel GPUs of one replica."""
    if server.tp % server.ep:
        message = f"`{server.says('ep')}` does not divide the {server.tp} tensor-parallel GPUs of a replica"
        yield Problem(message, server.spans("ep", "tp"))
