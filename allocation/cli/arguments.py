"""Types and parsers of the arguments and options of the command `allocation`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from allocation import BatchSpec, Cluster, Finding
from allocation.grid import DEFAULT_ORDER
from allocation.hardware import Gpu, find_gpu


class Recompute(StrEnum):
    """Activations that the backward pass recomputes."""

    none = "none"
    selective = "selective"
    experts = "experts"
    full = "full"


class Dtype(StrEnum):
    """Data types of weights."""

    bfloat16 = "bfloat16"
    float32 = "float32"


_ENDS = re.compile(r"(?<![.\w])num_layers_in_(first|last)_pipeline_stage=(\d+)")


def with_options(finding: Finding) -> Finding:
    """Return the finding with this command's options in place of Megatron's names."""
    return replace(finding, help=finding.help and _ENDS.sub(r"--\1-stage-layers \2", finding.help))


@contextmanager
def usage(kind: type[Exception], param_hint: str | None = None) -> Iterator[None]:
    """Turn an exception of one kind into typer's own error."""
    try:
        yield
    except kind as error:
        raise typer.BadParameter(str(error.args[0]), param_hint=param_hint) from error


def _cluster(text: str) -> Cluster:
    with usage(ValueError):
        return Cluster.parse(text)


def _batch(text: str) -> BatchSpec:
    prompts, x, samples = text.partition("x")
    if not (x and prompts.isdecimal() and samples.isdecimal() and len(text) < 40):
        raise typer.BadParameter(f"a batch is written PROMPTSxSAMPLES, for example 256x8, not {text!r}")
    if not (int(prompts) and int(samples)):
        raise typer.BadParameter(f"a batch has at least one prompt with one sample, not {text}")
    return BatchSpec(int(prompts), int(samples))


def _gpu(text: str) -> Gpu:
    with usage(ValueError):
        return find_gpu(text)


def _models(incomplete: str) -> Iterator[str]:
    from allocation.model_spec import known_models

    names = [spelling for name in known_models() for spelling in (name, name.rpartition("/")[2].lower())]
    return (name for name in names if name.startswith(incomplete))


Words = Annotated[
    list[str],
    typer.Argument(metavar="ALLOCATION", help="Allocation strings, or - for standard input.", show_default=False),
]
_MODEL = typer.Option("--model", "-m", help="A model's name, or a config.json.", autocompletion=_models)
_CLUSTER = typer.Option(
    "--cluster",
    "-c",
    parser=_cluster,
    metavar="NODESxGPUS",
    help="Nodes and GPUs per node: 4x8 is four nodes with eight GPUs each.",
)
Model = Annotated[str | None, _MODEL]
NeededModel = Annotated[str, _MODEL]
ClusterSize = Annotated[Cluster | None, _CLUSTER]
NeededClusterSize = Annotated[Cluster, _CLUSTER]
Batch = Annotated[
    BatchSpec | None,
    typer.Option(
        "--batch", "-b", parser=_batch, metavar="PROMPTSxSAMPLES", help="Batch of one step, for example 256x8."
    ),
]
GpuName = Annotated[
    Gpu | None,
    typer.Option(
        "--gpu", "-g", parser=_gpu, metavar="GPU", help="h200, h100, a100-80, …, or a memory size such as 24GiB."
    ),
]
FirstStage = Annotated[
    int | None,
    typer.Option(
        "--first-stage-layers", min=1, help="Layers on the first pipeline stage (default: as many as on the others)."
    ),
]
LastStage = Annotated[
    int | None,
    typer.Option(
        "--last-stage-layers", min=1, help="Layers on the last pipeline stage (default: as many as on the others)."
    ),
]
Order = Annotated[str | None, typer.Option("--order", help=f"Megatron's rank order (default: {DEFAULT_ORDER}).")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Picture = Annotated[Path | None, typer.Option("--svg", help="Write an SVG picture to this file.")]
MaxLength = Annotated[
    int | None, typer.Option("--length", min=1, help="Maximum length of prompt and response, in tokens.")
]
Tokens = Annotated[int, typer.Option("--tokens", min=1, help="Tokens per micro-batch (max_tokens_per_mb).")]
RecomputeKind = Annotated[Recompute, typer.Option("--recompute", help="Activations to recompute in the backward pass.")]
WeightDtype = Annotated[Dtype, typer.Option("--dtype", help="Data type of the weights.")]
Sharded = Annotated[bool, typer.Option("--distributed-optimizer/--no-distributed-optimizer")]
ServerShare = Annotated[
    float,
    typer.Option("--mem-fraction-static", min=0.01, max=0.99, help="Share of a GPU for SGLang's weights and KV cache."),
]
OptimizerOffload = Annotated[
    bool, typer.Option("--optimizer-offload", help="Keep optimizer state in host memory beside the optimizer's step.")
]
Offload = Annotated[
    bool, typer.Option("--offload", help="Time-share colocated engines: the waiting engine is in host memory.")
]
