"""Where `rollout.router_replay` is on, off, and refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
from known import excluded, known
from running import CONFIG
from test_preflight import check

from areal_like.config.load import load
from areal_like.preflight import preflight
from areal_like.preflight.router_replay import find_routes
from areal_like.rollout.sglang.options import server_arguments
from areal_like.routes import RouteShape
from areal_like.run.startup_report import startup_report

EXPERTS = (
    *("actor.init_model.num_experts=8", "actor.init_model.num_experts_per_tok=2"),
    *("actor.init_model.moe_intermediate_size=64", "actor.init_model.tie_word_embeddings=false"),
)
ON = "rollout.router_replay=on"
FUSED = "actor.megatron.override_transformer_config.moe_router_fusion=true"


def test_a_model_with_experts_replays_their_routes_and_the_servers_record_them(write):
    job = check(write(), *EXPERTS).job
    layers = job.config.actor.init_model.num_hidden_layers
    assert job.routes == RouteShape(layers, tuple(range(layers)), 2, 8)
    arguments = server_arguments(job.config, write(), job.plan.engine("rollout").sizes, "cpu", routes=True)
    assert "--enable-return-routed-experts" in arguments


def test_a_dense_model_replays_nothing_and_is_refused_where_it_should(write):
    job = check(write()).job
    assert job.routes is None
    arguments = server_arguments(job.config, write(), job.plan.engine("rollout").sizes, "cpu")
    assert "--enable-return-routed-experts" not in arguments
    (found,) = (it for it in check(write(), ON).findings if it.code.startswith("RUN-REPLAY"))
    assert found.code == "RUN-REPLAY" and found.help == "set `rollout.router_replay=auto`"
    assert check(write(), "rollout.router_replay=auto").ok  # as the help says


def test_off_is_off(write):
    assert check(write(), *EXPERTS, "rollout.router_replay=off").job.routes is None


@pytest.mark.parametrize(
    ("overrides", "shape", "backend"),
    [
        (["actor.backend=fsdp:d2"], {"experts": 8, "family": "deepseek_v3"}, "fsdp"),
        ([FUSED], {"experts": 8}, "megatron"),
        (["weight_update.adapters=true"], {"experts": 8}, "megatron"),
        ([], {"experts": 40_000}, "megatron"),
    ],
)
def test_what_cannot_replay_is_refused_if_asked_and_off_with_a_reason_otherwise(write, overrides, shape, backend):
    checked = check(write())
    spec = replace(checked.job.models["actor"], experts_per_token=2, **shape)
    found = load(write(), [*overrides]).config
    actor = replace(checked.job.plan.engine("actor"), backend=backend)
    plan = replace(checked.job.plan, engines=(actor, *checked.job.plan.engines[1:]))
    routes, reason = find_routes(known(found, "cpu", spec, plan))
    assert routes is None and reason
    findings = excluded(load(write(), [*overrides, ON]).config, "cpu", spec, plan)
    (refused,) = (it for it in findings if it.code == "RUN-REPLAY")
    assert reason in str(refused)


def test_fsdp_replays_routes_of_a_family_whose_routers_it_knows(write):
    checked = check(write(), *EXPERTS, ON, "actor.backend=fsdp:d2")
    assert checked.ok and checked.job.routes == RouteShape(checked.job.models["actor"].layers, (0, 1, 2), 2, 8)


def test_layers_without_experts_have_no_rows(write):
    checked = check(write())
    spec = replace(checked.job.models["actor"], experts=256, experts_per_token=8, layers=4, dense_layers=(0,))
    shape, _ = find_routes(known(checked.job.config, "cpu", spec, checked.job.plan))
    assert (shape.layers, shape.with_experts, str(shape.dtype)) == (4, (1, 2, 3), "int16")
    assert shape.row_bytes == 4 * 8 * 2


def test_the_startup_report_says_what_is_replayed_and_why_not():
    def said(*overrides: str) -> str:
        job = preflight(load(CONFIG, list(overrides)), dry_run=True).job
        assert job is not None
        return "\n".join(startup_report(job))

    assert "expert routes: 2 of 8 experts in 3 layers, 6 bytes per token; the actor replays them" in said(*EXPERTS)
    off = said(*EXPERTS, "rollout.router_replay=off")
    assert "expert routes are not replayed: rollout.router_replay=off" in off
    assert "routes" not in said()
