"""What the FSDP trainer cannot do is said before start."""

import pytest

from areal_like.config.load import load
from areal_like.preflight import preflight

FSDP = "actor.backend=fsdp:d2"


def said(write, *overrides):
    return [(f.code, f.key.split(" ")[0], f.help) for f in preflight(load(write(), overrides)).findings]


def test_it_may_start(write):
    assert said(write, FSDP) == []


@pytest.mark.parametrize("layout", ["fsdp:d1t2", "fsdp:d1c2"])
def test_it_is_data_parallel_only(write, layout):
    ((code, key, help),) = said(write, f"actor.backend={layout}")
    assert (code, key) == ("RUN-ROLE", "actor.backend")
    assert help.startswith("write fsdp:d2,")


def test_it_takes_dense_models(write):
    found = said(write, FSDP, "actor.init_model.num_experts=4", "actor.init_model.tie_word_embeddings=false")
    assert [code for code, *_ in found] == ["RUN-FSDP"]


@pytest.mark.parametrize("critic", ["critic.backend=fsdp:d2", "critic.timeout_s=60"])
def test_a_critic_is_megatrons(write, critic):
    found = said(write, FSDP, critic)
    assert ("RUN-ROLE", "critic.backend") in [(code, key) for code, key, _ in found]
