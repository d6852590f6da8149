"""Corrections of SGLang's models: windows of Triton attention when it decodes."""

import subprocess
import sys
from types import SimpleNamespace

import pytest

from areal_like.rollout.sglang.corrections import _decodes, _with_current_token


class Backend:
    """What of an attention backend the correction changes: the size of its window, which a method reads."""

    sliding_window_size = 7

    def seen(self, batch):
        if batch is None:
            raise ValueError("no batch")
        return self.sliding_window_size


@pytest.mark.parametrize(("decodes", "expected"), [(True, 8), (False, 7)])
def test_a_decoding_step_sees_one_token_more(decodes, expected):
    batch = SimpleNamespace(forward_mode=SimpleNamespace(is_decode_or_idle=lambda: decodes))
    backend, method = Backend(), _with_current_token(Backend.seen, _decodes)
    assert method(backend, batch) == expected
    assert backend.sliding_window_size == 7
    assert _with_current_token(Backend.seen)(backend, batch) == 8


def test_the_window_is_as_before_after_an_error():
    backend = Backend()
    with pytest.raises(ValueError, match="no batch"):
        _with_current_token(Backend.seen)(backend, None)
    assert backend.sliding_window_size == 7


@pytest.mark.parametrize("size", [None, 0, -1])
def test_without_a_window_nothing_changes(size):
    backend = Backend()
    backend.sliding_window_size = size
    assert _with_current_token(Backend.seen)(backend, 1) is size


def test_a_buffer_of_a_decoding_step_holds_the_whole_window():
    """SGLang's own method, with its class corrected: 8 tokens of 20, of a window whose model says 7 before."""
    code = """
from unittest import mock
from areal_like.rollout.sglang.launcher import prepare_imports
prepare_imports(False)
import torch
from sglang.srt.layers.attention import triton_backend
from areal_like.rollout.sglang.corrections import complete_windows

def lengths():
    backend = mock.Mock(sliding_window_size=7, dcp_size=1, window_kv_indptr=torch.zeros(3, dtype=torch.int64))
    method = triton_backend.TritonAttnBackend._update_decode_kv_buffers
    with mock.patch.object(triton_backend, "create_flashinfer_kv_indices_triton"):
        triton_backend.create_flashinfer_kv_indices_triton.__getitem__ = lambda *_: lambda *_: None
        backend.token_to_kv_pool = object()
        return method(backend, 2, torch.tensor([20, 3]), torch.tensor([0, 1]))[2].tolist()

before = lengths()
complete_windows()
print(before, lengths())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1:] == ["[7, 3] [8, 3]"], done.stderr[-2000:]
