"""Rules that need Megatron options: pipeline splits, MoE dispatch, recomputation, optimizer, determinism."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

from allocation.diagnostics import Problem, Remedy, Severity
from allocation.model_spec import ModelSpec
from allocation.pipeline import EVEN, pipeline_stages, split_words, uneven_ends
from allocation.registry import CONFIG, STATE, rule
from allocation.resolve import Engine
from allocation.settings import MegatronSettings

_ARGUMENTS = "Megatron-LM training/arguments.py"
DISPATCHERS = ("allgather", "alltoall", "flex")


@rule("ALLOC-LAYERS", source=f"{CONFIG}, num_layers", megatron="num_layers")
def layers_by_pipeline(engine: Engine, settings: MegatronSettings, model: ModelSpec) -> Iterator[Problem]:
    """Stages hold equally many layers, except for a first and last stage with explicit numbers.

    Virtual stages divide a rank's layers again.
    """
    if settings.pipeline_model_parallel_layout is not None:
        return
    ends = [settings.num_layers_in_first_pipeline_stage, settings.num_layers_in_last_pipeline_stage]
    given = [value for value in ends if value is not None]
    layers, stages = model.layers - sum(given), engine.pp - len(given)
    fix = _other_ends(engine, settings, model)
    if any(value < 1 for value in given):
        yield Problem("num_layers_in_first/last_pipeline_stage must be at least 1, not 0", **fix)
    elif (stages or layers) and (stages < 1 or layers < 1):
        message = f"{model.layers} layers on {engine.pp} stages leave {layers} for {stages} stages in the middle"
        yield Problem(message, engine.spans("pp"), **fix)
    elif stages and layers % stages:
        rest = f" left for {stages} middle stages" if given else ""
        message = f"{layers} layers{rest} cannot be split evenly by `{engine.says('pp')}`"
        yield Problem(message, engine.spans("pp"), **fix)
    else:
        for held in {*given, *([layers // stages] if stages else [])} if engine.vpp > 1 else ():
            if held % engine.vpp:
                message = f"{held} layers of a stage cannot be split by `{engine.says('vpp')}`"
                yield Problem(message, engine.spans("vpp", "pp"), **fix)


def _other_ends(engine: Engine, settings: MegatronSettings, model: ModelSpec) -> dict[str, Any]:
    """Return the fix: the layers of a first and a last stage with which the layers can be split."""
    ends = uneven_ends(model.layers, engine.pp, engine.vpp)
    if ends is None:
        return {}
    counts = split_words(model.layers, engine.pp, ends)
    if ends == EVEN:
        return {"help": f"leave the layers of the first and the last stage unset: {counts} layers"}
    keys = [f"num_layers_in_{which}_pipeline_stage" for which in ("first", "last")]
    middle = (model.layers - sum(end or 0 for end in ends)) // max(1, engine.pp - sum(end is not None for end in ends))
    values = tuple(
        (key, end or middle) for key, end in zip(keys, ends, strict=True) if end or getattr(settings, key) is not None
    )
    return {"remedy": Remedy(values, f": {counts} layers")}


@rule("ALLOC-PIPELINE-LAYOUT",
      source="Megatron-LM core/transformer/pipeline_parallel_layer_layout.py",
      megatron="pipeline_model_parallel_layout")  # fmt: skip
def pipeline_layout(engine: Engine, settings: MegatronSettings, model: ModelSpec) -> Iterator[Problem]:
    """A layout string has one E first, one L last, one t per layer, no m (MTP layers are not placed), and pp·v
    stages."""
    text = settings.pipeline_model_parallel_layout
    if text is None:
        return
    if {settings.num_layers_in_first_pipeline_stage, settings.num_layers_in_last_pipeline_stage} != {None}:
        yield Problem("pipeline_model_parallel_layout excludes num_layers_in_first/last_pipeline_stage")
    stages = pipeline_stages(text)
    if stages is None:
        yield Problem(f"pipeline_model_parallel_layout {text[:60]!r} is not made of E, t, L, `|` and (…)*n")
        return
    order = "".join(stages)
    counts = Counter(order)
    wanted = engine.pp * engine.vpp
    if len(stages) != wanted:
        message = f"pipeline_model_parallel_layout has {len(stages)} stages, p·v = {wanted}"
        yield Problem(message, engine.spans("pp", "vpp"))
    if counts["t"] != model.layers:
        yield Problem(f"pipeline_model_parallel_layout has {counts['t']} decoder layers, {model.name} {model.layers}")
    if counts["E"] != 1 or not order.startswith("E") or counts["L"] != 1 or not order.endswith("L"):
        yield Problem("pipeline_model_parallel_layout must start with its only E and end with its only L")
    if "m" in order:
        yield Problem(
            "pipeline_model_parallel_layout has MTP layers (m), which areal-like does not place", help="leave m out"
        )


@rule("ALLOC-VOCAB-PADDING", source="Megatron-LM training/vocab_utils.py; megatron-bridge the same",
      megatron="make_vocab_size_divisible_by", severity=Severity.NOTE)  # fmt: skip
def vocabulary_padding(engine: Engine, settings: MegatronSettings, model: ModelSpec) -> Iterator[Problem]:
    """The embedding is split over TP, so the vocabulary is padded if TP does not divide it.

    The added rows are not tokens and never leave the trainer.
    """
    multiple = settings.make_vocab_size_divisible_by * engine.tp
    if model.vocab_size % multiple:
        padded = -(-model.vocab_size // multiple) * multiple
        message = f"the vocabulary is padded from {model.vocab_size} to {padded} (a multiple of {multiple})"
        yield Problem(message, engine.spans("tp"))


@rule("ALLOC-VPP-OVERLAP", source=f"{_ARGUMENTS}, num_layers_per_virtual_pipeline_stage", megatron="overlap_p2p_comm")
def virtual_without_overlap(engine: Engine, settings: MegatronSettings) -> Iterator[Problem]:
    """Without overlapped sends, the interleaved schedule deadlocks with two stages."""
    if engine.vpp > 1 and engine.pp == 2 and not settings.overlap_p2p_comm:
        yield Problem("virtual stages with p2 need overlap_p2p_comm", engine.spans("vpp", "pp"))


@rule("ALLOC-VPP-GROUP", source="Megatron-LM core/pipeline_parallel/schedules.py",
      megatron="microbatch_group_size_per_vp_stage")  # fmt: skip
def virtual_group_fills_pipeline(engine: Engine, settings: MegatronSettings) -> Iterator[Problem]:
    """Each virtual stage takes micro-batches in groups, which must not be smaller than the pipeline."""
    group = settings.microbatch_group_size_per_vp_stage
    if engine.vpp > 1 and group is not None and group < engine.pp:
        message = f"microbatch_group_size_per_vp_stage is {group}, fewer than the stages of `{engine.says('pp')}`"
        yield Problem(
            message, engine.spans("pp", "vpp"), "leave microbatch_group_size_per_vp_stage out: its default is p"
        )


@rule("ALLOC-SEQUENCE-PARALLEL", source="Megatron-LM core/model_parallel_config.py", megatron="sequence_parallel")
def sequence_parallel_needs_tp(engine: Engine, settings: MegatronSettings) -> Iterator[Problem]:
    """Sequence parallelism splits activations that TP would repeat; with t1 there is nothing to split."""
    if settings.sequence_parallel and engine.tp == 1:
        yield Problem(
            "sequence_parallel is on, but t is 1", engine.spans("tp"), "leave sequence_parallel out: it follows t"
        )


@rule("ALLOC-MOE-SEQUENCE-PARALLEL", source="Megatron-LM core/transformer/moe/moe_layer.py",
      megatron="sequence_parallel")  # fmt: skip
def moe_needs_sequence_parallel(engine: Engine, settings: MegatronSettings, model: ModelSpec) -> Iterator[Problem]:
    """MoE layers with TP refuse to train without sequence parallelism, and fail only in the first forward pass."""
    if model.experts and engine.tp > 1 and settings.sequence_parallel is False:
        message = f"{model.name} has experts: `{engine.says('tp')}` needs sequence_parallel"
        yield Problem(message, engine.spans("tp"), "leave sequence_parallel out: it follows t")


@rule("ALLOC-DISPATCHER", source=f"{CONFIG}, moe_token_dispatcher_type", megatron="moe_token_dispatcher_type")
def dispatcher(settings: MegatronSettings) -> Iterator[Problem]:
    """RL batches have sequences of variable length, which `allgather` does not support; Megatron-core refuses it
    also for models without experts."""
    name = settings.moe_token_dispatcher_type
    if name not in DISPATCHERS:
        yield Problem(f"unknown moe_token_dispatcher_type {name!r}", help=f"one of {', '.join(DISPATCHERS)}")
    elif name == "allgather":
        yield Problem(
            "the allgather dispatcher does not support variable sequence lengths",
            remedy=Remedy((("moe_token_dispatcher_type", "alltoall"),)),
        )


@rule("ALLOC-DEEPEP", source=f"{CONFIG}, moe_enable_deepep", megatron="moe_enable_deepep")
def deepep_needs_flex(settings: MegatronSettings) -> Iterator[Problem]:
    """DeepEP requires the flexible dispatcher; Megatron-core checks this even for models without experts."""
    if settings.moe_enable_deepep and settings.moe_token_dispatcher_type != "flex":
        message = f"moe_enable_deepep needs the flex dispatcher, not {settings.moe_token_dispatcher_type}"
        yield Problem(message, remedy=Remedy((("moe_enable_deepep", False),)))


@rule("ALLOC-RECOMPUTE", source=f"{CONFIG}, recompute_granularity", megatron="recompute_granularity")
def recomputation(settings: MegatronSettings) -> Iterator[Problem]:
    """Full recomputation needs a method and a number of layers; selective recomputation names modules instead."""
    kind, method, layers = settings.recompute_granularity, settings.recompute_method, settings.recompute_num_layers
    if kind not in (None, "full", "selective"):
        yield Problem(f"unknown recompute_granularity {kind!r}", help="full or selective")
    if kind == "full":
        if method not in ("uniform", "block") or not layers:
            yield Problem("full recomputation needs recompute_method (uniform or block) and recompute_num_layers")
        if settings.moe_layer_recompute or settings.recompute_modules:
            message = "full recomputation already covers the modules that recompute_modules names"
            yield Problem(message, help="leave recompute_modules out")
    elif method or layers:
        option = "recompute_method" if method else "recompute_num_layers"
        yield Problem(f"{option} is for full recomputation only", help="leave it out")


@rule("ALLOC-RECOMPUTE-MOE", source=f"{CONFIG}, moe_layer_recompute", severity=Severity.WARNING)
def moe_recompute_renamed(settings: MegatronSettings) -> Iterator[Problem]:
    """The old option still works, but has a new name."""
    if settings.moe_layer_recompute:
        yield Problem("moe_layer_recompute is deprecated", help='write recompute_modules ["moe"]')


@rule("ALLOC-OPTIMIZER-INSTANCES", source=f"{STATE}, initialize_model_parallel",
      megatron="num_distributed_optimizer_instances")  # fmt: skip
def optimizer_instances(engine: Engine, settings: MegatronSettings) -> Iterator[Problem]:
    """The distributed optimizer's instances divide the ranks that reduce dense gradients, d·c, and those that reduce
    the experts' gradients, EDP."""
    instances, copies = settings.num_distributed_optimizer_instances, engine.dp * engine.cp
    if instances < 1 or copies % instances:
        message = f"{instances} distributed-optimizer instances do not divide d·c = {copies}"
        yield Problem(message, engine.spans("dp", "cp"))
    elif engine.edp % instances:
        message = f"{instances} distributed-optimizer instances do not divide EDP = {engine.edp}"
        yield Problem(message, engine.spans("ep", "etp"))


@rule("ALLOC-OVERLAP-GATHER", source=f"{_ARGUMENTS}, overlap_param_gather", megatron="overlap_param_gather")
def gather_overlap(settings: MegatronSettings) -> Iterator[Problem]:
    """Overlapped parameter gathering requires the distributed optimizer with overlapped reduction."""
    if settings.overlap_param_gather and not (settings.use_distributed_optimizer and settings.overlap_grad_reduce):
        message = "overlap_param_gather needs use_distributed_optimizer and overlap_grad_reduce"
        yield Problem(message, remedy=Remedy((("overlap_param_gather", False),)))


@rule("ALLOC-DETERMINISTIC-NCCL", source=f"{_ARGUMENTS}, deterministic_mode", megatron="deterministic_mode")
def deterministic_nccl(settings: MegatronSettings) -> Iterator[Problem]:
    """Deterministic training needs an NCCL algorithm with a fixed order of additions."""
    accepted = ("Ring", "CollnetDirect", "CollnetChain", "^NVLS")
    if settings.deterministic_mode and settings.nccl_algo not in accepted:
        yield Problem(f"deterministic_mode with NCCL_ALGO {settings.nccl_algo!r}", help=f"one of {', '.join(accepted)}")
