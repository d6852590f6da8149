"""After ten steps a run says which layout or η would be faster, and nothing where none is."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from allocation import check, compile
from areal_like.capabilities.operations.advice import GpuSplit, better, split_of

SERVERS, ACTOR, CRITIC = "sglang[rollout]", "megatron[actor]", "megatron[critic]"
EVEN = GpuSplit(servers=4, trainer=4, server_unit=1, trainer_unit=1, staleness=2)


@pytest.mark.parametrize(
    ("layout", "idle", "slowest", "words"),
    [
        (EVEN, (0.02, 0.5), 6.0, "servers on 5 GPUs and the trainer on 3 would take about 7.84 s a step, not 10"),
        (EVEN, (0.7, 0.0), 5.0, "servers on 2 GPUs and the trainer on 6 would take about 6.67 s a step, not 10"),
        (EVEN, (0.3, 0.3), 5.0, "they wait for each other, which rollout.max_head_offpolicyness=3 loosens (now 2)"),
        (EVEN, (0.02, 0.1), 9.0, None),
        # the trainer wants GPUs by four, so that there is no other split
        (GpuSplit(4, 4, 1, 4, 2), (0.02, 0.1), 9.0, None),
        # one GPU each, and the trainer has little to do
        (GpuSplit(1, 1, 1, 1, 2), (0.0, 0.8), 2.0, "asynchrony does not pay here; both on all 2 GPUs"),
        # the same where all wait for one long response: two H200 measured 22 s, together 15.7 s, and 30 s with η = 0
        (
            GpuSplit(1, 1, 1, 1, 2),
            (0.0, 0.8),
            12.0,
            "both on all 2 GPUs (sglang:…|megatron:…) would take about 6 s a step",
        ),
        (GpuSplit(1, 1, 1, 1, 2), (0.0, 0.3), 6.0, None),
        # six GPUs do not hold a trainer of four
        (GpuSplit(2, 4, 2, 4, 2), (0.8, 0.0), 1.0, None),
        (GpuSplit(2, 2, 2, 2, 2), (0.8, 0.0), 1.0, "asynchrony does not pay here; both on all 4 GPUs"),
    ],
)
def test_what_would_be_faster(layout: GpuSplit, idle: tuple[float, float], slowest: float, words: str | None):
    said = better(layout, 10.0, *idle, slowest)
    assert said is None if words is None else words in str(said)


@pytest.mark.parametrize(
    ("text", "unit", "without"),
    [
        ("sglang:d4+megatron:d4", 1, None),
        ("sglang:d4+megatron:(attn:d4|ffn:e4)", 4, "sglang:d5+megatron:(attn:d3|ffn:e4)"),
        ("sglang:d4+megatron:(attn:d4t2|ffn:e2t2)", 4, "sglang:d6+megatron:(attn:d3t2|ffn:e2t2)"),
        (f"{SERVERS}:d4+{ACTOR}:d4|{CRITIC}:d2t2", 2, f"{SERVERS}:d5+{ACTOR}:d3|{CRITIC}:d1t2"),
    ],
)
def test_the_trainer_has_gpus_by_as_many_as_its_layout_takes(text: str, unit: int, without: str | None):
    settings = SimpleNamespace(rollout=SimpleNamespace(max_head_offpolicyness=2))
    job: Any = SimpleNamespace(plan=compile(text), device="cuda", config=settings)
    split = split_of(job)
    assert split is not None and split.trainer_unit == unit
    assert without is None or check(without).plan is None
