"""Running means of each prompt's rewards, as estimates of the reward of a new response."""

from collections.abc import Sequence
from hashlib import sha256

import numpy as np

from areal_like.core.types import Floats, Ints, Prompt, value_at


class PromptValues:
    """Exponentially decaying means of rewards, by row of the prompts.

    Rows with the same key share a mean. An observation of a key multiplies the weight of its earlier ones by `decay`,
    and an observation of a step multiplies the weight of earlier steps in the mean over all prompts.
    """

    def __init__(self, keys: Ints, decay: float) -> None:
        self._keys, self._decay = keys, decay
        n_keys = int(keys.max(initial=-1)) + 1
        self._sums, self._counts = np.zeros(n_keys), np.zeros(n_keys)
        self._sum, self._count = 0.0, 0.0

    def observe(self, rows: Sequence[int], rewards: Sequence[float]) -> None:
        """Record the mean rewards of rows in one step, in their order."""
        for row, reward in zip(rows, rewards, strict=True):
            key = self._keys[row]
            self._sums[key] = self._decay * self._sums[key] + reward
            self._counts[key] = self._decay * self._counts[key] + 1
        self._sum = self._decay * self._sum + sum(rewards)
        self._count = self._decay * self._count + len(rewards)

    def mean(self, row: int) -> float | None:
        """Return the mean of a row, or None if its key was never observed."""
        key = self._keys[row]
        return float(self._sums[key] / self._counts[key]) if self._counts[key] else None

    def baselines(self, rows: Sequence[int]) -> Floats:
        """Return the means of rows, `[rows]`, each with the mean over all prompts as one more observation.

        A row that was never observed has the mean over all prompts, or 0 before the first step.
        """
        overall = self._sum / self._count if self._count else 0.0
        keys = self._keys[np.asarray(rows, np.int64)]
        return ((self._sums[keys] + overall) / (self._counts[keys] + 1)).astype(np.float32)


def prompt_keys(prompts: Sequence[Prompt], field: str | None = None) -> Ints:
    """Return a number for each prompt, `[prompts]`: equal for equal tokens and images, or for equal values of `field`.

    Prompts of different sets of a mixture have different numbers.
    """
    numbers: dict[tuple[str, bytes | str], int] = {}
    keys = np.empty(len(prompts), np.int32)
    for row, prompt in enumerate(prompts):
        own = _digest(prompt) if field is None else str(value_at(prompt.row, field))
        keys[row] = numbers.setdefault((prompt.dataset, own), len(numbers))
    return keys


def _digest(prompt: Prompt) -> bytes:
    whole = sha256(np.asarray(prompt.tokens, np.int32))
    for image in prompt.images:
        whole.update(sha256(image).digest())
    return whole.digest()
