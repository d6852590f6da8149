"""Host memory by node: every use is counted where its process is."""

from __future__ import annotations

import json
from dataclasses import replace

from typer.testing import CliRunner

import allocation
from allocation import BatchSpec
from allocation.cli import app
from allocation.memory import estimate
from allocation.memory.host import BATCH, RANK_BYTES, SERVER_BYTES, TRAJECTORY, route_bytes
from allocation.parameters import total_parameters
from allocation.settings import MegatronSettings, MemorySettings, Workload

DENSE, EXPERTS = allocation.load_model("qwen3-8b"), allocation.load_model("qwen3-30b-a3b")
WORK = Workload(DENSE, batch=BatchSpec(64, 8, max_length=4096))


def uses(text: str, work: Workload = WORK, cluster: str = "2x8") -> dict[int, dict[str, int]]:
    plan = allocation.compile(text, cluster=allocation.Cluster.parse(cluster), model=work.model)
    return {node: dict(items) for node, items in estimate(plan, work).host.items()}


def test_processes_are_counted_on_their_nodes() -> None:
    found = uses("sglang:d4t2+megatron:d8")
    assert found[0]["rollout servers"] == 4 * SERVER_BYTES and "actor ranks" not in found[0]
    assert found[1]["actor ranks"] == 8 * RANK_BYTES and "controller and Ray" not in found[1]


def test_a_copy_of_a_checkpoint_has_weights_and_optimizer() -> None:
    found = uses("sglang:d8+megatron:d8")[1]["actor checkpoint copies"]
    weights = total_parameters(DENSE)
    assert (
        0.99 < found / (8 * 2 * weights + 12 * weights) < 1.01
    )  # each rank has the weights, and an eighth of the rest


def test_offloaded_state_is_in_host_memory() -> None:
    assert "actor offloaded state" not in uses("sglang:d8+megatron:d8")[1]
    on_host = replace(WORK, megatron=MegatronSettings(optimizer_offload=True))
    optimizer = uses("sglang:d8+megatron:d8", on_host)[1]["actor offloaded state"]
    assert 0.99 < optimizer / (12 * total_parameters(DENSE)) < 1.01
    shared = replace(WORK, memory=MemorySettings(offload=True))
    assert uses("sglang:d8|megatron:d8", shared, "1x8")[0]["actor offloaded state"] > optimizer


def test_routes_and_trajectories_are_counted_by_token() -> None:
    assert route_bytes(DENSE) == 0 and route_bytes(EXPERTS) == 48 * 8
    found = uses("sglang:d4t2+megatron:(attn:d8|ffn:e8)", replace(WORK, model=EXPERTS))[0]
    tokens = 64 * 8 * 4096
    assert found["trajectories in flight"] == 2 * tokens * TRAJECTORY
    assert found["routes"] == 2 * tokens * 48 * 8
    assert found["Ray's object store"] == tokens * (BATCH + 48 * 8)


def test_the_command_shows_each_node() -> None:
    command = ["memory", "sglang:d8+megatron:d8", "-m", "qwen3-8b", "-c", "2x8"]
    shown = CliRunner().invoke(app, command)
    assert shown.exit_code == 0 and "host memory of node 1" in shown.output
    found = json.loads(CliRunner().invoke(app, [*command, "--json"]).stdout)
    assert set(found["host"]) == {"0", "1"} and found["host"]["1"]["actor ranks"] == 8 * RANK_BYTES
