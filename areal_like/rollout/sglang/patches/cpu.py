"""A start without CUDA: attention that takes hundreds of short sequences at once, one thread, and forked children.

SGLang 0.5.17 asks for ``spawn`` for CUDA's sake, with which each child would import everything once more.
"""

import multiprocessing
import os
from typing import Any

from areal_like.rollout.sglang.patch import Launch, Patch


def prepare_cpu(_: Any) -> None:
    """Register the attention on a CPU of a model with this configuration; forked schedulers look it up."""
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    from areal_like.rollout.sglang.patches.inside.cpu_attention import ATTENTION, BatchedTorchNativeBackend

    register_attention_backend(ATTENTION)(BatchedTorchNativeBackend)


def serve_on_cpu(launch: Launch) -> None:
    """Prepare a server on a machine without CUDA."""
    if launch.cuda:
        return
    prepare_cpu(launch.model)
    # every rank may use every core: a trainer's ranks run here too
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    os.environ.setdefault("SGLANG_CPU_OMP_THREADS_BIND", "|".join([cores] * launch.server.tp_size))
    multiprocessing.set_start_method("fork")
    multiprocessing.set_start_method = lambda method, force=False: None  # SGLang would force spawn


PATCH = Patch(serve=serve_on_cpu)
