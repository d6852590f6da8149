"""Environment variables of a trainer rank, read by torch, Transformer Engine and NCCL at their start. No torch here."""

import os

from areal_like.cluster.lifetime import local_interface


def rank_environment(*, device: str, deterministic: bool = False, model_parallel: bool = False) -> dict[str, str]:
    """Variables for one rank; `model_parallel` is whether tensor or context parallelism is used.

    Sources: Megatron-LM `training/determinism.py` and `training/arguments.py`; Transformer Engine's NVTE_* variables;
    SGLang `srt/entrypoints/engine.py` (`_set_envs_and_config`).
    """
    if device == "cpu":
        return {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1", "CUDA_VISIBLE_DEVICES": ""}
    # SGLang sets this in its processes; where the two ends of a weight update differ, NCCL fails between them
    variables = {"NCCL_CUMEM_ENABLE": "0"}
    if model_parallel:
        # one hardware queue keeps communication kernels ahead of the computation they overlap with (before Blackwell)
        variables["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    if deterministic:
        variables |= {
            "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
            "NCCL_ALGO": "Ring",
            "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        }
    return variables


def apply_environment(variables: dict[str, str], master_address: str) -> None:
    """Sets variables that the user has not set, and keeps gloo and NCCL on the interface that reaches the master."""
    interface = local_interface(master_address)
    for name, value in {**variables, "GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}.items():
        os.environ.setdefault(name, value)
