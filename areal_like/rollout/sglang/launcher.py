"""One SGLang server: ``python -m areal_like.rollout.sglang.launcher <arguments of sglang.launch_server>``.

Does what ``python -m sglang.launch_server`` does, with all patches (`patch.py`), the API key from the environment and a
rendezvous that opens no port. Where there is no CUDA, SGLang's CPU path is made to start, and to start quickly:
SGLang imports names from ``sgl_kernel`` (CUDA kernels) but calls none on this path: a module that refuses each call
stands in, and nothing is compiled, and every process has one thread: more of them slow small models down.

SGLang leaves files in ``TMPDIR``: whoever starts a server gives it a directory and removes that.
"""

import importlib.machinery
import os
import sys
import tempfile
import types
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Never

from areal_like.rollout.http import KEEP_ALIVE_S
from areal_like.rollout.sglang.patch import Launch, all_patches, split_flags
from areal_like.runtime.gc_tuning import pause_gc


def prepare_imports(cuda: bool) -> None:
    """Make ``import sglang`` light, and possible without CUDA. Every spawned child needs it too."""
    sys.modules["megatron"] = None  # type: ignore[assignment]  # SGLang's debug dumper imports all of megatron-core if it can
    if not cuda:
        kernels = types.ModuleType("sgl_kernel")
        kernels.__spec__ = importlib.machinery.ModuleSpec("sgl_kernel", None)
        kernels.__getattr__ = _refusal  # type: ignore[method-assign]
        sys.modules["sgl_kernel"] = kernels
        # NCCL "none": SGLang takes its library, which torch brings along, as a sign of CUDA
        os.environ |= {"SGLANG_USE_CPU_ENGINE": "1", "TORCHDYNAMO_DISABLE": "1", "SGLANG_NCCL_SO_PATH": "none"}


def _refusal(name: str) -> Callable[..., Never]:
    if name.startswith("__"):
        raise AttributeError(name)

    def refuse(*_: object, **__: object) -> Never:
        raise NotImplementedError(f"SGLang called the CUDA kernel sgl_kernel.{name}, but CUDA is not available")

    return refuse


def end_at_once() -> None:
    """End a server as soon as one of its processes ends; a user's own values stay.

    SGLang would examine living processes, for 5 s and on GPUs for 60 s more: longer than an update waits to hear that
    this is why it failed.
    """
    for variable in ("SGLANG_PYSPY_DUMP_BEFORE_CRASH", "SGLANG_CUDA_COREDUMP_BEFORE_CRASH"):
        os.environ.setdefault(variable, "0")


def serve(arguments: list[str], cuda: bool) -> None:
    """Serve until the process is ended; SGLang checks the arguments itself."""
    with pause_gc():  # nor by SGLang after each weight update, which would take it 0.2 s
        from sglang.srt.entrypoints.http_server import launch_server
        from sglang.srt.server_args import prepare_server_args
        from sglang.srt.utils import kill_process_tree

    os.environ["SGLANG_TIMEOUT_KEEP_ALIVE"] = str(KEEP_ALIVE_S)
    end_at_once()
    launch = split_flags(arguments, cuda)
    for patch in all_patches():
        launch = replace(launch, arguments=[*launch.arguments, *patch.prepare(launch)])
    server = prepare_server_args(launch.arguments)
    launch = replace(launch, server=server, model=server.get_model_config().hf_config)
    if server.nnodes == 1 and (server.dp_size == 1 or server.enable_dp_attention):
        # One process group on one host: its ranks can meet at a file. torch's TCPStore would listen on every interface.
        os.environ["SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"] = f"file://{tempfile.mkdtemp()}/rendezvous"
    for patch in all_patches():
        patch.serve(launch)
    try:
        launch_server(server, run_scheduler_process_func=partial(run_scheduler, launch))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


def run_scheduler(launch: Launch, *arguments: Any) -> None:
    """Run SGLang's scheduler process with all patches: a spawned one has none that the launcher's process has."""
    from sglang.srt.managers import scheduler

    for patch in all_patches():
        patch.schedule(launch)
    scheduler.run_scheduler_process(*arguments)


if __name__ in ("__main__", "__mp_main__"):
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with pause_gc():
        import torch

    prepare_imports(torch.cuda.is_available())
    if __name__ == "__main__":
        serve(sys.argv[1:], torch.cuda.is_available())
