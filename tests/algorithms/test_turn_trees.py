"""Advantages of trees whose numbers can be checked by hand, and of trees without branches."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tolerance import assert_close, rounding

from areal_like.algorithms.advantages import estimate
from areal_like.algorithms.batch import join, with_field
from areal_like.algorithms.settings import FROM_GROUP_MEAN, PRESETS, Settings
from areal_like.types import TURN_REWARDS, FinishReason, Node, Trajectory

CENTRED = Settings(reward_norm=FROM_GROUP_MEAN)


def item(reward: float | None, sample: int, *path: tuple[int, int | None, int, bool], group: int = 0) -> Trajectory:
    """A trajectory of one prompt token and nodes: number, parent, tokens, and whether it is trained here."""
    versions, nodes = [-1], list[Node]()
    for number, parent, tokens, trained in path:
        versions += [0 if trained else -1] * tokens
        nodes.append(Node(number, parent, len(versions), tokens))
    n = len(versions)
    ends = (np.arange(n, dtype=np.int32), np.zeros(n, np.float32), np.array(versions, np.int32), FinishReason.STOP)
    return Trajectory(0, group, *ends, reward=reward, sample=sample, nodes=tuple(nodes))


def advantages(items: list[Trajectory], settings: Settings = CENTRED) -> list[list[float]]:
    experience = join(items, 0)
    assert experience is not None
    batch = experience.batch
    return [
        part.round(6).tolist()
        for part in np.split(
            np.asarray(estimate(experience, settings, 100)["advantages"]), np.cumsum(batch.lengths)[:-1]
        )
    ]


def tree(*, group: int = 0) -> list[Trajectory]:
    """A root that branches in two, of which the first branches in two again: rewards 1, 0 and 0.5."""
    return [
        item(1, 0, (0, None, 2, True), (1, 0, 1, True), (2, 1, 2, True), group=group),
        item(0, 1, (0, None, 2, False), (1, 0, 1, False), (3, 1, 1, True), group=group),
        item(0.5, 2, (0, None, 2, False), (4, 0, 3, True), group=group),
    ]


def test_a_node_has_the_mean_of_its_children():
    """The mean of the group is 0.5: the leaves are 0.5, -0.5 and 0, the inner nodes mean(0.5, -0.5) and mean(0, 0)."""
    first, second, third = advantages(tree())
    assert first == [0, 0, 0, 0, 0.5, 0.5]
    assert second == [0, 0, 0, 0, -0.5]
    assert third == [0, 0, 0, 0, 0, 0]


def test_children_count_alike_however_often_they_branch():
    """One child of the root has leaves 1 and 1, the other 0: the root's value is 1/2, that of the group 2/3."""
    items = [replace(each, reward=reward) for each, reward in zip(tree(), (1, 1, 0), strict=True)]
    first, second, third = advantages(items)
    assert_close(first, [0, *[1 / 2 - 2 / 3] * 2, *[1 / 3] * 3])
    assert_close(second, [0, 0, 0, 0, 1 / 3])
    assert_close(third, [0, 0, 0, *[-2 / 3] * 3])


def test_the_baseline_of_the_parent_is_the_value_of_the_last_branching_point():
    """Values less the group's mean: root -1/6, its children 1/3 and -2/3, leaves 1/3 each."""
    items = [replace(each, reward=reward) for each, reward in zip(tree(), (1, 1, 0), strict=True)]
    first, second, third = advantages(items, replace(CENTRED, branch_baseline="parent"))
    assert_close(first, [0, -1 / 6, -1 / 6, 0.5, 0, 0])
    assert_close(second[-1], 0)
    assert_close(third, [0, 0, 0, -0.5, -0.5, -0.5])


def test_turns_behind_a_branching_point_have_one_baseline():
    """A sample of two turns behind the branching point: both are compared with the root's value, 0."""
    items = [
        item(1, 0, (0, None, 1, True), (1, 0, 1, True), (2, 1, 1, True)),
        item(-1, 1, (0, None, 1, False), (3, 0, 1, True)),
    ]
    for baseline in ("group", "parent"):
        assert advantages(items, replace(CENTRED, branch_baseline=baseline)) == [[0, 0, 1, 1], [0, 0, -1]]


def test_groups_have_trees_of_their_own():
    items = [*tree(), *(replace(each, reward=2 * (each.reward or 0)) for each in tree(group=7))]
    both = advantages(items)
    assert both[:3] == advantages(tree())
    np.testing.assert_allclose(both[3], [0, 0, 0, 0, 1, 1])


def test_a_missing_reward_leaves_its_sample_out_of_the_mean():
    """A child without a reward counts nowhere; what the others share is trained on with their mean."""
    first, second, third = tree()
    items = [first, second, replace(third, reward=None)]
    assert advantages(items) == [[0, 0, 0, 0, 0.5, 0.5], [0, 0, 0, 0, -0.5]]


