"""Servers compare what they were given with what the trainer has, over every transport."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import serving as real
import torch
from limits import HUNG_S
from local_trainer import LocalTrainer
from test_sync import connected

from areal_like.backends.sglang.checksums import compare, watch
from areal_like.backends.training.rank import TrainerRank
from areal_like.backends.transports.checksum import checksum
from areal_like.core.errors import WeightUpdateError
from areal_like.core.weights import compare_checksums, make_sender, publish


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_a_bit_and_a_place_make_a_difference(dtype):
    tensor = torch.arange(1, 7).to(dtype).reshape(2, 3)
    assert checksum(tensor) == checksum(tensor.clone())
    assert checksum(tensor) != checksum(tensor.flip(0))
    other = tensor.clone()
    other[1, 1] += 1
    assert checksum(tensor) != checksum(other)
    assert checksum(tensor.T) == checksum(tensor.T.contiguous())


def test_a_model_that_is_watched_loads_as_before_and_knows_what_it_was_given():
    class Model(torch.nn.Module):
        def load_weights(self, weights: Any) -> set[str]:
            self.loaded = dict(weights)
            return set(self.loaded)

    model, weights = Model(), {"a": torch.ones(3), "b": torch.arange(4.0)}
    sums = {name: int(checksum(tensor)) for name, tensor in weights.items()}
    for _ in range(2):  # of several updates each is watched anew
        watch(model)
        assert model.load_weights(iter(weights.items())) == {"a", "b"}
        compare(model, sums)
    for wrong, name in [(sums | {"a": 0}, "a"), (sums | {"c": 1}, "c"), ({"a": sums["a"]}, "b")]:
        with pytest.raises(ValueError, match=f"1 of {len(wrong)} received tensors differ .*: {name}"):
            compare(model, wrong)
    watch(model)
    with pytest.raises(ValueError, match="2 of 2 received tensors"):
        compare(model, sums)


@pytest.mark.parametrize("mode", ["disk", "collective", "ipc"])
def test_what_came_otherwise_is_named(sglang_server, tmp_path, mode):
    class Forgetful(LocalTrainer):
        """After the second update one of its tensors is another one than it has sent."""

        async def checksums(self, *, timeout_s: float) -> dict[str, int]:
            sums = await super().checksums(timeout_s=timeout_s)
            return sums | ({"model.norm.weight": 1} if self.updates == 2 else {})

    models = [real.peaked_model(sglang_server.model, tmp_path / f"model-{seed}", seed) for seed in range(2)]
    trainer: Any = Forgetful(models[0], mode=mode)

    async def run() -> None:
        async with connected(mode, trainer, sglang_server, tmp_path) as (bound, pool):
            pool.checking = partial(compare_checksums, trainer)
            for trainer.updates, trainer.model in enumerate(models, 1):
                await publish(bound, trainer.updates, HUNG_S)

    with pytest.raises(
        WeightUpdateError, match=r"version 2 .* 1 of \d+ received tensors differ .*: model\.norm\.weight"
    ):
        asyncio.run(run())


@pytest.mark.parametrize("mode", ["disk", "collective", "ipc"])
def test_checksums_are_made_of_what_is_gathered_for_servers_anyway(mode):
    class Engine:
        gathered, value = 0, 1.0

        def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
            self.gathered += 1
            yield from {"a": torch.full((3,), self.value), "b": torch.arange(4.0)}.items()

    rank: Any = TrainerRank(0, 1, "127.0.0.1")
    rank._engine = engine = Engine()
    rank._sender = sender = make_sender(mode, engine, 0, "127.0.0.1")  # type: ignore[arg-type]
    if sender:
        sender.layout(1)
    for engine.value in (1.0, 2.0, 3.0):
        if sender:
            sender.prepare(0)
        expected = {name: int(checksum(tensor)) for name, tensor in Engine.weights(engine)}
        engine.gathered -= 1
        assert rank.checksums() == expected
    assert engine.gathered == (1 + 3 + 1 if sender else 3)  # of a layout, of each update, and of the first checksums
