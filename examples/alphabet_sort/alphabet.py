"""Sort names in several turns: each turn adds names to those that are sorted already."""

import random
from difflib import SequenceMatcher

TURNS = 3
NAMES = [
    *("Ada", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gina", "Hugo", "Iris", "Jack", "Kim", "Leo", "Mia", "Noah", "Olga"),
    *("Paul", "Quinn", "Rosa", "Sam", "Tina", "Uma", "Vera", "Will", "Xena", "Yara", "Zoe", "Anna", "Carla", "David"),
]


def rows(size: int, seed: int) -> list[dict]:
    """Return conversations of TURNS lists of names, none twice."""
    rng = random.Random(seed)
    made = []
    for _ in range(size):
        names = rng.sample(NAMES, 2 * TURNS)
        turns = [names[2 * turn : 2 * turn + 2] for turn in range(TURNS)]
        made.append({"question": first(turns[0]), "answer": answer(turns[0]), "turns": turns})
    return made


def train() -> list[dict]:
    """Return training rows."""
    return rows(4096, seed=0)


def test() -> list[dict]:
    """Return evaluation rows."""
    return rows(256, seed=1)


def first(names: list[str]) -> str:
    return f"Sort these names alphabetically and answer with the names alone, separated by spaces: {' '.join(names)}"


def answer(names: list[str]) -> str:
    return " ".join(sorted(names))


async def run(row, client):
    """Ask for one turn after the other; the reward is the mean of the turns' scores."""
    messages, scores, names = [], [], []
    for added in row["turns"]:
        names += added
        text = first(added) if not messages else f"Add these names and sort all of them: {' '.join(added)}"
        messages.append({"role": "user", "content": text})
        completion = await client.chat.completions.create(model="policy", messages=messages)
        message = completion.choices[0].message
        messages.append(message)
        scores.append(
            SequenceMatcher(None, (message.content or "").split(), sorted(names), autojunk=False).ratio() ** 4
        )
    return sum(scores) / len(scores)