@pytest.mark.parametrize("name", ["grpo", "rloo", "reinforce_pp", "dapo"])
def test_without_a_branch_nothing_changes(name):
    rng = np.random.default_rng(0)
    items = [item(float(rng.normal()), i, (i, None, 3 + i, True), group=i // 3) for i in range(6)]
    plain = [replace(each, nodes=()) for each in items]
    settings = replace(PRESETS[name], overlong_tokens=5)
    made = [join(each, 0) for each in (items, plain)]
    with_nodes, without = (np.asarray(estimate(each, settings, 8)["advantages"]) for each in made if each)
    if len(without) != len(with_nodes):
        without = np.repeat(without, [len(each.tokens) for each in items])
    mask = np.concatenate([each.generated for each in items])
    assert_close(with_nodes[mask], without[mask])


def test_rewards_of_turns_flow_to_the_turns_before_in_all_branches():
    """A shared turn with 1 of its own; branches of 2 and 4 by their turns: 1 + 0.5 * mean(2, 4) = 2.5."""
    items = [
        replace(item(0, 0, (0, None, 1, True), (1, 0, 1, True)), columns={TURN_REWARDS: np.float32([0, 1, 2])}),
        replace(item(0, 1, (0, None, 1, False), (2, 0, 1, True)), columns={TURN_REWARDS: np.float32([0, 0, 4])}),
    ]
    assert advantages(items, Settings(turn_discount=0.5)) == [[0, 2.5, 2], [0, 0, 4]]


def test_a_penalty_for_length_counts_what_samples_share():
    """6 of at most 8 tokens, where the penalty begins at 4: half of it."""
    items = [item(1, 0, (0, None, 4, True), (1, 0, 2, True)), item(1, 1, (0, None, 4, False), (2, 0, 2, True))]
    experience = join(items, 0)
    assert experience is not None
    made = estimate(experience, Settings(overlong_penalty_factor=1.0, overlong_tokens=4), 8)["advantages"]
    assert made.tolist() == [0, *[0.5] * 6, *[0] * 5, 0.5, 0.5]
    assert [each.response_length for each in items] == [6, 6]


def test_a_conversation_that_goes_on_elsewhere_has_the_credit_of_what_follows():
    """Turns 0 and 1, the summary, then two turns in a conversation that begins with it: 0.5 ** turns after each."""
    items = [
        item(1, 0, (0, None, 1, True), (1, 0, 1, True)),
        item(1, 0, (2, 1, 1, True), (3, 2, 1, True)),
    ]
    assert advantages(items, Settings(turn_discount=0.5)) == [[0, 0.125, 0.25], [0, 0.5, 1]]


def costly(items: list[Trajectory], settings: Settings, log_ratios: list[list[float]]) -> list[list[float]]:
    """Advantages of trajectories with these log-ratios of policy to reference at their tokens."""
    experience = join(items, 0)
    assert experience is not None
    ratios = np.concatenate(log_ratios).astype(np.float32)
    experience = with_field(experience, "reference_logprobs", experience.batch.fields["behaviour_logprobs"] - ratios)
    lengths = np.cumsum(experience.batch.lengths)[:-1]
    return [part.tolist() for part in np.split(np.asarray(estimate(experience, settings, 100)["advantages"]), lengths)]


RATIOS = [[9, 1, 2, 3, 4, 5], [9, 8, 8, 8, 6], [9, 8, 8, 7, 8, 9]]  # those at shared tokens of others count nowhere


def test_the_divergence_behind_a_shared_node_is_the_mean_over_its_children():
    """Leaves cost 9 and 6; node 1 costs 3, with their mean behind it, and its sibling 24: 17.25 behind the root."""
    items = [replace(each, reward=0) for each in tree()]
    first, second, third = costly(items, Settings(kl_ctl=1.0), RATIOS)
    behind_root = (3 + 7.5 + 24) / 2
    assert first == pytest.approx([0, -(1 + 2 + behind_root), -(2 + behind_root), -10.5, -9, -5])
    assert second == pytest.approx([0, 0, 0, 0, -6])
    assert third == pytest.approx([0, 0, 0, -24, -17, -9])


def value_of(node: int, costs: dict[int, list[float]], children: dict[int, list[int]], ends: set[int]) -> float:
    """The recursion of the formula: a node's own cost, and the mean over its children and the ends of samples."""
    below = [value_of(child, costs, children, ends) for child in children.get(node, [])]
    below += [0.0] * (node in ends)
    return sum(costs[node]) + (sum(below) / len(below) if below else 0.0)


@pytest.mark.parametrize("by_turn", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_divergences_of_random_trees_are_those_of_the_formula(seed: int, by_turn: bool):
    """Also where a sample ends at a node that others go on from; turns with rewards do not change it."""
    rng = np.random.default_rng(seed)
    children, parents, tokens = dict[int, list[int]](), dict[int, int | None]({0: None}), {0: 2}
    for node in range(1, 8):
        parents[node] = int(rng.integers(0, node))
        children.setdefault(parents[node] or 0, []).append(node)
        tokens[node] = int(rng.integers(1, 4))
    ends = {node for node in range(8) if node not in children} | {int(rng.integers(0, 8))}
    costs = {node: rng.normal(size=count).tolist() for node, count in tokens.items()}
    items, ratios, places, seen = list[Trajectory](), list[list[float]](), dict[int, tuple[int, int]](), set[int]()
    for sample, end in enumerate(sorted(ends)):
        path = [end]
        while (parent := parents[path[0]]) is not None:
            path.insert(0, parent)
        row = [0.0]
        for node in path:
            if node not in seen:
                places[node] = (sample, len(row))
            row += costs[node]
        steps = [(node, parents[node], tokens[node], node not in seen) for node in path]
        seen |= set(path)
        items.append(item(0, sample, *steps))
        ratios.append(row)
    if by_turn:
        items = [replace(each, columns={TURN_REWARDS: np.zeros(len(each.tokens), np.float32)}) for each in items]
    found = costly(items, Settings(kl_ctl=0.5), ratios)
    for node, (sample, place) in places.items():
        whole = value_of(node, costs, children, ends)
        for i in range(tokens[node]):
            expected = -0.5 * (whole - sum(costs[node][:i]))
            assert found[sample][place + i] == pytest.approx(expected, rel=rounding(), abs=rounding(0.05)), (node, i)
