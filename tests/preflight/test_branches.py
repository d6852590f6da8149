"""`rollout.branch` before the start: what may run, and what is refused under which key."""

import pytest
from test_preflight import check

BRANCH = ("gconfig.n_samples=4", "gconfig.max_new_tokens=12")
GROUP = """
async def run(prompt, n, rollout):
    return []
"""
EPISODE = """
async def run(row, client):
    return 0.0
"""


def codes(write, *overrides):
    return [it.code for it in check(write(), *BRANCH, *overrides).findings if it.code.startswith("RUN-BRANCH")]


@pytest.mark.parametrize(
    "overrides",
    [
        ["rollout.branch={after: [4]}"],
        ["rollout.branch={after: [4, 8]}"],
        ["rollout.branch={after: [11], width: 4}"],
        ["rollout.branch={after: [4]}", "actor.branch_baseline=parent", "algorithm=rloo"],
    ],
    ids=str,
)
def test_it_may_start(write, overrides):
    assert codes(write, *overrides) == []


@pytest.mark.parametrize(
    ("overrides", "code"),
    [
        (["rollout.branch={after: [4, 4]}"], "RUN-BRANCH"),
        (["rollout.branch={after: [8, 4]}"], "RUN-BRANCH"),
        (["rollout.branch={after: [4], width: 3}"], "RUN-BRANCH"),
        (["rollout.branch={after: [1, 2, 3]}"], "RUN-BRANCH"),
        (["rollout.branch={after: [12]}"], "RUN-BRANCH"),
        (["rollout.branch={after: [4]}", "algorithm=sft"], "RUN-BRANCH"),
        (["rollout.branch={after: [4]}", "algorithm=gigpo"], "RUN-BRANCH"),
        (["rollout.branch={after: [4]}", "algorithm=ppo", "critic={}"], "RUN-BRANCH"),
        (["rollout.branch={after: [4]}", "actor.discount=0.9"], "RUN-BRANCH"),
    ],
    ids=str,
)
def test_it_is_refused(write, overrides, code):
    assert codes(write, *overrides) == [code]


def test_branching_points_of_a_workflow_are_turns(write, tmp_path):
    for name, source, last, expected in (
        ("episode", EPISODE, 4, []),
        ("episode", EPISODE, 5, ["RUN-BRANCH"]),
        ("group", GROUP, 4, ["RUN-BRANCH"]),
    ):
        (tmp_path / f"{name}.py").write_text(source)
        own = (f"workflow={tmp_path / name}.py:run", "episode.max_turns=5", "episode.max_tokens=100")
        assert codes(write, *own, f"rollout.branch={{after: [{last}]}}") == expected


def test_a_baseline_without_branches_is_ignored(write):
    found = check(write(), "actor.branch_baseline=parent").findings
    assert [(it.code, it.key) for it in found if "branch" in str(it.key)] == [("RUN-UNUSED", "actor.branch_baseline")]
