"""What `test_versions.py` says of the CPU, with CUDA graphs, the overlap schedule, experts and nccl; needs one GPU."""

from __future__ import annotations

import asyncio
import secrets
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import serving as real
import torch
from limits import HUNG_S
from local_trainer import LocalTrainer
from safetensors.torch import load_file, save_file

from allocation import ParallelSizes
from areal_like.backends.ray.lifetime import run_lifetime
from areal_like.backends.sglang.options import server_arguments
from areal_like.backends.sglang.process import SGLangServer
from areal_like.core.config.load import load
from areal_like.core.rollout.pool import Response, Sampling, ServerPool
from areal_like.core.rollout.server import ServerSpec
from areal_like.core.weights import SyncSpec, make_sync, publish
from areal_like.demo.init_model import write_init_model

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def like_a_trainers_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process is the trainer's end, and nccl waits for ever between two ends of which one has another setting."""
    monkeypatch.setenv("NCCL_CUMEM_ENABLE", "0")  # as `rank_environment` has it


EXAMPLE = Path(__file__).parents[2] / "examples/math/gsm8k_grpo.yaml"
LENGTH, VERSIONS = 400, 4
PROMPTS = [[5 + (i * 7 + j * 3) % 20 for j in range(4 + i)] for i in range(24)]
SHAPE = [
    *("gconfig.max_new_tokens=400", "actor.init_model.num_hidden_layers=4", "actor.init_model.vocab_size=512"),
    "sglang.extra_args.cuda_graph_max_bs_decode=32",  # as many as there are prompts; more take long to capture
]
EXPERTS = [
    *("actor.init_model.num_experts=8", "actor.init_model.moe_intermediate_size=256"),
    "actor.init_model.tie_word_embeddings=false",
]


def peaked(config: Any, folder: Path, seed: int) -> Path:
    """A model in bfloat16 that prefers some tokens clearly."""
    directory = folder / f"model-{seed}"
    write_init_model(config.actor.init_model, directory, seed=seed, dtype="bfloat16")
    torch.manual_seed(seed)
    weights = load_file(directory / "model.safetensors")
    for name, value in weights.items():
        if "norm" not in name:
            weights[name] = torch.randn(value.shape).mul(0.05).to(value.dtype)
    save_file(weights, directory / "model.safetensors", {"format": "pt"})
    return directory


class Lenders(LocalTrainer):
    """A trainer with a rank on each of a server's GPUs, which lends weights there."""

    def __init__(self, model: Path, gpus: int) -> None:
        super().__init__(model, "cuda:0", mode="ipc")
        self._others = [LocalTrainer(model, f"cuda:{gpu}", mode="ipc") for gpu in range(1, gpus)]

    async def transfers(self, step: str, *arguments: Any, timeout_s: float) -> list[Any]:
        for other in self._others:
            other.model = self.model
        one_each = (super().transfer, *(other.transfer for other in self._others))
        return [await transfer(step, *arguments, timeout_s=timeout_s) for transfer in one_each]

    async def transfer(self, step: str, *arguments: Any, timeout_s: float) -> Any:
        return (await self.transfers(step, *arguments, timeout_s=timeout_s))[0]


async def generate(config: Any, folder: Path, models: list[Path], mode: str, backend: str, tp: int) -> list[Response]:
    """Responses during which weights change, from a server on the first GPUs."""
    token = secrets.token_hex(8)
    arguments = server_arguments(config, models[0], ParallelSizes(tp=tp), "cuda")
    spec = ServerSpec("server", arguments, folder / "server.log", token, None, HUNG_S)
    url = await SGLangServer(spec, "127.0.0.1").start()
    trainer = LocalTrainer(models[0], "cuda:1" if backend == "nccl" else "cpu")
    if mode == "ipc":
        trainer = Lenders(models[0], tp)
    async with ServerPool([url], token, HUNG_S) as pool:
        sync = make_sync(mode, trainer, pool, SyncSpec(HUNG_S, folder, 1, backend, bucket_mb=16))
        await sync.connect()
        await publish(sync, 0, HUNG_S)
        await pool.sample(PROMPTS[0], Sampling(LENGTH, ignore_eos=True))
        asking = asyncio.gather(*(pool.sample(prompt, Sampling(LENGTH, ignore_eos=True)) for prompt in PROMPTS))
        for version in range(1, VERSIONS):
            await asyncio.sleep(0.2)
            trainer.model = models[version % 2]
            await publish(sync, version, HUNG_S)
        return await asking


@pytest.mark.parametrize(
    ("mode", "backend", "shape", "tp"),
    [
        ("disk", "gloo", [], 1),
        ("collective", "gloo", [], 1),
        ("collective", "nccl", [], 1),
        ("disk", "gloo", EXPERTS, 1),
        ("ipc", "gloo", [], 1),
        ("ipc", "gloo", EXPERTS, 2),
    ],
    ids=["disk", "gloo", "nccl", "experts", "ipc", "ipc-experts-tp2"],
)
def test_every_token_has_the_version_that_made_it(
    tmp_path: Path, mode: str, backend: str, shape: list[str], tp: int
) -> None:
    """At each change of version: the last token before and the first after it fit their own version and no other."""
    if (backend == "nccl" or tp > 1) and torch.cuda.device_count() < 2:
        pytest.skip("this needs two GPUs")
    config = load(EXAMPLE, [*SHAPE, *shape]).config
    models = [peaked(config, tmp_path, seed) for seed in range(2)]
    with run_lifetime(secrets.token_hex(6)) as folder:
        responses = asyncio.run(generate(config, folder, models, mode, backend, tp))
    check_labels(f"{mode} {backend} tp{tp}", models, responses)


def check_labels(what: str, models: list[Path], responses: list[Response]) -> None:
    """Responses to PROMPTS fit the versions of their tokens, and no others."""
    networks = real.load_networks(*models, device="cuda")
    by_version = {version: networks[version % 2] for version in range(VERSIONS)}
    right, wrong = [], []
    for prompt, response in zip(PROMPTS, responses, strict=True):
        assert len(response.tokens) == LENGTH
        versions = response.versions
        changes = np.flatnonzero(np.diff(versions)) + 1
        for shift in (0, 1, -1):
            response.versions = np.roll(versions, shift)
            response.versions[:1], response.versions[-1:] = versions[:1], versions[-1:]
            apart = np.abs(real.recomputed_logprobs(by_version, prompt, response) - response.logprobs)
            affected = changes if shift == 1 else changes - 1 if shift == -1 else np.arange(LENGTH)
            (wrong if shift else right).extend(apart[affected])
    assert len(wrong) > len(PROMPTS), "updates missed the responses"
    print(f"{what}: right labels {np.mean(right):.4f} apart, labels one token off {np.mean(wrong):.4f}")
    assert np.mean(right) < 0.1
    assert np.mean(wrong) > 5 * np.mean(right)
