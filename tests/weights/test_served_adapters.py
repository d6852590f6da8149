"""Servers that get adapters alone compute what they would with merged weights, from the version that a token names."""

from __future__ import annotations

import asyncio
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import serving as real
import torch
from adapter_files import write_adapter
from cpu_server import server_on_cpu
from known import excluded
from limits import HUNG_S
from safetensors.torch import save_file

from allocation.model_spec import from_config
from areal_like.backends.sglang.adapted_layers import adapted_layers
from areal_like.backends.transports.adapters.controller import AdapterSync
from areal_like.core.config.load import load
from areal_like.core.errors import ServerError
from areal_like.core.rollout.http import Deadline
from areal_like.core.rollout.pool import Response, Sampling, ServerPool
from areal_like.core.transfer import ONLY_ADAPTER as ONLY
from areal_like.core.weights import SyncSpec
from areal_like.preflight import preflight
from areal_like.preflight.exclusions import SERVED, SERVED_EXPERTS

DEMO = Path(__file__).parents[2] / "examples/math/gsm8k_grpo_cpu.yaml"
ADAPTERS = ["actor.use_lora=true", "weight_update={adapters: true, mode: disk}"]
EXPERTS = ["actor.init_model.num_experts=4", "actor.init_model.tie_word_embeddings=false"]
ON_GPU = ["device=cuda", "actor.backend=fsdp:d1", "cluster.n_gpus_per_node=4", *EXPERTS]
RANK, ALPHA, EXACT = 4, 8.0, 1e-4
PROMPTS = [[5 + (i * 7 + j * 3) % 20 for j in range(4 + 5 * i)] for i in range(6)]
LENGTH = 60
BEFORE = {
    "input_ids": PROMPTS[0],
    "sampling_params": {"max_new_tokens": 8, "temperature": 1.0, "ignore_eos": True},
    "return_logprob": True,
}


def codes(write, *overrides: str) -> list[str]:
    return [found.code for found in preflight(load(write(), [*ADAPTERS, *overrides])).findings]


@pytest.mark.parametrize(
    ("overrides", "code"),
    [
        (["actor.use_lora=false"], "RUN-ADAPTERS"),
        (["weight_update.mode=collective"], "RUN-ADAPTERS"),
        (["weight_update.full_every=4"], "RUN-ADAPTERS"),
        (["weight_update.checksum=true"], "RUN-ADAPTERS"),
        (["actor.init_model.num_experts=4", "actor.target_modules=[q_proj]"], "RUN-CPU"),
        ([*EXPERTS, "actor.backend=fsdp:d1"], "RUN-CPU"),
        (["actor.megatron.use_dist_checkpointing=true"], "RUN-ADAPTERS"),
        (["rollout.sharing=alternate"], "RUN-ADAPTERS"),
        ([*ON_GPU, "rollout.backend=sglang:d1t2"], "RUN-ADAPTERS"),
    ],
)
def test_what_adapters_on_servers_need_is_said_before_the_start(write, overrides, code):
    assert code in codes(write, *overrides)
    for accepted in ([], ["device=cuda"], ON_GPU):
        assert not [found for found in codes(write, *accepted) if found.startswith("RUN-ADAPTERS")]


SPARSE_LAYERS = {"mlp_only_layers": [0]}


