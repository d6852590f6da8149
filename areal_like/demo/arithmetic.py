"""Arithmetic word problems in GSM8K's record form, made up from a seed.

Whether a question belongs to `train` or `test` is decided by a hash of its text alone, so the two never share a
question, for any seeds and sizes.
"""

import hashlib
import itertools
import random
from collections.abc import Iterator

NAMES = ("Tom", "Anna", "Ben", "Mia")
THINGS = ("apples", "books", "coins", "pens", "cards")
ADDING = (
    "{name} has {a} {things} and buys {b} more. How many {things} does {name} have now?",
    "{name} has {a} {things} and finds {b} more. How many {things} does {name} have now?",
)
TAKING_AWAY = (
    "{name} has {a} {things} and loses {b}. How many {things} does {name} have now?",
    "{name} has {a} {things} and gives away {b}. How many {things} does {name} have now?",
)
SPLITS = ("train", "test")
ROLES = ("system", "user", "assistant", "tool")  # of a conversation about a problem
_TEST_SHARE = 26  # of 256


def split_of(question: str) -> str:
    """Return `train` or, for one question in ten, `test`."""
    return "test" if hashlib.sha256(question.encode()).digest()[0] < _TEST_SHARE else "train"


def generate(size: int, max_number: int, seed: int, split: str) -> list[dict[str, str]]:
    """Return `size` records `{"question": ..., "answer": "#### N"}`; operands are 1 to `max_number`, and N >= 0.

    Problems are drawn independently: among few possible ones the same problem comes again.
    """
    rng = random.Random(f"{seed}/{split}")
    records: list[dict[str, str]] = []
    while len(records) < size:
        a, b = rng.randint(1, max_number), rng.randint(1, max_number)
        adding = rng.random() < 0.5
        if not adding:
            a, b = max(a, b), min(a, b)
        template = rng.choice(ADDING if adding else TAKING_AWAY)
        question = template.format(name=rng.choice(NAMES), things=rng.choice(THINGS), a=a, b=b)
        if split_of(question) == split:
            records.append({"question": question, "answer": f"#### {a + b if adding else a - b}"})
    return records


def sentences() -> Iterator[str]:
    """Yield sentences that between them hold every word and digit of any problem, answer and plain conversation."""
    yield "#### 0123456789"
    yield from (f"{role}: \n" for role in ROLES)
    for template, name, things in itertools.product(ADDING + TAKING_AWAY, NAMES, THINGS):
        yield template.format(name=name, things=things, a=1, b=2)
