"""Servers that get adapters alone compute what they would with merged weights, from the version that a token names."""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import serving as real
import torch
from cpu_server import server_on_cpu
from limits import HUNG_S
from safetensors.torch import load_file, save_file

from areal_like.config.load import load
from areal_like.errors import ServerError
from areal_like.preflight import preflight
from areal_like.preflight.served_adapters import SERVED
from areal_like.rollout.pool import Response, Sampling, ServerPool
from areal_like.rollout.sglang.adapters import FLAG, ONLY, ServedAdapter, _adapted_layers
from areal_like.rollout.sglang.http import Deadline
from areal_like.trainer.engine import LoRA
from areal_like.trainer.lora import Adapter, _peft_config
from areal_like.weights.adapters.controller import AdapterSync
from areal_like.weights.sync import SyncSpec

DEMO = Path(__file__).parents[2] / "examples/math/gsm8k_grpo_cpu.yaml"
ADAPTERS = ["actor.use_lora=true", "weight_update={adapters: true, mode: disk}"]
EXPERTS = ["actor.init_model.num_experts=4", "actor.init_model.tie_word_embeddings=false"]
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
        (["actor.use_lora=false"], "RUN-ADAPTERS-LORA"),
        (["weight_update.mode=collective"], "RUN-ADAPTERS-MODE"),
        (["weight_update.full_every=4"], "RUN-ADAPTERS-DELTAS"),
        (["weight_update.checksum=true"], "RUN-ADAPTERS-CHECKSUM"),
        (["actor.init_model.num_experts=4", "actor.target_modules=[q_proj]"], "RUN-ADAPTERS-FAMILY"),
        ([*EXPERTS, "actor.backend=fsdp:d1"], "RUN-ADAPTERS-FAMILY"),
        (["actor.megatron.use_dist_checkpointing=true"], "RUN-ADAPTERS-START"),
        (["rollout.sharing=alternate"], "RUN-ADAPTERS-SHARING"),
        (["device=cuda"], "RUN-ADAPTERS-GPU"),
    ],
)
def test_what_adapters_on_servers_need_is_said_before_the_start(write, overrides, code):
    assert code in codes(write, *overrides)
    assert not [found for found in codes(write) if found.startswith("RUN-ADAPTERS")]


def test_the_layers_of_an_adapter_are_those_that_the_trainer_adapts(tmp_path):
    weights = {
        "model.embed_tokens.weight": torch.zeros(7, 4),
        "model.layers.0.mlp.up_proj.weight": torch.zeros(6, 4),
        "model.layers.0.self_attn.q_proj.weight": torch.zeros(8, 4),
        "model.layers.0.self_attn.q_proj.bias": torch.zeros(8),
        "model.norm.weight": torch.zeros(4),
        "lm_head.weight": torch.zeros(7, 4),
    }
    save_file(weights, tmp_path / "model.safetensors")
    found = {
        targets: dict(_adapted_layers(ServedAdapter(4, 8, [targets]), tmp_path)) for targets in ("q_proj", "all-linear")
    }
    assert found["q_proj"] == {"model.layers.0.self_attn.q_proj": [8, 4]}
    assert found["all-linear"] == {**found["q_proj"], "model.layers.0.mlp.up_proj": [6, 4]}
    assert FLAG not in json.loads(ServedAdapter(4, 8, ["q_proj"]).as_argument())


def make_model(family: str, folder: Path) -> Path:
    sys.path.append(str(Path(__file__).parents[1] / "models"))
    from tiny_models import Variant, write_tiny

    write_tiny(Variant(family, {"max_position_embeddings": 128}), folder)
    return folder


def make_adapter(model: Path, folder: Path, seed: int) -> tuple[Path, Path]:
    """Write an adapter as the trainer does, and the model that it is merged with."""
    lora, generator = LoRA(RANK, ALPHA, ("all-linear",)), torch.Generator().manual_seed(seed)
    weights, tensors, merged = load_file(model / "model.safetensors"), {}, folder / f"merged-{seed}"
    layers = dict(_adapted_layers(ServedAdapter(RANK, ALPHA, ["all-linear"]), model))
    for layer, (outputs, inputs) in layers.items():
        a, b = (torch.randn(size, generator=generator) * 0.15 for size in ((RANK, inputs), (outputs, RANK)))
        tensors |= {f"base_model.model.{layer}.lora_A.weight": a, f"base_model.model.{layer}.lora_B.weight": b}
        weights[f"{layer}.weight"] = Adapter(a, b).merge(weights[f"{layer}.weight"], lora.scale)
    shutil.copytree(model, merged)
    save_file(weights, merged / "model.safetensors", {"format": "pt"})
    adapter = folder / f"adapter-{seed}"
    adapter.mkdir()
    save_file(tensors, adapter / "adapter_model.safetensors")
    names = sorted({layer.rpartition(".")[2] for layer in layers})
    (adapter / "adapter_config.json").write_text(json.dumps(_peft_config(lora, str(model), names)))
    return adapter, merged


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
    made = [make_adapter(model, tmp_path, seed) for seed in range(3)]
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
    made = [make_adapter(model, tmp_path, seed) for seed in range(3)]
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
