"""Converts a checkpoint of the FSDP trainer to Hugging Face form, in one process on the CPU."""

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed import checkpoint
from transformers import AutoConfig

from areal_like.backends.fsdp.checkpoint_names import empty_model, head_name, in_checkpoint
from areal_like.backends.megatron.distributed import check_description
from areal_like.backends.training.hf_checkpoint import fill_checkpoint
from areal_like.backends.training.value_head import HEAD_NAME
from areal_like.core.errors import CheckpointError

_MODEL = "model."  # begins the name of each of the model's tensors in a checkpoint


def to_hugging_face(path: Path, config_path: Path, tokenizer: Path, dtype: str, target: Path | None) -> str:
    """Convert the checkpoint of `FSDPEngine.save` at `path` to Hugging Face form in the empty directory `target`, if
    any.

    `dtype` belongs to the new weights. Returns a summary. Raises CheckpointError.
    """
    check_description(path)
    found = checkpoint.FileSystemReader(path).read_metadata().state_dict_metadata
    model = empty_model(AutoConfig.from_pretrained(config_path))
    buffers, tied = (
        dict(model.named_buffers()),
        model.config.tie_word_embeddings,
    )  # by the family, if not by config.json
    sizes = {
        name.removeprefix(_MODEL): entry.size
        for name, entry in found.items()
        if name.startswith(_MODEL) and isinstance(entry, checkpoint.TensorStorageMetadata)
    }
    head, embedding = head_name(model), model.get_input_embeddings()
    values = head in sizes and sizes[head][0] == 1
    if tied and not values:
        sizes.pop(head, None)
    if not sizes.keys() & {f"{name}.weight" for name, module in model.named_modules() if module is embedding}:
        raise CheckpointError(f"{path} does not have the weights of a whole language model")

    def weights() -> Iterator[tuple[str, Tensor]]:
        for name, size in sizes.items():
            state = {_MODEL + name: torch.empty(size)}
            checkpoint.load(state, checkpoint_id=path, no_dist=True)
            if values and name == head:  # a critic's
                yield HEAD_NAME, state[_MODEL + name]
                continue
            weight = state[_MODEL + name]
            weight = weight if name in buffers else weight.to(getattr(torch, dtype))
            yield from in_checkpoint(model, name, weight).items()

    if target is not None:
        fill_checkpoint(target, weights(), config_path, dtype, tokenizer=tokenizer)
    return f"{len(sizes)} tensors of the FSDP trainer"
