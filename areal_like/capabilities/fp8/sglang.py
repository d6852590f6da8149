"""The start of servers in FP8: SGLang 0.5.17 compiles DeepGEMM's kernels before a server answers."""

import os

from areal_like.backends.sglang.patch import Launch, Patch

_FAST = "SGLANG_JIT_DEEPGEMM_FAST_WARMUP"


def warm_up_fast(launch: Launch) -> None:
    """Compile for some numbers of tokens instead of all 16,384 of each shape; the user's own value stays.

    A server of Qwen3-8B's shape took more than two minutes for all, with 16 cores. Kernels of other numbers are
    compiled when they are needed, and kept in `~/.cache/deep_gemm`.
    """
    if launch.cuda:
        os.environ.setdefault(_FAST, "1")


PATCH = Patch(serve=warm_up_fast)
