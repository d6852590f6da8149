"""Every family that the checks accept for `device=cpu` starts and scores on SGLang's CPU server, or is refused."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from limits import HUNG_S
from safetensors.torch import load_file
from tiny_models import SERVED, TIED, VARIANTS, Variant, hugging_face_log_probs, write_tiny
from torch import Tensor

from allocation import ParallelSizes
from allocation.families import TRAINED
from areal_like.cluster.ports import reserve_port
from areal_like.config.load import load
from areal_like.preflight.options import NOT_ON_CPU
from areal_like.rollout.sglang import EXPORT_LAYOUT, LAUNCHER, TOKEN_VARIABLE
from areal_like.rollout.sglang.ipc import export_handle
from areal_like.rollout.sglang.options import server_arguments
from areal_like.rollout.sglang.server import OPEN_EXPORTED
from areal_like.types import Batch

DEMO = Path(__file__).parents[2] / "examples/math/gsm8k_grpo_cpu.yaml"
EXACT = 1e-4
WINDOWS = ("mistral-window", "qwen2-window", "qwen3-window", "gemma3_text-window")  # of 8 tokens


@contextmanager
def served(model: Path) -> Iterator[Any]:
    """A server of a model, as a run on CPU starts it; what posts a body to a path of it."""
    options = server_arguments(load(DEMO, ["sglang.context_length=60"]).config, model, ParallelSizes(), "cpu")
    reserved, token = reserve_port("127.0.0.1"), secrets.token_hex(16)
    url = f"http://127.0.0.1:{reserved.getsockname()[1]}"

    def post(path: str, body: dict[str, Any]) -> Any:
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {token}"}
        request = urllib.request.Request(url + path, json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=HUNG_S) as answer:
            return json.loads(answer.read())

    with (model / "server.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", LAUNCHER, *options, "--host", "127.0.0.1", "--port", url.rpartition(":")[2]],
            env={**os.environ, TOKEN_VARIABLE: token, "TMPDIR": str(model), "SPT_NOENV": "1"},
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        _wait_until_healthy(url, process, model / "server.log")
        yield post
    finally:
        reserved.close()
        process.kill()  # its children notice and go with it
        process.wait()


def _wait_until_healthy(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + HUNG_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(url + "/health", timeout=HUNG_S):
                return
        except OSError:
            time.sleep(0.2)
    pytest.fail(f"SGLang did not start:\n{log.read_text(errors='replace')[-3000:]}")


def distance(network: Any, post: Any) -> float:
    """Mean difference of the log-probs of a response and its prompt from transformers' in float32."""
    prompt, sampling = list(range(5, 35)), {"max_new_tokens": 12, "temperature": 1.0, "ignore_eos": True}
    body = {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True, "logprob_start_len": 0}
    answer = post("/generate", body)
    tokens = np.array([*prompt, *answer["output_ids"]], np.int32)
    expected = hugging_face_log_probs(network, Batch(np.array([len(tokens)], np.int32), tokens))
    parts = [answer["meta_info"][f"{part}_token_logprobs"] for part in ("input", "output")]
    found = np.array([first for part in parts for first, *_ in part], np.float32)  # NaN at the first token
    return float(np.abs(expected - found)[1:].mean())


def update(post: Any, tensors: dict[str, Tensor], file: Path) -> None:
    """Load tensors in place, each as a bucket of its own."""
    for number, (name, tensor) in enumerate(tensors.items()):
        layout = json.dumps([(name, str(tensor.dtype).removeprefix("torch."), tensor.shape)])
        handle = export_handle(tensor.contiguous().flatten().view(torch.uint8), file)
        last = str(number) if number == len(tensors) - 1 else None
        handles = {"zmq_handles": {"cpu": handle, EXPORT_LAYOUT: layout}, "flush_cache": False, "weight_version": last}
        assert post(OPEN_EXPORTED, handles)["success"], name


@pytest.mark.long
@pytest.mark.parametrize("name", [*SERVED, *WINDOWS])
def test_a_family_scores_on_a_cpu_before_and_after_an_update(tmp_path: Path, name: str) -> None:
    family, model, updated = VARIANTS[name].family, tmp_path / "model", tmp_path / "updated"
    network = write_tiny(Variant(family, {**VARIANTS[name].fields, **TIED.get(family, {})}), model)
    with served(model) as post:
        assert distance(network, post) < EXACT
        change(network)
        network.save_pretrained(updated)
        update(post, load_file(updated / "model.safetensors"), tmp_path / "bucket")
        assert distance(network, post) < EXACT


def change(network: torch.nn.Module) -> None:
    """Change every parameter by about a third."""
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.mul_(1 + 0.3 * torch.randn_like(parameter))


def test_every_family_that_a_trainer_has_is_served_or_refused() -> None:
    """A family that is new here is to be tried above, or stands in NOT_ON_CPU."""
    assert set(TRAINED["fsdp"]) | set(TRAINED["megatron"]) == set(SERVED) | NOT_ON_CPU.keys()