@pytest.mark.parametrize(
    ("family", "fields", "targets", "code"),
    [
        *((family, {}, "all-linear", None) for family in (*SERVED, *SERVED_EXPERTS)),
        *((family, {}, "q_proj", "RUN-ADAPTERS") for family in ("gemma2", "qwen3_next", "qwen3_5_moe_text")),
        ("deepseek_v3", {"q_lora_rank": None}, "all-linear", "RUN-ADAPTERS"),
        ("deepseek_v2", {"q_lora_rank": None}, "q_proj", "RUN-ADAPTERS"),
        ("deepseek_v3", {"q_lora_rank": None}, "down_proj", None),
        ("qwen3_moe", SPARSE_LAYERS, "all-linear", "RUN-ADAPTERS"),
        ("qwen3_moe", {"decoder_sparse_step": 2}, "up_proj", "RUN-ADAPTERS"),
        ("glm4_moe", {"n_shared_experts": 0}, "all-linear", "RUN-ADAPTERS"),
        ("qwen3_moe", SPARSE_LAYERS, "q_proj", None),
        ("qwen2_moe", SPARSE_LAYERS, "all-linear", None),
    ],
)
def test_adapters_are_refused_on_servers_of_a_gpu_where_sglang_cannot_add_them(write, family, fields, targets, code):
    sys.path.append(str(Path(__file__).parents[1] / "models"))
    from tiny_models import Variant, config_of

    spec = from_config(config_of(Variant(family, fields)).to_dict())
    config = load(write(), [*ADAPTERS, f"actor.target_modules=[{targets}]"]).config
    found = excluded(config, "cuda", spec)
    assert [each.code for each in found] == ([code] if code else [])
    assert all(each.help for each in found)


def write_checkpoint(folder: Path, *matrices: str) -> Path:
    """Write matrices `[8, 4]` by the names of their layers, with a bias and a norm, of a model with one layer."""
    weights = {f"{name}.weight": torch.zeros(8, 4) for name in matrices}
    others = ("model.layers.0.self_attn.q_proj.bias", "model.norm.weight")
    save_file(weights | {name: torch.zeros(4) for name in others}, folder / "model.safetensors")
    (folder / "config.json").write_text('{"num_hidden_layers": 1}')
    return folder


ATTENTION = [f"model.layers.0.self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj")]
ENDS = ["model.embed_tokens", "lm_head", "model.layers.1.self_attn.q_proj"]  # the last one predicts further tokens
DENSE = [f"model.layers.0.mlp.{name}" for name in ("gate_proj", "up_proj", "down_proj")]
SPARSE = [f"model.layers.0.mlp.experts.{i}.{name}" for i in (0, 1) for name in ("gate_proj", "up_proj", "down_proj")]
SHARED = [f"model.layers.0.mlp.shared_expert.{name}" for name in ("gate_proj", "up_proj", "down_proj")]
NUMBERED = [f"model.layers.0.block_sparse_moe.experts.0.{name}" for name in ("w1", "w2", "w3")]
ROUTERS = ["model.layers.0.mlp.gate", "model.layers.0.mlp.shared_expert_gate", "model.layers.0.block_sparse_moe.gate"]


@pytest.mark.parametrize(
    ("targets", "present", "adapted"),
    [
        (["all-linear"], [*ATTENTION, *DENSE], [*ATTENTION, *DENSE]),
        (["o_proj"], [*ATTENTION, *DENSE], ATTENTION[3:]),
        (["k_proj"], [*ATTENTION, *DENSE], ATTENTION[:3]),  # which SGLang computes as one
        (["up_proj"], [*ATTENTION, *DENSE], DENSE[:2]),
        (["all-linear"], [*SPARSE, *SHARED], [*SPARSE, *SHARED]),
        (["down_proj"], [*ATTENTION, *SPARSE, *SHARED], [*SPARSE, *SHARED]),  # of experts SGLang needs all
        (["down_proj"], NUMBERED, NUMBERED),
    ],
)
def test_the_layers_of_an_adapter_are_those_that_the_trainer_adapts_and_what_sglang_needs_beside_them(
    tmp_path, targets, present, adapted
):
    found = adapted_layers(targets, write_checkpoint(tmp_path, *present, *ENDS, *ROUTERS))
    assert found == {layer: [8, 4] for layer in adapted}


def make_model(family: str, folder: Path) -> Path:
    sys.path.append(str(Path(__file__).parents[1] / "models"))
    from tiny_models import Variant, write_tiny

    write_tiny(Variant(family, {"max_position_embeddings": 128}), folder)
    return folder


async def replace(pool: ServerPool, adapter: Path, version: int) -> None:
    async with pool.interrupt(version, Deadline(HUNG_S)) as servers:
        for server in servers:
            await server.load_adapters({ONLY: str(adapter)}, version, HUNG_S)


