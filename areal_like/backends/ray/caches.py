"""Caches of compiled kernels across runs: on GPUs, compilation takes half a minute of a run's first step."""

import os
from pathlib import Path

_FOLDERS = {
    "TORCHINDUCTOR_CACHE_DIR": "torchinductor",  # torch/_inductor/runtime/cache_dir_utils.py; below TMPDIR by default
    "TRITON_CACHE_DIR": "triton",  # triton/knobs.py
    "TORCH_EXTENSIONS_DIR": "torch_extensions",  # torch/utils/cpp_extension.py
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",  # flashinfer/jit/env.py
    "TVM_FFI_CACHE_DIR": "tvm_ffi",  # tvm_ffi/cpp/extension.py, of SGLang's own kernels
    "SGLANG_DG_CACHE_DIR": "deep_gemm",  # sglang/srt/environ.py
    "CUDA_CACHE_PATH": "cuda",  # for PTX compiled by the driver
}
_CUDA_CACHE_BYTES = 4 << 30  # the driver's own limit holds the kernels of one of these libraries


def keep_caches(directory: str | None) -> None:
    """Make this process and its children cache compiled kernels below `directory`; None changes nothing.

    Variables set by the user stay.
    """
    if directory is None:
        return
    root = Path(directory).expanduser()
    for name, folder in _FOLDERS.items():
        os.environ.setdefault(name, str(root / folder))
    os.environ.setdefault("CUDA_CACHE_MAXSIZE", str(_CUDA_CACHE_BYTES))
