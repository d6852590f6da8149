"""Servers of tiny models as a run starts them, what they say of some prompts, and updates of their weights."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from limits import HUNG_S
from safetensors.torch import load_file
from support.family_launcher import PLACES, launcher_of
from tiny_models import hugging_face_log_probs

from allocation import ParallelSizes
from areal_like.backends.sglang import LAUNCHER, TOKEN_VARIABLE
from areal_like.backends.sglang.options import server_arguments
from areal_like.backends.sglang.server import OPEN_EXPORTED
from areal_like.backends.transports.ipc.handles import device_name, export_handle
from areal_like.core.config.load import load
from areal_like.core.transfer import EXPORT_LAYOUT
from areal_like.core.types import Batch, Device
from areal_like.runtime.ports import reserve_port

MATH = Path(__file__).parents[2] / "examples/math"
EXAMPLES: dict[Device, Path] = {"cpu": MATH / "gsm8k_grpo_cpu.yaml", "cuda": MATH / "gsm8k_grpo.yaml"}
# Several servers share a GPU: each may see most of it, and takes little
LIMITS = ("max_total_tokens=4096", "max_mamba_cache_size=64", "disable_cuda_graph=true")
SETTINGS: dict[Device, list[str]] = {
    "cpu": [],
    "cuda": [
        *("sglang.mem_fraction_static=0.7", "sglang.max_running_requests=16"),
        *(f"sglang.extra_args.{limit}" for limit in LIMITS),
    ],
}

type Post = Callable[[str, dict[str, Any]], Any]
type Measure = Callable[[np.ndarray], Any]


@contextmanager
def served(model: Path, device: Device = "cpu", *overrides: str) -> Iterator[Post]:
    """A server of a model, as a run starts it; what posts a body to a path of it."""
    config = load(EXAMPLES[device], ["sglang.context_length=60", *SETTINGS[device], *overrides]).config
    options = server_arguments(config, model, ParallelSizes(), device)
    reserved, token = reserve_port("127.0.0.1"), secrets.token_hex(16)
    url = f"http://127.0.0.1:{reserved.getsockname()[1]}"

    launcher, places = launcher_of(model) if device == "cpu" else LAUNCHER, os.pathsep.join(PLACES)

    def post(path: str, body: dict[str, Any]) -> Any:
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {token}"}
        request = urllib.request.Request(url + path, json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=HUNG_S) as answer:
            return json.loads(answer.read())

    with (model / "server.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", launcher, *options, "--host", "127.0.0.1", "--port", url.rpartition(":")[2]],
            env={**os.environ, TOKEN_VARIABLE: token, "TMPDIR": str(model), "SPT_NOENV": "1", "PYTHONPATH": places},
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


def score(post: Post) -> list[tuple[Batch, np.ndarray]]:
    """Several prompts with their responses, and a continuation of one; each with the server's log-probs of its end."""
    prompts = [list(range(5, 35)), [7, 8, 9], list(range(40, 57))]
    sampling = {"max_new_tokens": 12, "temperature": 1.0, "ignore_eos": True}
    body = {"input_ids": prompts, "sampling_params": sampling, "return_logprob": True, "logprob_start_len": 0}
    answers = post("/generate", body)
    longer = [*prompts[0], *answers[0]["output_ids"], 3, 4]
    further = post("/generate", {"input_ids": longer, "sampling_params": sampling, "return_logprob": True})
    return [_read(*pair) for pair in zip([*prompts, longer], [*answers, further], strict=True)]


def _read(prompt: list[int], answer: dict[str, Any]) -> tuple[Batch, np.ndarray]:
    tokens = np.array([*prompt, *answer["output_ids"]], np.int32)
    parts = [answer["meta_info"][f"{part}_token_logprobs"] for part in ("input", "output")]
    found = [first for part in parts for first, *_ in part]
    return Batch(np.array([len(tokens)], np.int32), tokens), np.array(found, np.float32)


def distance(network: Any, scored: list[tuple[Batch, np.ndarray]], measure: Measure = np.nanmean) -> list[float]:
    """Return the mean difference, or another measure, of each sequence's log-probs from those of `network`."""
    found = []
    for batch, log_probs in scored:
        expected = hugging_face_log_probs(network, batch)[-len(log_probs) :]
        found.append(float(measure(np.abs(expected - log_probs))))  # NaN at the first token
    return found


def update(post: Post, model: Path, device: Device = "cpu") -> None:
    """Load the tensors of a model in place, each as a bucket of its own."""
    tensors = load_file(model / "model.safetensors", device="cuda:0" if device == "cuda" else "cpu")
    for number, (name, tensor) in enumerate(tensors.items()):
        bucket = tensor.contiguous().flatten().view(torch.uint8)
        layout = json.dumps([(name, str(tensor.dtype).removeprefix("torch."), tensor.shape)])
        handle = export_handle(bucket, model / "bucket")
        last = str(number) if number == len(tensors) - 1 else None
        handles = {
            "zmq_handles": {device_name(tensor.device): handle, EXPORT_LAYOUT: layout},
            "flush_cache": False,
            "weight_version": last,
        }
        assert post(OPEN_EXPORTED, handles)["success"], name


def change(network: torch.nn.Module) -> torch.nn.Module:
    """Change every parameter by about a third."""
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.mul_(1 + 0.3 * torch.randn_like(parameter))
    return network
