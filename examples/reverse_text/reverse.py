"""Reverse a text character by character: rows of words or sentences, and a reward that counts right parts."""

import random
from difflib import SequenceMatcher

SYLLABLES = [consonant + vowel for consonant in "bdfgklmnprstvz" for vowel in "aeiou"]
INSTRUCTION = "Reverse the text below character by character. Answer with the reversed text alone.\n\n"


def sentences(words: int, size: int, seed: int, instruction: str = INSTRUCTION) -> list[dict[str, str]]:
    """Return rows of `words` invented words each."""
    rng = random.Random(seed)
    rows = []
    for _ in range(size):
        text = " ".join("".join(rng.choices(SYLLABLES, k=rng.randint(1, 3))) for _ in range(words))
        rows.append({"question": instruction + text, "answer": text[::-1]})
    return rows


def train() -> list[dict[str, str]]:
    """Return training rows of sentences, for a pretrained model."""
    return sentences(5, 8192, seed=0)


def test() -> list[dict[str, str]]:
    """Return evaluation rows of sentences."""
    return sentences(5, 512, seed=1)


def train_words() -> list[dict[str, str]]:
    """Return training rows of two words without an instruction, for a generated model."""
    return sentences(2, 16384, seed=0, instruction="")


def test_words() -> list[dict[str, str]]:
    """Return evaluation rows of two words."""
    return sentences(2, 512, seed=1, instruction="")


def score(response: str, row: dict) -> float:
    """Return how much of the reversed text the response has, from 0 to 1."""
    return SequenceMatcher(None, response.strip(), row["answer"], autojunk=False).ratio()
