"""Which hosts have to share the run's files: those that a setting needs, and no others."""

from __future__ import annotations

from pathlib import Path

import pytest
from running import CONFIG, SMALL

from areal_like.core.config.load import load
from areal_like.launch import check
from areal_like.run.file_sharing import find_sharing

MODEL = Path("/runs/initial_model")


@pytest.mark.parametrize(
    ("overrides", "trainer", "server"),
    [
        ((), None, None),
        (("recover.mode=auto",), "recover.mode=auto", None),
        (("weight_update.mode=disk",), "weight_update.mode=disk", "weight_update.mode=disk"),
        (("weight_update.mode=disk", "weight_update.url=auto"), "weight_update.mode=disk", None),
        (("weight_update.mode=disk", "recover.mode=auto"), "weight_update.mode=disk", "weight_update.mode=disk"),
    ],
)
def test_hosts_share_the_files_that_a_setting_needs(
    overrides: tuple[str, ...], trainer: str | None, server: str | None, tmp_path: Path
) -> None:
    job = check(load(CONFIG, [*SMALL, f"cluster.fileroot={tmp_path}", *overrides]))
    sharing = find_sharing(job, {"actor": MODEL})
    for role, expected in (("actor", trainer), ("rollout", server)):
        need = sharing.need(job.plan.engine(role).devices)
        assert (need.setting if need else None) == expected
    assert sharing.models == [MODEL]  # made by the run (actor.init_model)
