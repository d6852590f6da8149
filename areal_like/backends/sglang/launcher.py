"""One SGLang server: ``python -m areal_like.backends.sglang.launcher <arguments of sglang.launch_server>``.

Does what ``python -m sglang.launch_server`` does, with a version for each token (`versions.py`), the API key from the
environment and a rendezvous that opens no port. Where there is no CUDA, SGLang's CPU path is made to start, and to
start quickly:
- SGLang imports names from ``sgl_kernel`` (CUDA kernels) but calls none on this path: a module that refuses each call
  stands in;
- attention takes hundreds of short sequences at once (`cpu_attention.py`);
- nothing is compiled, and every process has one thread: more of them slow small models down;
- the children are forked. SGLang asks for ``spawn`` for CUDA's sake; each child would then import everything once more.

Everywhere, of the two hundred modules of models that SGLang imports at its start only the one in use is.

SGLang leaves files in ``TMPDIR``: whoever starts a server gives it a directory and removes that.
"""

import importlib.machinery
import multiprocessing
import os
import re
import sys
import tempfile
import types
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Never

from areal_like.backends.sglang import (
    KEEP_ALIVE_S,
    TOKEN_VARIABLE,
    adapters,
    classifier,
    columns,
    downloads,
    giving_up,
    image_masks,
    images,
    scoring,
)
from areal_like.backends.sglang.config_names import restore_config_names, run_with_config_names
from areal_like.backends.sglang.corrections import run_corrected
from areal_like.backends.sglang.versions import run_scheduler
from areal_like.core.gc_tuning import pause_gc


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


def close_to_strangers() -> None:
    """Require the token on every path except /health, which then generates nothing.

    SGLang asks for none at all paths that begin with /health or /metrics, nor at its WebSocket.
    """
    from sglang.srt.entrypoints.http_server import app
    from sglang.srt.utils import auth
    from starlette.routing import WebSocketRoute

    os.environ["SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION"] = "0"
    app.router.routes[:] = [route for route in app.router.routes if not isinstance(route, WebSocketRoute)]
    decide = auth.decide_request_auth

    def decide_by_whole_path(*, path: str, **request: Any) -> auth.AuthDecision:
        return decide(path=path if path == "/health" else "", **request)

    auth.decide_request_auth = decide_by_whole_path


def leave_out_other_models(architectures: Sequence[str]) -> None:
    """Import only these models of SGLang; all of them if it lacks one of these names.

    `sglang/srt/models/registry.py` imports every module that the variable does not name. A user's own value stays.
    """
    from sglang.srt import models

    modules = {path.stem: path.read_bytes() for path in Path(models.__path__[0]).glob("*.py")}
    defined = re.compile(rf"^class ({'|'.join(map(re.escape, architectures))})\b".encode(), re.MULTILINE)
    needed = {name for name, code in modules.items() if defined.search(code)}
    if needed:
        os.environ.setdefault("SGLANG_DISABLED_MODEL_ARCHS", ",".join(modules.keys() - needed))


def end_at_once() -> None:
    """End a server as soon as one of its processes ends; a user's own values stay.

    SGLang would examine living processes, for 5 s and on GPUs for 60 s more: longer than an update waits to hear that
    this is why it failed.
    """
    for variable in ("SGLANG_PYSPY_DUMP_BEFORE_CRASH", "SGLANG_CUDA_COREDUMP_BEFORE_CRASH"):
        os.environ.setdefault(variable, "0")


def prepare_cpu(_: Any) -> None:
    """Register the attention on a CPU of a model with this configuration; forked schedulers look it up."""
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    from areal_like.backends.sglang.cpu_attention import ATTENTION, BatchedTorchNativeBackend

    register_attention_backend(ATTENTION)(BatchedTorchNativeBackend)


def serve(arguments: list[str], cuda: bool) -> None:
    """Serve until the process is ended; SGLang checks the arguments itself."""
    with pause_gc():  # nor by SGLang after each weight update, which would take it 0.2 s
        from sglang.srt.entrypoints.http_server import app, launch_server
        from sglang.srt.server_args import prepare_server_args
        from sglang.srt.utils import kill_process_tree

    os.environ["SGLANG_TIMEOUT_KEEP_ALIVE"] = str(KEEP_ALIVE_S)
    end_at_once()
    restore_config_names()
    arguments, temperature = scoring.split_temperature(arguments)
    arguments = adapters.split_adapter(arguments, cuda)
    if token := os.environ.pop(TOKEN_VARIABLE, None):
        arguments = [*arguments, "--api-key", token]
        close_to_strangers()
    columns.send_columns()
    giving_up.add_route(app)
    downloads.add_route(app)
    server = prepare_server_args(image_masks.adapt_arguments(arguments) if cuda else arguments)
    architectures = server.get_model_config().hf_config.architectures
    images.keep_sent_tokens(server.get_model_config().hf_config.model_type)
    leave_out_other_models(architectures)
    if server.nnodes == 1 and (server.dp_size == 1 or server.enable_dp_attention):
        # One process group on one host: its ranks can meet at a file. torch's TCPStore would listen on every interface.
        os.environ["SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"] = f"file://{tempfile.mkdtemp()}/rendezvous"
    if not cuda:
        prepare_cpu(server.get_model_config().hf_config)
        # every rank may use every core: a trainer's ranks run here too
        cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
        os.environ.setdefault("SGLANG_CPU_OMP_THREADS_BIND", "|".join([cores] * server.tp_size))
        multiprocessing.set_start_method("fork")
        multiprocessing.set_start_method = lambda method, force=False: None  # SGLang would force spawn
    try:
        run = classifier.run_scheduler if server.is_embedding else run_scheduler
        if temperature is not None:
            run = partial(scoring.run_scheduler, temperature)
        run = partial(run_corrected, architectures, run)
        launch_server(server, run_scheduler_process_func=partial(run_with_config_names, run))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


if __name__ in ("__main__", "__mp_main__"):
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with pause_gc():
        import torch

    prepare_imports(torch.cuda.is_available())
    if __name__ == "__main__":
        serve(sys.argv[1:], torch.cuda.is_available())
