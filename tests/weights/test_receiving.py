"""Every rank of a server receives all that is broadcast, also what it cannot load."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from torch import distributed

from areal_like.backends.sglang import receiving


@pytest.fixture
def group(tmp_path):
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'meeting'}", rank=0, world_size=1)
    yield distributed.group.WORLD
    distributed.destroy_process_group()


def test_a_rank_that_cannot_load_a_bucket_receives_the_others(group, monkeypatch):
    loaded, received, broadcast = [], [], distributed.broadcast

    def load(model, flat, layout, where):
        loaded.append([name for name, *_ in layout])
        if len(loaded) == 2:
            raise RuntimeError("out of memory")

    def counted(tensor, **options):
        received.append(tensor.numel())
        return broadcast(tensor, **options)

    monkeypatch.setattr(receiving, "load", load)
    monkeypatch.setattr(distributed, "broadcast", counted)
    updater = SimpleNamespace(_model_update_group={"weights": group})
    runner = SimpleNamespace(model=torch.nn.Module(), device="cpu", gpu_id=0, weight_updater=updater)
    request = SimpleNamespace(
        group_name="weights",
        names=["a", "b", "c", "d", "e"],
        dtypes=["float32"] * 5,
        shapes=[(2,), (3,), (4,), (5,), (6,)],
        load_format=json.dumps([1, 1, 2, 1]),
    )
    done, told = receiving.receive_broadcast(runner, request, group)
    assert (done, told) == (False, "rank 0 failed to load: RuntimeError: out of memory")
    assert loaded == [["a"], ["b"]]
    assert received == [8, 12, 36, 24]


@pytest.mark.parametrize(("fails", "told"), [(None, "loaded"), (0, "rank 0 {}"), (1, "rank 1 {}")])
def test_a_checkpoint_that_one_rank_cannot_read_is_no_update(group, monkeypatch, fails, told):
    """SGLang answers as rank 0 does."""

    def gathered(problems, problem, group):
        problems[:] = [problem, "failed to load: RuntimeError: no such file" if fails == 1 else ""]

    monkeypatch.setattr(distributed, "get_world_size", lambda group: 2)
    monkeypatch.setattr(distributed, "all_gather_object", gathered)
    answer = SimpleNamespace(success=fails != 0, message="no such file")
    done, said = receiving.receive_checkpoint(lambda: answer, group)
    assert (done, said) == (fails is None, told.format("failed to load: RuntimeError: no such file"))