async def use(pool: ServerPool, made: list[tuple[Path, Path]]) -> tuple[list[Response], list[int]]:
    """Responses that are generated while adapters change, and the tokens found in the cache before and after."""
    await replace(pool, made[0][0], 1)
    asking = asyncio.gather(*(pool.generate([prompt], Sampling(LENGTH, ignore_eos=True)) for prompt in PROMPTS))
    await working(pool)
    await replace(pool, made[1][0], 2)
    responses, cached = [response for (response,) in await asking], []
    for version, (adapter, _) in ((3, made[0]), (4, made[1])):
        await replace(pool, adapter, version)
        for _ in range(2):
            body = {"input_ids": [5 + i % 20 for i in range(80)], "sampling_params": {"max_new_tokens": 4}}
            answer = await pool.servers[0].connection.post("/generate", body, HUNG_S)
            cached.append(answer["meta_info"]["cached_tokens"])
    await pool.servers[0].note_weights(HUNG_S)
    await replace(pool, made[1][0], 5)
    await pool.servers[0].compare_noted(HUNG_S)
    await replace(pool, made[0][0], 6)
    with pytest.raises(ServerError, match="differ from the trainer's"):
        await pool.servers[0].compare_noted(HUNG_S)
    return responses, cached


def distance(networks: Any, prompt: list[int], response: Response) -> float:
    return float(np.abs(real.recomputed_logprobs(networks, prompt, response) - response.logprobs).max())


async def working(pool: ServerPool) -> None:
    """Wait until the server has generated something."""
    seen = set()
    for _ in range(10_000):
        seen.add(str(await pool.servers[0].work_done(HUNG_S)))
        if len(seen) > 2:
            return
        await asyncio.sleep(0.005)


@pytest.mark.long
@pytest.mark.parametrize("family", SERVED)
def test_tokens_are_those_of_the_merged_weights_of_their_version(tmp_path, family):
    model = make_model(family, tmp_path / "model")
    made = [write_adapter(model, tmp_path, seed) for seed in range(3)]
    targets = [*ADAPTERS, f"actor.lora_rank={RANK}", f"actor.lora_alpha={ALPHA:g}", "actor.target_modules=[all-linear]"]
    config = load(DEMO, ["sglang.context_length=128", *targets]).config

    async def run(server: Any) -> tuple[list[Response], list[int], list[Response], Any]:
        async with ServerPool([server.url], server.token, timeout_s=HUNG_S) as pool:
            before = await pool.servers[0].connection.post("/generate", BEFORE, HUNG_S)
            await replace(pool, made[0][0], 0)
            base = await pool.generate([PROMPTS[2]], Sampling(8, ignore_eos=True))
            return *await use(pool, made[1:]), base, before

    with server_on_cpu(config, model, tmp_path) as server:
        responses, cached, base, before = asyncio.run(run(server))
    networks = real.load_networks(*(merged for _, merged in made))
    assert distance(networks, PROMPTS[2], base[0]) < EXACT
    said, tokens = [first for first, *_ in before["meta_info"]["output_token_logprobs"]], before["output_ids"]
    alone = real.transformers_logprobs(model, PROMPTS[0], tokens)
    np.testing.assert_allclose(said, alone, atol=EXACT, err_msg="before the first update an adapter adds nothing")
    assert any(len(set(response.versions)) > 1 for response in responses)
    for prompt, response in zip(PROMPTS, responses, strict=True):
        assert distance(networks, prompt, response) < EXACT
    assert cached == [0, 79, 0, 79]


