"""Datasets of which one row in four is of use: the others are solved at once, or by chance alone.

Rows are in GSM8K's record form, of the words that the CPU demo knows. The numbers that an unanswerable question would
need are left out, so its answer is one of eleven at random.
"""

import random

from areal_like.demo.arithmetic import NAMES, THINGS, generate

SIZE, MAX_NUMBER = 8192, 5


def train() -> list[dict[str, str]]:
    """Return the training rows: a quarter sums, as in the demo; the rest copies and unanswerable questions."""
    rng = random.Random(0)
    rows = [row | {"kind": "sum"} for row in generate(SIZE // 4, MAX_NUMBER, 0, "train")]
    while len(rows) < SIZE:
        name, things, n = rng.choice(NAMES), rng.choice(THINGS), rng.randrange(11)
        kind = rng.choice(["copy", "unanswerable"])
        question = f"{name} has {f'{n} ' if kind == 'copy' else ''}{things}. How many {things} does {name} have now?"
        rows.append({"question": question, "answer": f"#### {n}", "kind": kind})
    rng.shuffle(rows)
    return rows


def test() -> list[dict[str, str]]:
    """Return the evaluation rows: sums alone, those of the demo."""
    return generate(512, MAX_NUMBER, 0, "test")
