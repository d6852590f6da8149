"""Pairs of a response and a reference, with the verdict of a careful grader.

`blind.jsonl` was written without looking at the code. `gsm8k.jsonl` is a sample of the labelled model solutions of
openai/grade-school-math (MIT licence).
"""

import json
from pathlib import Path

import pytest

from areal_like.rewards.gsm8k import check, quick, verify

CASES = Path(__file__).parent / "answers"
PAIRS = [
    json.loads(line) for name in ("graded", "variants", "blind", "gsm8k") for line in (CASES / f"{name}.jsonl").open()
]


@pytest.mark.parametrize("kind", sorted({pair["kind"] for pair in PAIRS}))
@pytest.mark.parametrize("nth", [6, pytest.param(1, marks=pytest.mark.long)])
def test_a_pair_is_judged_as_a_careful_grader_does(kind, nth):
    wrong = []
    for pair in [pair for pair in PAIRS if pair["kind"] == kind][::nth]:
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
