"""Every family that the checks accept for `device=cpu` starts and scores on SGLang's CPU server."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_models import SERVED, TIED, VARIANTS, Variant, write_tiny
from tiny_servers import change, distance, score, served, update
from tolerance import rounding

from allocation.families import TRAINED

EXACT = rounding(5.0)  # a mean
WINDOWS = ("mistral-window", "qwen2-window", "qwen3-window", "gemma3_text-window")  # of 8 tokens


@pytest.mark.long
@pytest.mark.parametrize("name", [*SERVED, *WINDOWS])
def test_a_family_scores_on_a_cpu_before_and_after_an_update(tmp_path: Path, name: str) -> None:
    family, model, updated = VARIANTS[name].family, tmp_path / "model", tmp_path / "updated"
    network = write_tiny(Variant(family, {**VARIANTS[name].fields, **TIED.get(family, {})}), model)
    with served(model) as post:
        assert max(distance(network, score(post))) < EXACT
        change(network).save_pretrained(updated)
        update(post, updated)
        assert max(distance(network, score(post))) < EXACT


def test_every_family_that_a_trainer_has_is_served() -> None:
    assert set(TRAINED["fsdp"]) | set(TRAINED["megatron"]) == set(SERVED)
