"""Training on a teacher's likeliest tokens: every layout and both engines compute the same."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from test_layouts import same_training, world
from tolerance import close_to
from trainer_jobs import TEMPERATURE, VOCABULARY, Setting, make_taught, steps_with_teacher
from transformers import AutoModelForCausalLM

from allocation import ParallelSizes
from areal_like.core.types import TEACHER_IDS, TEACHER_TOP

pytestmark = pytest.mark.covers("distillation")


def expected_divergence(folder) -> float:
    """What transformers gives as the mean forward KL divergence over the teacher's words, a sequence at a time."""
    batch, total, count = make_taught(), 0.0, 0
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ends = np.cumsum(batch.lengths)
    for start, end in zip(ends - batch.lengths, ends, strict=True):
        tokens = torch.from_numpy(batch.tokens[start:end]).long()
        with torch.no_grad():
            logits = model(tokens[None]).logits[0, :-1, :VOCABULARY] / TEMPERATURE
        ids = torch.from_numpy(batch.fields[TEACHER_IDS][start + 1 : end]).long()
        taught = torch.from_numpy(batch.fields[TEACHER_TOP][start + 1 : end])
        divergence = (taught.exp() * (taught - torch.log_softmax(logits, -1).gather(1, ids))).sum(1)
        trained = torch.from_numpy(batch.fields["loss_mask"][start + 1 : end]) > 0
        total, count = total + divergence[trained].sum().item(), count + int(trained.sum())
    return total / count


@pytest.mark.parametrize(
    ("model", "sizes", "more"),
    [
        ("tied", ParallelSizes(tp=2, etp=2), {"share_prompts": True}),
        pytest.param("untied", ParallelSizes(pp=2), {"bridge": "megatron-bridge"}, marks=pytest.mark.long),
        ("tied", ParallelSizes(cp=2, edp=2), {}),
        pytest.param(
            "tied", ParallelSizes(cp=2, edp=2), {"backend": "fsdp", "share_prompts": True}, marks=pytest.mark.long
        ),
        ("tied", ParallelSizes(tp=2), {"backend": "fsdp"}),
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
def test_layouts_and_engines_learn_alike(ranks, models, model, sizes, more):
    outcomes = ranks.run(steps_with_teacher, world(sizes), Setting(models[model], sizes, **more))
    (reference,) = ranks.once(steps_with_teacher, 1, Setting(models[model]))
    assert reference.steps[0]["teacher_kl"] == close_to(expected_divergence(models[model]))
    same_training(outcomes, reference)
