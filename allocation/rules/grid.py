"""Every numeric constraint of one engine: one small function each, with its reason and its source."""

from __future__ import annotations

from collections.abc import Iterator

from allocation.diagnostics import Problem, rule
from allocation.grid import AXES
from allocation.resolve import Engine


@rule(
    "ALLOC-EP-DIVIDES",
    "trainer",
    source="Megatron-LM core/parallel_state.py:880",
    megatron="expert_model_parallel_size",
)
def expert_grid_divides_world(engine: Engine, order: str) -> Iterator[Problem]:
    """The experts have a grid of their own over the same GPUs: etp·ep·pp must divide their number, and the
    rest is expert data parallelism. The smallest world is pp·lcm(tp·cp, etp·ep)."""
    if engine.backend.folds and engine.world % engine.expert_block:
        product = f"{engine.ep}·{engine.etp}·{engine.pp} = {engine.expert_block}"
        message = f"`{engine.says('ep')}` does not fit: e·t·p = {product} does not divide {engine.world} GPU{'s' * (engine.world > 1)}"
        help = f"this layout needs a multiple of {engine.smallest_world} GPUs"
        yield Problem(message, engine.spans("ep", "etp", "pp"), help)


@rule(
    "ALLOC-FOLD-DATA",
    "trainer",
    source="Megatron-LM core/parallel_state.py:880: EDP is derived, never an input",
    megatron="expert_data_parallel_size",
)
def expert_data_parallel_agrees(engine: Engine, order: str) -> Iterator[Problem]:
    """A `d` in `ffn` asserts the expert-data-parallel size; what it must be follows from the rest."""
    if "ffn_dp" not in engine.written or engine.world % engine.expert_block:
        return
    written, derived = engine.size("ffn_dp"), engine.world // engine.expert_block
    if written != derived:
        message = f"`d{written}` in ffn, but {engine.world} GPUs / (e·t·p = {engine.expert_block}) leave d{derived}"
        yield Problem(message, engine.spans("ffn_dp"), f"write `d{derived}` or leave d out of ffn")


@rule("ALLOC-ORDER", "trainer", source="Megatron-LM core/parallel_state.py:470", megatron="order")
def order_names_axes(engine: Engine, order: str) -> Iterator[Problem]:
    """The rank order names each axis once."""
    if sorted(order.split("-")) != sorted(AXES):
        yield Problem(f"the rank order `{order}` does not name tp, cp, ep, dp and pp once each")


@rule("ALLOC-ORDER-PIPELINE", "trainer", source="Megatron-LM core/parallel_state.py:898", megatron="order")
def pipeline_order(engine: Engine, order: str) -> Iterator[Problem]:
    """Both grids must have the same pipeline groups; with pp not last that takes equal DP and EDP."""
    if order.endswith("pp") or engine.pp == 1 or not engine.backend.folds or engine.world % engine.expert_block:
        return
    edp = engine.world // engine.expert_block
    if edp != engine.dp:
        message = f"rank order `{order}` with pp {engine.pp} needs equal dp ({engine.dp}) and expert dp ({edp})"
        yield Problem(message, engine.spans("pp", "ep"), "use an order that ends in pp")


@rule(
    "ALLOC-VPP-PIPELINE",
    "trainer",
    source="Megatron-LM core/parallel_state.py:828",
    megatron="virtual_pipeline_model_parallel_size",
)
def virtual_stages_need_pipeline(engine: Engine, order: str) -> Iterator[Problem]:
    """Virtual stages interleave a pipeline; without one there is nothing to interleave."""
    if engine.vpp > 1 and engine.pp == 1:
        yield Problem(
            f"`{engine.says('vpp')}` needs a pipeline, but p is 1", engine.spans("vpp", "pp"), "write p2 or more"
        )


@rule("ALLOC-SERVER-EP", "server", source="SGLang server_args.py: ep_size divides tp_size", megatron=None)
def server_experts_in_replica(engine: Engine, order: str) -> Iterator[Problem]:
    """A server spreads its experts over the tensor-parallel GPUs of one replica."""
    if engine.tp % engine.ep:
        message = f"`{engine.says('ep')}` does not divide the {engine.tp} tensor-parallel GPUs of a replica"
        yield Problem(message, engine.spans("ep", "tp"))
