from __future__ import annotations

import weakref

import numpy as np
import torch

from areal_like.core.trainer import device_batch, packing
from areal_like.core.trainer.device_batch import DeviceBatches
from areal_like.core.types import Batch


def test_micro_batches_are_on_the_device_one_at_a_time(monkeypatch):
    lengths = np.array([5, 3, 4, 1], np.int32)
    tokens = np.arange(13, dtype=np.int32)
    batch = Batch(lengths, tokens, {"loss_mask": np.ones(13, np.float32), "advantages": np.arange(13.0)})
    packs = [packing.pack(tokens, lengths, (i,), 1) for i in range(4)]
    alive = weakref.WeakSet()
    copy = device_batch.to_device

    def counted(*arguments):
        assert len(alive) == 0
        made = copy(*arguments)
        alive.add(made.tokens)
        return made

    monkeypatch.setattr(device_batch, "to_device", counted)
    wanted = tokens != 2
    batches = DeviceBatches(len(packs), packs.__getitem__, batch, wanted, torch.device("cpu"))
    for _ in range(2):  # as two chunks of a virtual pipeline do
        labels = []
        for micro_batch in batches:
            assert micro_batch.count == len(micro_batch.rows) == len(micro_batch.labels)
            assert micro_batch.fields["advantages"].tolist() == micro_batch.labels.tolist()
            labels += micro_batch.labels.tolist()
            del micro_batch
        assert labels == [1, 3, 4, 6, 7, 9, 10, 11]
        assert batches.targets.tolist() == labels
