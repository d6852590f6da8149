"""Pairs of a response and a reference, with the verdict of a careful grader."""

import json
from pathlib import Path

import pytest

from areal_like.rewards.gsm8k import check, quick, verify

CASES = Path(__file__).parent / "answers"
PAIRS = [json.loads(line) for name in ("graded", "variants", "blind") for line in (CASES / f"{name}.jsonl").open()]


@pytest.mark.parametrize("kind", sorted({pair["kind"] for pair in PAIRS}))
def test_a_pair_is_judged_as_a_careful_grader_does(kind):
    wrong = []
    for pair in (pair for pair in PAIRS if pair["kind"] == kind):
        response, reference = pair["response"], pair["reference"]
        fast, slow = quick(response, reference), verify(response, reference)
        if slow != pair["right"] or fast not in (slow, None) or check(reference):
            wrong.append((response, reference, fast, slow, check(reference)))
    assert wrong == []


def test_references_are_read_as_a_whole():
    for line in (CASES / "references.jsonl").open():
        answer = str(json.loads(line)["answer"])
        assert check(answer) is None and verify(rf"\boxed{{{answer}}}", answer) == 1.0
        assert verify(rf"\boxed{{{answer.rstrip('})')[-1]}}}", answer) == 0.0
