import re

import pytest
from pydantic import ValidationError

from areal_like.core.config.schema import ArithmeticConfig
from areal_like.demo.arithmetic import SPLITS, generate, split_of


@pytest.mark.parametrize("split", ["train", "test"])
def test_answers_are_right_and_never_negative(split):
    for record in generate(300, max_number=20, seed=3, split=split):
        a, b = map(int, re.findall(r"\d+", record["question"]))
        adding = "buys" in record["question"] or "finds" in record["question"]
        assert record["answer"] == f"#### {a + b if adding else a - b}"
        assert 1 <= b <= 20 and 1 <= a <= 20 and (adding or a >= b)


def test_splits_share_no_question_whatever_the_seeds():
    train = {r["question"] for seed in (0, 1) for r in generate(2000, 20, seed, "train")}
    test = {r["question"] for seed in (0, 2) for r in generate(500, 20, seed, "test")}
    assert not train & test
    assert {split_of(question) for question in test} == {"test"}


def test_the_seed_decides_the_problems():
    assert generate(50, 20, 1, "train") == generate(50, 20, 1, "train")
    assert generate(50, 20, 1, "train") != generate(50, 20, 2, "train")


@pytest.mark.parametrize("split", SPLITS)
def test_every_split_has_problems_of_the_smallest_numbers(split):
    """So generating ends: larger operands only add problems, and 2 is the smallest `max_number` of a configuration."""
    with pytest.raises(ValidationError):
        ArithmeticConfig(max_number=1)
    assert len({record["question"] for record in generate(1000, max_number=2, seed=0, split=split)}) > 20
