"""A server's launcher for a machine without GPUs: memory that the server gives back comes back full of garbage."""

from __future__ import annotations

import gc
import sys
from typing import Any

from areal_like.backends.sglang.launcher import prepare_imports, serve


def forgetful_saver() -> Any:
    """Does to the contents of memory what torch_memory_saver does on a GPU."""
    from sglang.srt.utils.torch_memory_saver_adapter import _TorchMemorySaverAdapterNoop

    class Forgetful(_TorchMemorySaverAdapterNoop):
        def pause(self, tag: str) -> None:
            from sglang.srt.managers.scheduler import Scheduler

            (scheduler,) = [it for it in gc.get_objects() if isinstance(it, Scheduler)]
            if tag == "weights":
                model = scheduler.tp_worker.model_runner.model
                for tensor in (*model.parameters(), *model.buffers()):
                    tensor.data.fill_(float("nan") if tensor.is_floating_point() else 0)
                return
            cache = scheduler.token_to_kv_pool_allocator.get_kvcache()
            for buffer in (*cache.k_buffer, *cache.v_buffer):
                buffer.fill_(float("nan"))
                buffer[0] = 0  # what padding reads
            scheduler.req_to_token_pool.req_to_token.fill_(1)

    return Forgetful()


if __name__ in ("__main__", "__mp_main__"):
    prepare_imports(cuda=False)
    if __name__ == "__main__":
        from sglang.srt.utils.torch_memory_saver_adapter import TorchMemorySaverAdapter

        TorchMemorySaverAdapter.create = staticmethod(lambda enable: forgetful_saver())
        serve(sys.argv[1:], cuda=False)
