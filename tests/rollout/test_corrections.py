"""Corrections of SGLang's models: windows of Triton attention when it decodes."""

import ast
import importlib.util
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest import mock

import pytest
import torch

from areal_like.rollout.sglang.patches.windows import _decodes, _with_current_token, complete_windows

TRITON = "sglang.srt.layers.attention.triton_backend"


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


@pytest.fixture
def triton(tmp_path, monkeypatch) -> ModuleType:
    """SGLang's own backend and what it fills buffers with, without the imports of its file, which take seconds."""
    (folder,) = importlib.util.find_spec("sglang").submodule_search_locations
    file = ast.parse(Path(folder, *TRITON.split(".")[1:]).with_suffix(".py").read_text())
    wanted = {"TritonAttnBackend", "update_sliding_window_buffer"}
    file.body = [node for node in file.body if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name in wanted]
    assert {node.name for node in file.body} == wanted
    head = "from __future__ import annotations\nfrom unittest import mock\nimport torch\nAttentionBackend = object\n"
    head += "create_flashinfer_kv_indices_triton = mock.MagicMock()\n"
    (own := tmp_path / "triton_backend.py").write_text(head + ast.unparse(file))
    spec = importlib.util.spec_from_file_location(TRITON, own)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setitem(sys.modules, TRITON, module)
    return module


def test_a_buffer_of_a_decoding_step_holds_the_whole_window(triton):
    """8 tokens of 20, of a window whose model says 7 before the current one."""

    def lengths() -> list[int]:
        backend = mock.Mock(sliding_window_size=7, dcp_size=1, window_kv_indptr=torch.zeros(3, dtype=torch.int64))
        backend.token_to_kv_pool = object()
        method = triton.TritonAttnBackend._update_decode_kv_buffers
        return method(backend, 2, torch.tensor([20, 3]), torch.tensor([0, 1]))[2].tolist()

    assert lengths() == [7, 3]
    complete_windows()
    assert lengths() == [8, 3]
