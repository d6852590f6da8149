"""`areal-like dequantize`: a checkpoint of FP8 or MXFP4 weights in bfloat16, one tensor at a time on the CPU.

FP8 weights have a scale for each block (`weight_scale_inv`, as DeepSeek and MiniMax publish them). MXFP4 weights are
gpt-oss's experts, which transformers unpacks.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from areal_like.core.config.findings import ConfigError
from areal_like.core.errors import CheckpointError
from areal_like.interop.convert_checkpoint import appearing, check_target
from areal_like.preflight.model import DEQUANTIZED
from areal_like.preflight.weights import weight_files

if TYPE_CHECKING:
    from torch import Tensor

_CONFIG = "quantization_config"
_FP8_SCALE, _BLOCKS, _SCALES = "_scale_inv", "_blocks", "_scales"
_OF_INPUTS = (".activation_scale", ".input_scale")
_LAYER = re.compile(r"\.layers\.(\d+)\.")


def dequantize(source: Path, target: Path) -> str:
    """Write the checkpoint `source` in bfloat16 to `target`, which appears when it is complete.

    Layers for multi-token prediction are left out, as a run leaves them out. Returns a summary in words. Raises
    CheckpointError, and leaves nothing behind then.
    """
    check_target(target)
    config = _read_config(source)
    how = _quantization(source, config)
    try:
        files = weight_files(source, "SOURCE")
    except ConfigError as error:
        raise CheckpointError("\n".join(found.message for found in error.findings)) from error

    from areal_like.backends.training.hf_checkpoint import fill_checkpoint

    with appearing(target) as partial:
        if partial is None:
            raise ValueError("a target is needed")
        done = _QuantizedTensors(files, config, how)
        fill_checkpoint(partial, done.weights(), source, "bfloat16")
        _drop_quantization(partial / "config.json")
    return f"{done.dequantized} {how['quant_method']} weights in bfloat16, {done.kept} tensors as they were"


class _QuantizedTensors:
    """The tensors of a quantized checkpoint, and how many were dequantized and kept so far."""

    def __init__(self, files: list[Path], config: Mapping[str, Any], how: Mapping[str, Any]) -> None:
        self._files, self._block = files, how.get("weight_block_size")
        self._layers = (config.get("text_config") or config).get("num_hidden_layers", 0)
        self.dequantized = self.kept = 0

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield each tensor under its name in an unquantized checkpoint."""
        from safetensors import safe_open

        with ExitStack() as stack:
            opened = [stack.enter_context(safe_open(file, "pt")) for file in self._files]
            places = {name: file for file in opened for name in file.keys()}  # noqa: SIM118
            for name in filter(self._is_kept, places):
                yield self._one(name, places)

    def _is_kept(self, name: str) -> bool:
        layer = _LAYER.search(name)
        return not name.endswith((_FP8_SCALE, _SCALES, *_OF_INPUTS)) and (layer is None or int(layer[1]) < self._layers)

    def _one(self, name: str, places: Mapping[str, Any]) -> tuple[str, Tensor]:
        import torch

        def read(name: str) -> Tensor:
            tensor: Tensor = places[name].get_tensor(name)
            return tensor

        tensor, packed = read(name), name.removesuffix(_BLOCKS)
        if name + _FP8_SCALE in places:
            self.dequantized += 1
            return name, _scale_blocks(name, tensor, read(name + _FP8_SCALE), self._block)
        if name.endswith(_BLOCKS) and packed + _SCALES in places:
            from transformers.integrations.mxfp4 import convert_moe_packed_tensors

            self.dequantized += 1
            return packed, convert_moe_packed_tensors(tensor, read(packed + _SCALES), dtype=torch.bfloat16)
        if tensor.dtype not in (torch.bfloat16, torch.float16, torch.float32):
            raise CheckpointError(f"{name} is {tensor.dtype} and has no scale ({_FP8_SCALE} or {_SCALES})")
        self.kept += 1
        return name, tensor


def _scale_blocks(name: str, weight: Tensor, scale: Tensor, block: list[int] | None) -> Tensor:
    """Return a weight `[rows, columns]` in bfloat16, each block of it times its scale."""
    import torch

    whole = weight.float()
    scale = scale.float()
    if scale.numel() > 1:
        rows, columns = block or (0, 0)
        covered = (
            scale.dim() == 2 and scale.shape[0] * rows >= whole.shape[0] and scale.shape[1] * columns >= whole.shape[1]
        )
        if not covered:
            raise CheckpointError(
                f"{name} is {tuple(weight.shape)} and its scales {tuple(scale.shape)}, which do not fit blocks of {block} "
                "(weight_block_size)"
            )
        scale = scale.repeat_interleave(rows, 0)[: whole.shape[0]].repeat_interleave(columns, 1)[:, : whole.shape[1]]
    return (whole * scale).to(torch.bfloat16)


def _read_config(source: Path) -> dict[str, Any]:
    try:
        config = json.loads((source / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{source / 'config.json'} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{source / 'config.json'} is not a JSON object")
    return config


def _quantization(source: Path, config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the quantization that a config names; raise CheckpointError for one that cannot be undone."""
    how = config.get(_CONFIG) or (config.get("text_config") or {}).get(_CONFIG)
    if not how:
        raise CheckpointError(f"{source} is not quantized: its config.json has no {_CONFIG}")
    method = how.get("quant_method") if isinstance(how, Mapping) else how
    if method not in DEQUANTIZED:
        raise CheckpointError(
            f"{source} is quantized by {method!r} (quant_method); only {' and '.join(DEQUANTIZED)} can be dequantized. Use an "
            "unquantized checkpoint of the model"
        )
    return how


def _drop_quantization(file: Path) -> None:
    config = json.loads(file.read_text())
    for part in (config, config.get("text_config") or {}):
        part.pop(_CONFIG, None)
    file.write_text(json.dumps(config, indent=2) + "\n")
