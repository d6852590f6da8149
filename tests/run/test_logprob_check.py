"""Servers that compute another model than the trainer end the run before it has changed a weight."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from running import run

OTHER_ROPE = """
import json, shutil
from dataclasses import replace
from areal_like.backends.sglang import backend

original = backend.BACKEND.arguments

def with_other_rope(config, model, *rest, **options):
    other = model.parents[2] / "other_model"  # outside of the run
    if not other.exists():
        shutil.copytree(model, other)
        settings = json.loads((other / "config.json").read_text())
        settings |= {"rope_theta": 10.0, "rope_parameters": {"rope_type": "default", "rope_theta": 10.0}}
        (other / "config.json").write_text(json.dumps(settings))
    return original(config, other, *rest, **options)

if __name__ == "__main__":
    backend.BACKEND = replace(backend.BACKEND, arguments=with_other_rope)
    from areal_like.cli import app
    app()
"""


@pytest.mark.long
def test_a_run_whose_servers_read_the_config_differently(tmp_path: Path) -> None:
    (script := tmp_path / "other_rope.py").write_text(OTHER_ROPE)
    learned = (
        "total_train_steps=2",
        "warm_start.steps=30",
        "evaluator.at_start=false",
    )  # random weights hardly look at positions
    with run(tmp_path, *learned, script=script) as started:
        assert started.end() == 1, started.errors
        assert started.steps() == []
        assert started.remains() == []
    message = re.search(
        r"^The run failed: trainer and servers .* before the first step: (\S+) apart on average, where "
        r"rollout.max_logprob_diff allows 0.001; likely causes:\n  - .*rope.*\n  - .*temperature.*\n  - .*weights.*\n$",
        started.errors,
        re.MULTILINE,
    )
    assert message, started.errors
    assert float(message[1]) > 0.01
    assert not (started.directory / "checkpoints").exists()
