"""Rules that need the batch: the sequences of a step per rank and micro-batch."""

from collections.abc import Iterator

from allocation.diagnostics import Problem, Remedy, Severity
from allocation.model_spec import ModelSpec
from allocation.registry import rule
from allocation.resolve import Engine
from allocation.settings import BatchSpec, MegatronSettings

_MICROBATCHES = "Megatron-LM core/num_microbatches_calculator.py"
_SCHEDULES = "Megatron-LM core/pipeline_parallel/schedules.py"


def _pad(engine: Engine, length: int) -> tuple[int, int]:
    """Return the multiple to which packed sequences are padded (2·c·t with CP, else t; c under FSDP), and `length`
    padded."""
    ends = 2 if engine.cp > 1 and engine.backend.name != "fsdp" else 1
    multiple = ends * engine.cp * engine.tp
    return multiple, -(-length // multiple) * multiple


@rule("ALLOC-BATCH-SIZES", source="a batch counts prompts, samples and tokens")
def batch_positive(given_batch: BatchSpec) -> Iterator[Problem]:
    """Every number of a batch is at least 1, and the share of images is from 0 to 1."""
    for name in given_batch.__slots__:
        value = getattr(given_batch, name)
        if name == "image_share":
            if not 0 <= value <= 1:
                yield Problem(f"{name} must be from 0 to 1, not {value}")
        elif value is not None and value < 1:
            yield Problem(f"{name} must be at least 1, not {value}")


@rule("ALLOC-BATCH-MINIBATCHES", source="mini-batches of one step are equal")
def minibatches_divide(batch: BatchSpec) -> Iterator[Problem]:
    """All optimizer steps of one batch train on equally many sequences."""
    if batch.sequences % batch.n_minibatches:
        message = f"{batch.sequences} sequences ({batch.n_prompts} · {batch.n_samples}) are not divisible by "
        yield Problem(f"{message}{batch.n_minibatches} mini-batches")


@rule("ALLOC-BATCH-DP", source=_MICROBATCHES, megatron="global_batch_size")
def batch_by_dp(engine: Engine, batch: BatchSpec) -> Iterator[Problem]:
    """Every data-parallel rank trains in every optimizer step: with a fixed micro-batch on equally many sequences,
    with packing on at least one."""
    sequences = batch.sequences // batch.n_minibatches
    steps = f" / {batch.n_minibatches} mini-batches" if batch.n_minibatches > 1 else ""
    named = f"{sequences} sequences ({batch.n_prompts} prompts · {batch.n_samples} samples{steps})"
    if batch.micro_batch is not None and sequences % (batch.micro_batch * engine.dp):
        product = f"micro-batch {batch.micro_batch} · `{engine.says('dp')}` = {batch.micro_batch * engine.dp}"
        yield Problem(f"{named} are not divisible by {product}", engine.spans("dp"))
    elif batch.micro_batch is None and sequences < engine.dp:
        yield Problem(f"{named} leave some of `{engine.says('dp')}` idle", engine.spans("dp"))


@rule("ALLOC-BATCH-VPP", source=_SCHEDULES, megatron="microbatch_group_size_per_vp_stage")
def virtual_microbatches(engine: Engine, settings: MegatronSettings, batch: BatchSpec) -> Iterator[Problem]:
    """The interleaved schedule runs micro-batches in groups of pp to M, and the last group must not be
    smaller than the pipeline."""
    if engine.vpp == 1 or batch.micro_batch is None:
        return
    count = batch.sequences // batch.n_minibatches // (batch.micro_batch * engine.dp)
    group = settings.microbatch_group_size_per_vp_stage or engine.pp
    if group > count:
        message = f"a rank has {count} micro-batches, fewer than the {group} of a group"
        yield Problem(message, engine.spans("pp", "vpp"))
    elif 0 < count % group < engine.pp:
        message = f"{count} micro-batches in groups of {group} leave a last group of {count % group}, smaller than p"
        yield Problem(message, engine.spans("pp", "vpp"))


@rule("ALLOC-BATCH-BUBBLE", source=_SCHEDULES, severity=Severity.WARNING)
def pipeline_filled(engine: Engine, batch: BatchSpec) -> Iterator[Problem]:
    """With fewer sequences per rank than stages the pipeline is never full."""
    per_rank = batch.sequences // batch.n_minibatches // engine.dp
    if engine.pp > 1 and 0 < per_rank < engine.pp:
        message = f"a rank has at most {per_rank} micro-batches for `{engine.says('pp')}`: pipeline stages idle"
        yield Problem(message, engine.spans("pp", "dp"))


@rule("ALLOC-SEQUENCE-CP", source=f"{_MICROBATCHES}; training/arguments.py, seq_length")
def fixed_length_divides(engine: Engine, batch: BatchSpec) -> Iterator[Problem]:
    """Context parallelism cuts a sequence into 2·c pieces and sequence parallelism each rank's part into t; under
    FSDP only c counts. Packed sequences are padded to this multiple; unpacked ones must be a multiple of it."""
    multiple, padded = _pad(engine, batch.max_length or 0)
    if batch.micro_batch is not None and batch.max_length and padded != batch.max_length:
        product = "t" if engine.cp == 1 else "c·t" if engine.backend.name == "fsdp" else "2·c·t"
        message = f"sequences of {batch.max_length} tokens are not a multiple of {product} = {multiple}"
        yield Problem(message, engine.spans("cp", "tp"), f"use {padded} tokens, or pack the sequences")


@rule("ALLOC-PACKED-LENGTH", source="Megatron-LM core/utils.py: packed sequences with CP")
def longest_fits(engine: Engine, batch: BatchSpec) -> Iterator[Problem]:
    """The longest sequence, padded for packing, must fit in one micro-batch."""
    if batch.max_tokens_per_mb is None or batch.max_length is None or batch.micro_batch is not None:
        return
    multiple, padded = _pad(engine, batch.max_length)
    if padded > batch.max_tokens_per_mb:
        message = f"a sequence of {batch.max_length} tokens is {padded} when padded to a multiple of {multiple}; "
        message += f"max_tokens_per_mb is {batch.max_tokens_per_mb}"
        remedy = Remedy((("max_tokens_per_mb", padded),), " or more")
        yield Problem(message, engine.spans("cp", "tp"), remedy=remedy)


@rule("ALLOC-SEQUENCE-POSITIONS", source="the model's config", megatron="max_position_embeddings")
def positions_suffice(batch: BatchSpec, model: ModelSpec) -> Iterator[Problem]:
    """A sequence must not exceed the model's positions."""
    if batch.max_length and model.max_positions and batch.max_length > model.max_positions:
        yield Problem(
            f"sequences of {batch.max_length} tokens exceed the {model.max_positions} positions of {model.name}"
        )
