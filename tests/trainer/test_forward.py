"""What a pass that only reads asks of the model's last layer."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import torch

from areal_like.trainer.device_batch import to_device
from areal_like.trainer.megatron import engine  # noqa: F401  # before anything else of megatron
from areal_like.trainer.packing import pack
from areal_like.types import Batch

# isort: split
from areal_like.trainer.megatron import forward


def test_a_pass_without_backward_has_logits_of_a_few_rows_at_a_time(monkeypatch):
    monkeypatch.setattr(forward, "_READ_AT_ONCE", 3)
    batch = Batch(np.array([5, 4], np.int32), np.arange(9, dtype=np.int32), {"loss_mask": np.ones(9, np.float32)})
    packed = pack(batch.tokens, batch.lengths, (0, 1), 1)
    micro_batch = to_device(packed, batch, np.ones(9, bool), torch.device("cpu"))
    hidden, weight, seen = torch.randn(9, 1, 8), torch.randn(11, 8), []

    class Layer(torch.nn.Module):
        def forward(self, states, weight):
            seen.append(len(states))
            return states @ weight.T, None

    class Model:
        config = SimpleNamespace(bf16=False, sequence_parallel=False)

        def __call__(self, *, output_processor, output_processor_context, **_):
            return output_processor(
                hidden_states=hidden,
                output_layer=Layer(),
                output_weight=weight,
                context=output_processor_context,
                config=self.config,
                scale_logits=lambda logits: logits,
            )

    def logit_of_label(part, logits):
        return logits.gather(1, part.labels[:, None])[:, 0]

    values, listed = forward._read_step(logit_of_label, iter([micro_batch]), Model())
    assert seen == [3, 3, 1]
    rows, labels = [0, 1, 2, 3, 5, 6, 7], [1, 2, 3, 4, 6, 7, 8]
    torch.testing.assert_close(listed(values, non_loss_data=True), (hidden[rows, 0] @ weight.T)[range(7), labels])
