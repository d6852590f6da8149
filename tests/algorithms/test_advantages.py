import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from areal_like.algorithms.advantages import group_normalised


def advantages(rewards, groups):
    return group_normalised(np.asarray(rewards, np.float32), np.asarray(groups, np.int32))


def test_a_group_is_normalised_by_its_own_mean_and_deviation():
    np.testing.assert_allclose(advantages([1, 0, 1, 0], [7, 7, 7, 7]), [1, -1, 1, -1])
    np.testing.assert_allclose(advantages([1, 0, 5, 3], [0, 0, 1, 1]), [1, -1, 1, -1])


def test_groups_are_found_by_id_not_by_position():
    np.testing.assert_allclose(advantages([1, 5, 0, 3], [0, 1, 0, 1]), [1, 1, -1, -1])


@given(st.lists(st.tuples(st.floats(-100, 100, width=32), st.integers(0, 3)), min_size=1, max_size=20))
def test_incomplete_groups_never_blow_values_up(pairs):
    rewards, groups = zip(*pairs, strict=True)
    result = advantages(rewards, groups)
    for group in set(groups):
        member = np.asarray(groups) == group
        assert np.abs(result[member]).max() <= np.sqrt(max(member.sum() - 1, 0)) + 1e-3
        assert abs(result[member].sum()) < 1e-2 * member.sum()


def test_a_lone_or_unanimous_group_teaches_nothing():
    assert not advantages([1.0], [0]).any()
    assert not advantages([0.1, 0.1, 0.1], [0, 0, 0]).any()
