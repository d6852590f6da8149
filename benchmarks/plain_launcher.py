"""SGLang's own scheduler and HTTP answers on a machine without GPUs: the engine's launcher without its changes.

SGLang does not start without CUDA kernels, so the stand-ins for them stay, and so does the token.
"""

from __future__ import annotations

import sys

from areal_like.rollout.sglang import launcher
from areal_like.rollout.sglang.patches import columns

if __name__ in ("__main__", "__mp_main__"):
    launcher.prepare_imports(cuda=False)
    if __name__ == "__main__":
        from sglang.srt.managers.scheduler import run_scheduler_process

        launcher.run_scheduler = lambda launch, *arguments: run_scheduler_process(*arguments)
        columns.send_columns = lambda: None
        launcher.serve(sys.argv[1:], cuda=False)
