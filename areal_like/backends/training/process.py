"""The process of a trainer rank: its device and process group, for any backend."""

import logging
import os
from datetime import timedelta

import torch
import torch.distributed as dist

from areal_like.core.trainer.engine import EngineSpec, Rendezvous
from areal_like.runtime.ports import stop_listening


def prepare_process(spec: EngineSpec) -> torch.device:
    """Set threads and determinism; return this process's device. Raises ValueError if the device is missing."""
    on_gpu, deterministic = spec.device == "cuda", spec.config.megatron.use_deterministic_algorithms
    if on_gpu != torch.cuda.is_available():
        raise ValueError(
            "the trainer is to run on cuda, but this process sees no GPU"
            if on_gpu
            else "the trainer is to run on the CPU; hide this host's GPUs from it (CUDA_VISIBLE_DEVICES='')"
        )
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", torch.get_num_threads())))
    torch.use_deterministic_algorithms(deterministic)
    if (logger := logging.getLogger("megatron")).level == logging.NOTSET:
        logger.setLevel(logging.ERROR)  # it warns about its own defaults at every start on every rank
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")


def join(rendezvous: Rendezvous, device: torch.device, *, from_host: bool = False) -> None:
    """Join the process group of all ranks: nccl between GPUs, with gloo for data sent `from_host`; gloo on CPU.

    Raises torch.distributed's errors, which name the rank, if a rank does not join in time.
    """
    descriptor = rendezvous.listener.detach() if rendezvous.listener else None
    timeout, on_gpu = timedelta(seconds=rendezvous.timeout_s), device.type == "cuda"
    store = dist.TCPStore(
        rendezvous.address,
        rendezvous.port,
        rendezvous.world_size,
        is_master=rendezvous.rank == 0,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=descriptor,
    )
    if on_gpu:
        torch.cuda.set_device(device)
    between_gpus = "cpu:gloo,cuda:nccl" if from_host else "nccl"
    dist.init_process_group(
        between_gpus if on_gpu else "gloo",
        store=store,
        rank=rendezvous.rank,
        world_size=rendezvous.world_size,
        timeout=timeout,
        device_id=device if on_gpu else None,
    )
    if descriptor is not None and not on_gpu:  # gloo has connected all ranks; NCCL may open further connections
        stop_listening(descriptor)
