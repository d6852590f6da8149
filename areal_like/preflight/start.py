"""The Megatron checkpoint that a role starts from (`megatron.dist_checkpointing_path`), without loading a weight."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path

from allocation.diagnostics import Finding
from allocation.model_spec import ModelError, ModelSpec, load_model
from areal_like.checkpoint.distributed import DESCRIPTIONS, Stored, read_weights
from areal_like.config.findings import finding
from areal_like.errors import CheckpointError
from areal_like.preflight.view import RoleView

_EMBEDDING, _LAYERS = "embedding.word_embeddings.weight", "decoder.layers."
_HELP = "make one of the model: areal-like convert-checkpoint MODEL DIRECTORY"


def check_start(view: RoleView, model: ModelSpec) -> Iterator[Finding]:
    """Check that the directory is a whole Megatron checkpoint of the role's model."""
    megatron = view.engine.megatron
    key, switch = view.key("megatron.dist_checkpointing_path"), view.key("megatron.use_dist_checkpointing")
    if not megatron.use_dist_checkpointing or view.backend == "fsdp":
        return
    if megatron.dist_checkpointing_path is None:
        message = "use_dist_checkpointing=true needs the directory of a Megatron checkpoint, and none is set"
        yield finding("RUN-START", key, message, f"name its directory, or write {switch}=false")
        return
    path = Path(megatron.dist_checkpointing_path)
    try:
        tensors = read_weights(path).tensors
    except CheckpointError as error:
        yield finding("RUN-START", key, str(error), _HELP)
        return
    for difference in [*_of_config(path, model), *_of_tensors(tensors, model)][:1]:
        yield finding("RUN-START", key, f"{path} belongs to another model: {difference}", _HELP)


def _of_config(path: Path, model: ModelSpec) -> Iterator[str]:
    """Return how the model differs from the one of a converted checkpoint's config."""
    try:
        own = load_model(path / DESCRIPTIONS / "config.json")
    except ModelError:  # another system's, which has no config in it
        return
    for name, value in asdict(replace(own, name=model.name)).items():
        if name not in ("max_positions", "mtp_layers") and value != getattr(model, name):
            yield f"its {name} is {value}, the model's is {getattr(model, name)}"


def _of_tensors(tensors: Mapping[str, Stored], model: ModelSpec) -> Iterator[str]:
    """Yield sizes that are not the model's; layers are one tensor, or numbered tensors if they are not all alike."""
    if _EMBEDDING not in tensors:
        yield f"it has no {_EMBEDDING}"
        return
    rows, width = tensors[_EMBEDDING].shape
    if width != model.hidden_size or rows < model.vocab_size:
        yield f"its embedding is {rows} x {width}, the model's {model.vocab_size} x {model.hidden_size}"
    inner = {name.removeprefix(_LAYERS): tensor for name, tensor in tensors.items() if name.startswith(_LAYERS)}
    numbered = {name.partition(".")[0] for name in inner if name.partition(".")[0].isdigit()}
    layers = len(numbered) or max((tensor.shape[0] for tensor in inner.values()), default=0)
    if layers != model.layers:
        yield f"it has {layers} layers, the model {model.layers}"
