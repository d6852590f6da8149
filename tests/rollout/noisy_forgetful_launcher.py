"""A server's launcher whose routers choose by noise, and whose memory comes back full of garbage."""

from __future__ import annotations

import sys

from forgetful_launcher import forgetful_saver
from noisy_launcher import choose_noisily

from areal_like.backends.sglang.launcher import prepare_imports, serve

if __name__ in ("__main__", "__mp_main__"):
    prepare_imports(cuda=False)
    if __name__ == "__main__":
        from sglang.srt.layers.moe import topk
        from sglang.srt.utils.torch_memory_saver_adapter import TorchMemorySaverAdapter

        topk.fused_topk = topk.fused_topk_native = topk.fused_topk_torch_native = choose_noisily
        TorchMemorySaverAdapter.create = staticmethod(lambda enable: forgetful_saver())
        serve(sys.argv[1:], cuda=False)
