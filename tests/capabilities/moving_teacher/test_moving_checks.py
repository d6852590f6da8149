"""A teacher that takes the policy's weights has its shape, and follows what moves; this is said before the start."""

from __future__ import annotations

from pathlib import Path

import pytest
from running import CONFIG

from areal_like.config.load import load
from areal_like.config.schema import InitModelConfig
from areal_like.demo.init_model import write_init_model
from areal_like.preflight import preflight

SMALL = "actor.init_model.hidden_size=32"
MOVING_REFERENCE = "ref={update_every_steps: 1, ema_decay: 0.9}"


@pytest.mark.parametrize(
    ("overrides", "codes"),
    [
        ([], ["RUN-TEACHER-MOVES"]),
        ([SMALL], []),
        ([SMALL, "teacher.follows=ref"], ["RUN-TEACHER-MOVES"]),
        ([SMALL, "teacher.follows=ref", "ref={}"], ["RUN-TEACHER-MOVES"]),
        ([SMALL, "teacher.follows=ref", MOVING_REFERENCE], []),
        ([SMALL, MOVING_REFERENCE], ["RUN-UNUSED"]),
    ],
)
def test_a_teacher_that_follows(tmp_path: Path, overrides: list[str], codes: list[str]) -> None:
    write_init_model(InitModelConfig(hidden_size=32), tmp_path / "model", seed=0)
    teacher = ("algorithm=distill", "cluster.n_gpus_per_node=4", "teacher.backend=sglang:d1")
    place = (f"teacher.path={tmp_path / 'model'}", "teacher.update_every_steps=2")
    found = preflight(load(CONFIG, [*teacher, *place, *overrides]))
    about = [
        it.code for it in found.findings if it.code in ("RUN-TEACHER-MOVES", "RUN-TEACHER-MOVES") or it.key == "ref"
    ]
    assert about == codes
    assert found.ok == (codes in ([], ["RUN-UNUSED"]))
