from __future__ import annotations

import pytest

from benchmarks.packing import MODELS, case


@pytest.mark.parametrize("model", MODELS)
def test_long_tailed_lengths_cost_all_ranks_alike(model):
    found = case(model, 512, 65536, ranks=8, seed=1)
    by_tokens, apart, meeting = found["tokens"], found["cost"], found["cost, ranks meet"]
    assert by_tokens["count"] == apart["count"] == meeting["count"]
    assert apart["ranks"] - 1 < (by_tokens["ranks"] - 1) / 2
    assert meeting["micro_batches"] < by_tokens["micro_batches"]
