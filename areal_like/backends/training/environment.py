"""Environment variables of a trainer rank, read by torch, Transformer Engine and NCCL at their start. No torch here."""

import os

from areal_like.backends.ray.lifetime import local_interface
from areal_like.core.trainer.engine import EngineSpec

DETERMINISTIC = {"NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0", "NCCL_ALGO": "Ring", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}


# Which of flash, fused and unfused attention each `attention_backend` lets Transformer Engine take.
_ATTENTION = {"flash": "100", "fused": "010", "unfused": "001", "local": "000", "auto": "111"}


def rank_environment(spec: EngineSpec) -> dict[str, str]:
    """Return variables for each rank of an engine, `env_vars` last.

    Sources: Megatron-LM `training/determinism.py`, `training/arguments.py` and (attention)
    `core/models/common/language_module/language_module.py`; Transformer Engine's NVTE_* variables; SGLang
    `srt/entrypoints/engine.py` (`_set_envs_and_config`).
    """
    if spec.device == "cpu":
        variables = {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1", "CUDA_VISIBLE_DEVICES": ""}
        return variables | spec.config.env_vars
    # SGLang sets this in its processes; where the two ends of a weight update differ, NCCL fails between them
    variables = {"NCCL_CUMEM_ENABLE": "0"}
    if spec.config.megatron.use_deterministic_algorithms:
        variables |= DETERMINISTIC
    if spec.backend == "megatron":
        variables |= _megatron(spec)
    return variables | spec.config.env_vars


def attention_environment(backend: str) -> dict[str, str]:
    """Return the variables of an `attention_backend`; Megatron-core raises where they are set to something else."""
    names = ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN")
    return dict(zip(names, _ATTENTION.get(backend, _ATTENTION["auto"]), strict=True))


def _megatron(spec: EngineSpec) -> dict[str, str]:
    megatron, sizes = spec.config.megatron, spec.sizes
    attention = str(megatron.override_transformer_config.get("attention_backend", "auto"))
    # Transformer Engine's small functions are scripted, not compiled, as ROLL has it
    variables = {"NVTE_TORCH_COMPILE": "0", **attention_environment(attention)}
    if sizes.tp * sizes.cp > 1:
        # one hardware queue keeps communication kernels ahead of the computation they overlap with (before Blackwell)
        variables["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    if spec.optimizer is not None and sizes.dp * sizes.cp > 1 and megatron.overlap_grad_reduce is not False:
        # multiprocessors that backward norms leave to the gradients' reduction beside them
        variables["NVTE_BWD_LAYERNORM_SM_MARGIN"] = "16"
    return variables


def apply_environment(spec: EngineSpec, master_address: str) -> None:
    """Set a rank's variables as far as the user has not, and keep gloo and NCCL on the interface to the master.

    Transformer Engine reads some of them when it is imported, and so does torch: the engine's module comes later.
    """
    interface = local_interface(master_address)
    os.environ.update(spec.config.env_vars)
    for name, value in {
        **rank_environment(spec),
        "GLOO_SOCKET_IFNAME": interface,
        "NCCL_SOCKET_IFNAME": interface,
    }.items():
        os.environ.setdefault(name, value)
