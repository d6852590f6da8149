"""The example of a user's own algorithm: built through its key, and trained with by the real engines."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from running import CONFIG, ROOT, run

from areal_like.core.algorithms.losses import LossInputs, Sequences
from areal_like.core.config.load import load
from areal_like.preflight import preflight

EXAMPLE = ROOT / "examples/own_algorithm/reinforce.py"
KEY = f"algorithm={EXAMPLE}:make"


def test_the_command_in_its_docstring_passes_the_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    command = re.search(r"python (.*?)\n\"\"\"", EXAMPLE.read_text(), re.DOTALL)
    assert command is not None
    words = command[1].replace("\\\n", "").split()
    checked = preflight(load(ROOT / words[2], words[3:]))
    assert checked.job is not None, list(map(str, checked.findings))
    assert checked.job.algorithm.needs == set()


def test_its_loss_by_hand() -> None:
    """Twice as likely as when it was generated, and ten times, which counts five times; advantages 1 and -2."""
    job = preflight(load(CONFIG, [KEY])).job
    assert job is not None
    logprobs = torch.tensor([-1.0, -1.0], requires_grad=True)
    fields = {
        "behaviour_logprobs": torch.tensor([-1 - math.log(2), -1 - math.log(10)]),
        "advantages": torch.tensor([1.0, -2.0]),
    }
    inputs = LossInputs(logprobs, torch.zeros(2), fields, Sequences(torch.zeros(2, dtype=torch.int64), 1))
    loss, _ = job.algorithm.loss.function(inputs, job.algorithm.loss.parameters)
    (gradient,) = torch.autograd.grad(loss.sum(), logprobs)
    np.testing.assert_allclose(gradient, [-2, 10], rtol=1e-5)


@pytest.mark.long
def test_real_ranks_train_with_it(tmp_path: Path) -> None:
    with run(tmp_path, KEY, "total_train_steps=2", "actor.ppo_n_minibatches=1") as started:
        assert started.end() == 0, started.errors
        assert json.loads((started.directory / "summary.json").read_text())["steps"] == 2
