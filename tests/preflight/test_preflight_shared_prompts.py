"""Where `mb_spec.share_prompts` is refused, and where it is not."""

from dataclasses import replace

import pytest
from test_preflight import check

from areal_like.config.load import load
from areal_like.preflight.shared_prompts import check_shared_prompts
from areal_like.preflight.view import view_roles

SHARED = "actor.mb_spec.share_prompts=true"
ROLES = ("algorithm=ppo", "actor.kl_ctl=0.1")


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["actor.backend=megatron:t2"],
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
    ("overrides", "key", "words"),
    [
        (["actor.backend=megatron:c2"], "actor.mb_spec.share_prompts", "context parallelism (c2)"),
        ([*ROLES, "critic={}", "ref={backend: 'megatron:c2'}"], "actor.mb_spec.share_prompts", "(c2)"),
    ],
    ids=str,
)
def test_it_is_refused_once_under_the_key_that_asks_for_it(write, overrides, key, words):
    (found,) = (it for it in check(write(), SHARED, *overrides).findings if it.code.startswith("RUN-SHARED-PROMPTS-"))
    assert words in found.message
    assert key in str(found)


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ({"latent_attention": True}, "latent attention"),
        ({"linear_layers": (0,)}, "linear attention"),
        ({"experts": 4, "expert_bias": True}, "balanced"),
        ({"experts": 4}, None),
    ],
)
def test_a_model_that_would_be_computed_otherwise_is_refused(write, shape, words):
    loaded, job = load(write(), [SHARED]).config, check(write(), SHARED).job
    specs = {"actor": replace(job.models["actor"], **shape)}
    found = list(check_shared_prompts(view_roles(loaded, specs, job.plan)))
    assert [words in it.message for it in found] == ([True] if words else [])