@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "targets", "launcher"),
    [
        ("qwen3", ["k_proj", "up_proj"], None),
        ("qwen3_moe", ["all-linear"], "expert_adapters_launcher"),
        ("glm4_moe", ["down_proj"], "expert_adapters_launcher"),
    ],
)
def test_experts_and_some_of_the_layers_that_sglang_computes_as_one_may_have_adapters(
    tmp_path, family, targets, launcher
):
    model = make_model(family, tmp_path / "model")
    made = [write_adapter(model, tmp_path, seed, targets=targets) for seed in range(2)]
    lora = [f"actor.lora_rank={RANK}", f"actor.lora_alpha={ALPHA:g}", f"actor.target_modules=[{','.join(targets)}]"]
    config = load(DEMO, ["sglang.context_length=128", *ADAPTERS, *lora]).config

    async def run(server: Any) -> list[list[Response]]:
        async with ServerPool([server.url], server.token, timeout_s=HUNG_S) as pool:
            responses = []
            for version, (adapter, _) in enumerate(made):
                await replace(pool, adapter, version)
                asking = (pool.generate([prompt], Sampling(12, ignore_eos=True)) for prompt in PROMPTS)
                responses.append([response for (response,) in await asyncio.gather(*asking)])
            return responses

    with server_on_cpu(config, model, tmp_path, launcher=launcher) as server:
        of_versions = asyncio.run(run(server))
    networks = real.load_networks(*(merged for _, merged in made))
    for responses in of_versions:
        for prompt, response in zip(PROMPTS, responses, strict=True):
            assert distance(networks, prompt, response) < EXACT


class OneOfSeveral:
    """A trainer that has one of several adapters, and writes it."""

    def __init__(self, adapter: Path) -> None:
        self.adapter, self.trained, self.written = adapter, 0, 0

    async def save_adapters(self, path: Path, *, phase: str, timeout_s: float) -> None:
        self.written += 1
        shutil.copytree(self.adapter, path)


@pytest.mark.long
def test_each_request_is_answered_with_its_own_adapter_and_an_update_sends_those_that_changed(tmp_path):
    """Both are asked the same at once, while one of them changes."""
    model, names = make_model("qwen3", tmp_path / "model"), ("math", "code")
    made = [write_adapter(model, tmp_path, seed) for seed in range(3)]
    overrides = [*ADAPTERS, f"actor.lora_rank={RANK}", f"actor.lora_alpha={ALPHA:g}", "adapters={math: {}, code: {}}"]
    config = load(DEMO, ["sglang.context_length=128", *overrides]).config
    trainers: Any = {name: OneOfSeveral(adapter) for name, (adapter, _) in zip(names, made, strict=False)}

    async def run(server: Any) -> tuple[dict[str, list[Response]], list[int]]:
        async with ServerPool([server.url], server.token, timeout_s=HUNG_S) as pool:
            spec = SyncSpec(HUNG_S, tmp_path, 1, "gloo", 1, adapters=trainers)
            sync, written = AdapterSync(trainers["math"], pool, spec), []

            async def update(version: int) -> None:
                await sync.send(version, Deadline(HUNG_S))
                written.append(sum(trainer.written for trainer in trainers.values()))

            await update(0)
            sampling = {name: Sampling(LENGTH, ignore_eos=True, adapter=name) for name in names}
            asking = {
                name: asyncio.gather(*(pool.generate([prompt], own) for prompt in PROMPTS for _ in range(2)))
                for name, own in sampling.items()
            }
            await working(pool)
            await update(1)  # nothing was trained
            trainers["code"].adapter = made[2][0]
            trainers["code"].trained += 1
            await update(2)
            pool.join(server.url, 1)  # a server that starts again has none of them
            await update(3)
            return {name: [response for (response,) in await each] for name, each in asking.items()}, written

    with server_on_cpu(config, model, tmp_path) as server:
        responses, written = asyncio.run(run(server))
    assert written == [2, 2, 3, 5]
    assert not list(tmp_path.glob("adapters-*"))
    merged = [path for _, path in made]
    of_version = {"math": [merged[0]] * 4, "code": [merged[1], merged[1], merged[2], merged[2]]}
    for name, own in responses.items():
        networks = real.load_networks(*of_version[name])
        assert any(len(set(response.versions)) > 1 for response in own)
        for prompt, response in zip((prompt for prompt in PROMPTS for _ in range(2)), own, strict=True):
            assert distance(networks, prompt, response) < EXACT
