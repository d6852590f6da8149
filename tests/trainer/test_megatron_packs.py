"""What Megatron's attention and rotary embedding receive about a packed micro-batch."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from areal_like.backends.megatron.pack import OwnPositions, pack_of


@pytest.mark.parametrize("shared", [False, True])
def test_the_ends_of_a_pack_with_own_positions_are_contiguous(shared, monkeypatch):
    """Transformer Engine's rotary kernel reads them without their stride: it would rotate the first sequence alone."""
    monkeypatch.setattr("megatron.core.parallel_state.get_context_parallel_world_size", lambda: 1)
    ends = torch.tensor([0, 3, 5, 8], dtype=torch.int32)
    keys = SimpleNamespace(positions=torch.arange(8), cu_seqlens=ends, max_seqlen=3, places=torch.arange(8))
    pack = pack_of(
        SimpleNamespace(
            cu_seqlens=ends,
            max_seqlen=3,
            keys=keys if shared else None,
            positions=torch.zeros(4, 1, 8, dtype=torch.long),
            tokens=torch.zeros(1, 8, dtype=torch.long),
            ahead=None,
        )
    )
    assert isinstance(pack, OwnPositions)
    for told in (pack.cu_seqlens_q, pack.cu_seqlens_kv):
        assert told.tolist() == [0, 8]
        assert told.is_contiguous()
