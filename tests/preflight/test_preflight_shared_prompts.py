"""Where `mb_spec.share_prompts` is refused, and where it is not."""

from dataclasses import replace

import pytest
from test_preflight import check

from areal_like.core.config.load import load
from areal_like.exclusions import find_excluded
from areal_like.preflight.role_exclusions import ROLE
from areal_like.preflight.view import view_roles

SHARED = "actor.mb_spec.share_prompts=true"
ROLES = ("algorithm=ppo", "actor.kl_ctl=0.1")


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["actor.backend=megatron:t2"],
        ["actor.backend=megatron:c2"],
        ["actor.backend=fsdp:d2"],
        ["actor.backend=fsdp:c2"],
        [*ROLES, "ref={}", "critic={}"],
        [*ROLES, "critic={}", "ref={backend: 'megatron:c2', mb_spec: {max_tokens_per_mb: 64}}"],
    ],
    ids=str,
)
def test_it_may_start(write, overrides):
    assert check(write(), SHARED, *overrides).ok


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ({"latent_attention": True}, "latent attention"),
        ({"linear_layers": (0,)}, "linear attention"),
        ({"experts": 4, "family": "minimax_m2"}, None),
        ({"experts": 4, "family": "glm4_moe"}, None),
        ({"experts": 4}, None),
    ],
)
def test_a_model_that_would_be_computed_otherwise_is_refused(write, shape, words):
    loaded, job = load(write(), [SHARED]).config, check(write(), SHARED).job
    specs = {"actor": replace(job.models["actor"], **shape)}
    found = [
        it for view in view_roles(loaded, specs, job.plan, device="cpu") for it in find_excluded(ROLE, view, view.key)
    ]
    assert [words in it.message for it in found] == ([True] if words else [])


@pytest.mark.parametrize(
    ("family", "rate", "refused"), [("minimax_m2", 0, False), ("minimax_m2", 1e-3, True), ("glm4_moe", 1e-3, True)]
)
def test_the_rate_of_router_biases_decides_whether_prompts_are_shared(write, family, rate, refused):
    overrides = [SHARED, f"actor.megatron.override_transformer_config.moe_router_bias_update_rate={rate}"]
    loaded, job = load(write(), overrides).config, check(write(), SHARED).job
    specs = {"actor": replace(job.models["actor"], experts=4, family=family)}
    found = [
        it for view in view_roles(loaded, specs, job.plan, device="cpu") for it in find_excluded(ROLE, view, view.key)
    ]
    assert [it.code for it in found] == (["RUN-SHARED-PROMPTS"] if refused else [])
