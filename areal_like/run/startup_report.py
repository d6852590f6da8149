"""The startup report: the placement of processes, each rank's parameters and environment, and the split of a batch."""

from collections.abc import Iterator
from pathlib import Path

from allocation.model_spec import ModelSpec
from allocation.parameters import count_held, prediction_layer, stages, total_parameters
from allocation.plan import EnginePlan
from allocation.settings import MegatronSettings
from areal_like.backends.megatron.options import row_multiple
from areal_like.backends.training.environment import rank_environment
from areal_like.capability import describe_capabilities
from areal_like.core.config.schema import RunConfig
from areal_like.core.rollout.backends import backend_of
from areal_like.core.trainer.engine import EngineSpec
from areal_like.core.trainer.packing import alignment_of
from areal_like.job import Job
from areal_like.run.start import engine_spec


def startup_report(job: Job) -> Iterator[str]:
    """Yield the lines, roles on trainer ranks first."""
    for role in job.config.roles:
        spec, plan = engine_spec(job, role, Path(), None), job.plan.engine(role)
        overrides = spec.config.megatron.override_transformer_config
        parameters = _parameters(job.models.get(role), plan, overrides, predicts=spec.trains_mtp)
        yield f"{role}: {plan.backend}, {_dimensions(plan)} on {_count(plan.world_size, 'rank')}{parameters}"
        yield f"  {_micro_batches(job.config, spec)}"
        if spec.resting:
            yield f"  offloaded to host memory between uses: {', '.join(spec.resting)}"
        variables = " ".join(f"{name}={value}" for name, value in rank_environment(spec).items())
        yield f"  environment, unless set otherwise: {variables}"
    rollout = job.plan.engine("rollout")
    yield f"rollout: {rollout.backend}, {_count(len(rollout.servers), 'server')} of TP {rollout.sizes.tp}"
    if graphs := describe_graphs(job):
        yield f"  {graphs}"
    yield from (f"  {line}" for line in describe_capabilities(job))


def find_captured(job: Job) -> tuple[int | None, str]:
    """Return the most requests that a server's CUDA graphs hold, None on a CPU or if unknown, and the reason."""
    if job.device != "cuda":
        return None, ""
    model = job.models.get("actor")
    servers = job.plan.engine("rollout").sizes.dp
    return backend_of(job.config).most_captured(job.config, servers, model.vocab_size if model else 0)


def describe_graphs(job: Job) -> str:
    """Describe the decoding passes that run in CUDA graphs, with the reason; "" on a CPU."""
    most, why = find_captured(job)
    if not why:
        return ""
    sizes = (
        "the sizes of" if most is None else f"passes of up to {_count(most, 'request')} a server:" if most else "none:"
    )
    return f"CUDA graphs of decoding: {sizes} {why}"


def _dimensions(plan: EnginePlan) -> str:
    """Return the parallel sizes of a layout, including the expert grid."""
    sizes = plan.sizes
    text = f"DP {sizes.dp}, TP {sizes.tp}, PP {sizes.pp}, CP {sizes.cp}"
    if sizes.vpp > 1:
        text += f", {sizes.vpp} virtual stages each"
    return text + (f", experts EP {sizes.ep}, ETP {sizes.etp}" if plan.backend == "megatron" else "")


def _parameters(model: ModelSpec | None, plan: EnginePlan, overrides: dict[str, object], *, predicts: bool) -> str:
    """Return the largest parameter count of a rank, and of the model, with the layer for multi-token prediction
    if it `predicts`."""
    if model is None:  # on the hub, not downloaded yet
        return ""
    total, sizes = total_parameters(model), plan.sizes
    total += prediction_layer(model).total if predicts else 0
    if plan.backend == "fsdp":
        return f"; {_large(-(-total // plan.world_size))} of {_large(total)} parameters each"
    split = {name: overrides[name] for name in _SPLITS if name in overrides}
    layers = stages(model, sizes, MegatronSettings(**split))  # type: ignore[arg-type]  # preflight has checked them
    ends = (0, sizes.pp - 1)
    most = max(
        count_held(model, sizes, own, first=stage == ends[0], last=stage == ends[1], predicts=predicts).total
        for stage, own in enumerate(layers)
    )
    return f"; {_large(most)} of {_large(total)} parameters {'at most ' if sizes.pp > 1 else ''}on each"


_SPLITS = (
    *("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"),
    "pipeline_model_parallel_layout",
)


def _micro_batches(config: RunConfig, spec: EngineSpec) -> str:
    """Describe how a step's samples are split; the most micro-batches come from the longest sequences."""
    samples = config.prompts_per_step * config.gconfig.n_samples
    parts = 1 if spec.optimizer is None else config.actor.ppo_n_minibatches
    each = -(-samples // parts)
    share, limit = -(-each // spec.sizes.dp), spec.config.mb_spec.max_tokens_per_mb
    rows = row_multiple(spec.config.megatron.override_transformer_config) or 1
    multiple = alignment_of(spec.backend, spec.sizes, rows)
    longest = -(-config.longest_sequence // multiple) * multiple
    most = -(-share // max(1, limit // longest))
    text = f"a step has {_count(samples, 'sequence')} of at most {config.longest_sequence} tokens"
    if spec.optimizer is not None:
        text += f", in {_count(parts, 'optimizer step')} of {each}"
    micro_batches = "a micro-batch" if most == 1 else f"1 to {most} micro-batches"
    return f"{text}; a data-parallel rank packs its {share} into {micro_batches} of at most {limit} tokens"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _large(number: int) -> str:
    for size, unit in ((10**9, " B"), (10**6, " M"), (10**3, " k")):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return str(number)
