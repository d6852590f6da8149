"""Training on tokens that were sampled from a few words: every layout and both engines compute the same."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from test_layouts import same_training, world
from tolerance import assert_close
from trainer_jobs import VOCABULARY, Outcome, Setting, make_supported, steps_with_supports
from transformers import AutoModelForCausalLM

from allocation import ParallelSizes
from areal_like.core.sampling_masks import KEPT
from areal_like.core.types import TEMPERATURES

pytestmark = pytest.mark.covers("sampling masks")


def by_place(outcomes: list[Outcome]) -> np.ndarray:
    values = np.full(len(make_supported().tokens), np.nan)
    for places, part in (outcome.log_probs for outcome in outcomes if outcome.log_probs is not None):
        values[places] = part
    return values


def expected_log_probs(folder) -> np.ndarray:
    """What transformers computes with a dense mask, a sequence at a time; nan where nothing is trained."""
    batch, found = make_supported(), []
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    mask = torch.zeros(len(batch.tokens), VOCABULARY, dtype=torch.bool)
    for place in range(len(batch.tokens)):
        ids = batch.fields[KEPT][place : place + 1].ids.tolist()
        mask[place, ids or slice(None)] = True
    temperatures = torch.from_numpy(batch.fields[TEMPERATURES])
    ends = np.cumsum(batch.lengths).tolist()
    for start, end in zip([0, *ends], ends, strict=False):
        tokens = torch.from_numpy(batch.tokens[start:end]).long()
        with torch.no_grad():
            logits = model(tokens[None]).logits[0, :-1, :VOCABULARY] / temperatures[start + 1 : end, None]
        log_p = torch.log_softmax(logits.masked_fill(~mask[start + 1 : end], -torch.inf), -1)
        found += [log_p.new_full((1,), torch.nan), log_p.gather(1, tokens[1:, None])[:, 0]]
    return torch.cat(found).masked_fill(torch.from_numpy(batch.fields["loss_mask"]) == 0, torch.nan).numpy()


@pytest.mark.parametrize(
    ("model", "sizes", "more"),
    [
        pytest.param("tied", ParallelSizes(), {}, marks=pytest.mark.long),
        ("tied", ParallelSizes(tp=2, etp=2), {"share_prompts": True}),
        pytest.param("untied", ParallelSizes(pp=2), {"bridge": "megatron-bridge"}, marks=pytest.mark.long),
        ("tied", ParallelSizes(cp=2, edp=2), {}),
        ("moe", ParallelSizes(dp=2, ep=2), {"max_tokens_per_mb": 100, "share_prompts": True}),
        pytest.param("tied", ParallelSizes(), {"backend": "fsdp"}, marks=pytest.mark.long),
        ("tied", ParallelSizes(cp=2, edp=2), {"backend": "fsdp", "share_prompts": True}),
        *(
            pytest.param(*row, marks=pytest.mark.long)
            for row in (
                ("untied", ParallelSizes(tp=2, pp=2, etp=2), {"bridge": "megatron-bridge"}),
                ("tied", ParallelSizes(dp=2, cp=2, edp=4), {"backend": "fsdp", "share_prompts": True}),
            )
        ),
    ],
    ids=str,
)
def test_layouts_and_engines_train_alike(ranks, models, model, sizes, more):
    outcomes = ranks.run(steps_with_supports, world(sizes), Setting(models[model], sizes, **more))
    assert_close(by_place(outcomes), expected_log_probs(models[model]))
    (reference,) = ranks.once(steps_with_supports, 1, Setting(models[model]))
    assert_close(by_place(outcomes), by_place([reference]))
    same_training(outcomes, reference)
