"""megatron-core on a machine without CUDA. With CUDA, nothing here runs.

Megatron-core uses CUDA in three ways, each with the narrowest replacement:
- functions of `torch.cuda` that could only raise here answer for the CPU (`_CUDA_FUNCTIONS`);
- tensors are created on, moved to or asked about "cuda": inside `cpu_as_cuda()`, a mode that sees only torch calls
  made by this thread while the engine is at work, they mean the CPU;
- Transformer Engine's modules, its Adam and a few functions that need it or NCCL are replaced (`_replacements`).

Checked against megatron-core 0.19.2. Another version, or a replaced name that no longer exists, is an error.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode

MEGATRON_VERSION = "0.19.2"
_CPU = torch.device("cpu")
_installed = False


class UnsupportedMegatronError(RuntimeError):
    """The installed megatron-core is not the version that CPU support needs."""


def install() -> bool:
    """Prepare this process for megatron-core on the CPU; with CUDA, do nothing and return False.

    Call it before megatron.core is imported. Raises UnsupportedMegatronError for another megatron-core.
    """
    global _installed
    if torch.cuda.is_available():
        return False
    if _installed:
        return True
    # jit_fuser is torch.compile: 28 s for the first step of a tiny model, and 0.8 s to import the compiler
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)  # warns that there is no CUDA
    for name, answer in _CUDA_FUNCTIONS.items():
        setattr(torch.cuda, name, answer)
    from megatron.core import package_info

    if package_info.__shortversion__ != MEGATRON_VERSION:
        raise UnsupportedMegatronError(
            f"training on the CPU needs megatron-core {MEGATRON_VERSION}, but {package_info.__shortversion__} is installed"
        )
    with cpu_as_cuda():
        for path, value in _replacements().items():
            _replace(path, value)
    _installed = True
    return True


@contextlib.contextmanager
def cpu_as_cuda() -> Iterator[None]:
    """Make "cuda" mean the CPU to torch calls of this thread in the body; do nothing where CUDA is present."""
    if torch.cuda.is_available():
        yield
    else:
        with _CpuAsCuda():
            yield


class _CpuAsCuda(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is Tensor.cuda:
            return args[0]
        if func is Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.", 1)  # the optimizers sort parameters by this string
        if kwargs:
            if str(kwargs.get("device")).startswith("cuda"):
                kwargs = {**kwargs, "device": _CPU}
            if kwargs.get("pin_memory"):
                kwargs = {**kwargs, "pin_memory": False}
        return func(*args, **kwargs)


class _Stream:
    """A CUDA stream or event; on the CPU, all work is already complete."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Stream)

    def __hash__(self) -> int:
        return 0

    def synchronize(self, *_: Any) -> None: ...

    wait_stream = wait_event = wait = record = synchronize

    def record_event(self, event: _Stream | None = None) -> _Stream:
        return event or self


_CUDA_FUNCTIONS: dict[str, Any] = {
    "current_device": lambda: _CPU,
    "set_device": lambda device: None,
    "synchronize": lambda device=None: None,
    "empty_cache": lambda: None,
    "current_stream": lambda device=None: _Stream(),
    "default_stream": lambda device=None: _Stream(),
    "stream": lambda stream: contextlib.nullcontext(),
    "manual_seed": torch.manual_seed,
    "get_rng_state": lambda device=None: torch.get_rng_state(),
    "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
    "Stream": _Stream,
    "Event": _Stream,
}


def _replacements() -> dict[str, Any]:
    """Return the replacements in megatron.core by path."""
    from megatron.core.tensor_parallel import mappings, random

    from areal_like.backends.megatron.cpu import layers as layers
    from areal_like.backends.megatron.cpu.adam import FusedAdam

    class CpuRNGStatesTracker(random.CudaRNGStatesTracker):
        """Forks the CPU's generator; the original restores it and warns that it moved."""

        @contextlib.contextmanager
        def fork(self, name: str = random._MODEL_PARALLEL_RNG_TRACKER_NAME) -> Iterator[None]:
            outside = torch.get_rng_state()
            torch.set_rng_state(self.states_[name])
            try:
                yield
            finally:
                self.states_[name] = torch.get_rng_state()
                torch.set_rng_state(outside)

    return {
        "tensor_parallel.random._get_cuda_rng_state": lambda *args, **kwargs: torch.get_rng_state(),
        "tensor_parallel.random._set_cuda_rng_state": lambda state, *args, **kwargs: torch.set_rng_state(state),
        "tensor_parallel.random.CudaRNGStatesTracker": CpuRNGStatesTracker,
        "tensor_parallel.mappings._gather_along_first_dim": _uneven_gather(mappings._gather_along_first_dim),
        "tensor_parallel.mappings._reduce_scatter_along_first_dim": _uneven_reduce_scatter(
            mappings._reduce_scatter_along_first_dim
        ),
        "transformer.moe.token_dispatcher.maybe_move_tensor_to_cpu": _as_numpy_if_asked,
        "models.common.embeddings.rope_utils._apply_rotary_pos_emb_thd": layers.rotary_embedding_of_pack,
        "models.gpt.gpt_layer_specs.TESpecProvider": layers.TESpecProvider,
        "extensions.transformer_engine_spec_provider.TESpecProvider": layers.TESpecProvider,
        "models.gpt.gpt_layer_specs.TENorm": layers.TENorm,
        "transformer.multi_latent_attention.TELinear": layers.TELinear,
        "transformer.transformer_block.LayerNormImpl": layers.TENorm,
        "optimizer.Adam": FusedAdam,
        "optimizer.USING_PYTORCH_OPTIMIZER": False,
        "optimizer.distrib_optimizer.Adam": FusedAdam,
        "optimizer.distrib_optimizer.HAVE_APEX_OR_TE": True,
        "optimizer.distrib_optimizer.USING_TE_OPTIMIZER": True,
    }


def _replace(path: str, value: Any) -> None:
    module_name, _, name = path.rpartition(".")
    module = importlib.import_module(f"megatron.core.{module_name}")
    if not hasattr(module, name):
        raise UnsupportedMegatronError(f"megatron.core.{path} does not exist in megatron-core {MEGATRON_VERSION}")
    setattr(module, name, value)


def _uneven_gather(even: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Gather parts of unequal length, which gloo does not support and MoE with expert tensor parallelism needs."""

    def gather(input_, group, output_split_sizes=None, use_global_buffer=False):
        if output_split_sizes is None or group.size() == 1:
            return even(input_, group, output_split_sizes, use_global_buffer)
        output = input_.new_empty([sum(output_split_sizes), *input_.shape[1:]])
        copies = torch.cat([input_] * group.size())
        dist.all_to_all_single(output, copies, list(output_split_sizes), [len(input_)] * group.size(), group=group)
        return output

    return gather


def _uneven_reduce_scatter(even: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Reduce and scatter parts of unequal length, which gloo does not support."""

    def reduce_scatter(input_, group, input_split_sizes=None, use_global_buffer=False):
        if input_split_sizes is None or group.size() == 1:
            return even(input_, group, input_split_sizes, use_global_buffer)
        n, mine = group.size(), input_split_sizes[group.rank()]
        output = input_.new_empty([n * mine, *input_.shape[1:]])
        dist.all_to_all_single(output, input_.contiguous(), [mine] * n, list(input_split_sizes), group=group)
        return output.view(n, mine, *input_.shape[1:]).sum(0)

    return reduce_scatter


def _as_numpy_if_asked(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Return a numpy array if the token dispatcher needs numpy splits; the original returns a CPU tensor unchanged."""
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor
