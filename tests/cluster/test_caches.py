"""What was compiled is kept where the configuration says, and where the user has said so before."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from areal_like.backends.ray.workers import keep_caches


def test_caches_lie_below_the_directory_and_a_user_s_own_variables_count_more(monkeypatch: pytest.MonkeyPatch):
    environment = {"HOME": "/home/user", "TRITON_CACHE_DIR": "/own"}
    monkeypatch.setattr(os, "environ", environment)
    keep_caches(None)
    assert environment == {"HOME": "/home/user", "TRITON_CACHE_DIR": "/own"}
    keep_caches("~/caches")
    assert environment["TRITON_CACHE_DIR"] == "/own"
    assert environment["TORCHINDUCTOR_CACHE_DIR"] == "/home/user/caches/torchinductor"


def test_torch_and_triton_read_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(os, "environ", {"HOME": str(tmp_path)})
    keep_caches(str(tmp_path))
    from torch._inductor.runtime.cache_dir_utils import cache_dir, triton_cache_dir  # may set what is not set

    assert cache_dir() == str(tmp_path / "torchinductor")
    assert triton_cache_dir(0).startswith(str(tmp_path / "triton"))
