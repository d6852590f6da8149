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
from limits import HUNG_S
from tiny_models import SERVED, TIED, VARIANTS, Variant, hugging_face_log_probs, write_tiny

from allocation import ParallelSizes
from allocation.families import TRAINED
from areal_like.cluster.ports import reserve_port
from areal_like.config.load import load
from areal_like.preflight.options import NOT_ON_CPU
from areal_like.rollout.sglang import LAUNCHER, TOKEN_VARIABLE
from areal_like.rollout.sglang.options import server_arguments
from areal_like.run.logprob_check import ROUNDING
from areal_like.types import Batch

DEMO = Path(__file__).parents[2] / "examples/math/gsm8k_grpo_cpu.yaml"
WINDOWS = ("mistral-window", "qwen2-window", "qwen3-window", "gemma3_text-window")  # of 8 tokens


@contextmanager
def served(model: Path) -> Iterator[Any]:
    """A server of a model, as a run on CPU starts it; what posts a request to it."""
    options = server_arguments(load(DEMO, ["sglang.context_length=60"]).config, model, ParallelSizes(), "cpu")
    reserved, token = reserve_port("127.0.0.1"), secrets.token_hex(16)
    url = f"http://127.0.0.1:{reserved.getsockname()[1]}"

    def generate(body: dict[str, Any]) -> dict[str, Any]:
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {token}"}
        request = urllib.request.Request(f"{url}/generate", json.dumps(body).encode(), headers)
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
        yield generate
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


@pytest.mark.long
@pytest.mark.parametrize("name", [*SERVED, *WINDOWS])
def test_a_family_starts_and_scores_on_a_cpu(tmp_path: Path, name: str) -> None:
    family = VARIANTS[name].family
    network = write_tiny(Variant(family, {**VARIANTS[name].fields, **TIED.get(family, {})}), tmp_path / "model")
    prompt, sampling = list(range(5, 35)), {"max_new_tokens": 12, "temperature": 1.0, "ignore_eos": True}
    with served(tmp_path / "model") as generate:
        answer = generate({"input_ids": prompt, "sampling_params": sampling, "return_logprob": True})
    tokens = np.array([*prompt, *answer["output_ids"]], np.int32)
    expected = hugging_face_log_probs(network, Batch(np.array([len(tokens)], np.int32), tokens))[len(prompt) :]
    said = [first for first, *_ in answer["meta_info"]["output_token_logprobs"]]
    assert np.abs(expected - said).mean() < ROUNDING["float32"]


def test_every_family_that_a_trainer_has_is_served_or_refused() -> None:
    """A family that is new here is to be tried above, or stands in NOT_ON_CPU."""
    assert set(TRAINED["fsdp"]) | set(TRAINED["megatron"]) == set(SERVED) | NOT_ON_CPU.keys()
