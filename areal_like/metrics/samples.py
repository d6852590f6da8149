"""Samples: prompts, responses and rewards of each step as lines of JSON, and their selection for display."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TypedDict

import numpy as np

from areal_like.core.errors import writing
from areal_like.core.types import Ints, Trajectory
from areal_like.metrics.lines import Lines, read_rows

FOLDER = "samples"
MOST_FILES = 200  # for training steps, and for each evaluation set; older files are thinned out
type Decode = Callable[[Sequence[int]], str]


class SampleRow(TypedDict):
    """A trajectory as text; null values were not finite, or are missing.

    `versions` has [weight version, tokens] for each stretch, -1 where no model generated, as in tool output.
    """

    group: int
    sample_id: int
    reward: float | None
    parts: dict[str, float | None]
    finish_reason: str
    tokens: int
    versions: list[list[int]]
    prompt: str
    response: str


def sample_of(item: Trajectory, decode: Decode) -> SampleRow:
    """Return a trajectory as text; the prompt is everything before the first generated token."""
    start = int(np.argmax(item.generated))
    return {
        "group": item.group_id,
        "sample_id": item.sample_id,
        "reward": item.reward,
        "parts": dict(item.reward_parts),
        "finish_reason": str(item.finish_reason),
        "tokens": int(item.generated.sum()),
        "versions": _stretches(item.versions[start:]),
        "prompt": decode(item.tokens[:start].tolist()),
        "response": decode(item.tokens[start:].tolist()),
    }


def write_samples(directory: Path, step: int, name: str | None, samples: Iterable[SampleRow]) -> None:
    """Write the samples of a training step, or of the evaluation set `name`; raise RecordError."""
    lines = Lines(_path(directory, step, name))
    lines.write({"step": step, **sample} for sample in samples)
    lines.close()


def thin_out(directory: Path, name: str | None) -> None:
    """Remove every other file of the older half if there are more than MOST_FILES. Raises RecordError."""
    with writing(directory / FOLDER):
        steps = [step for step, of_it in list_written(directory) if of_it == name]
        if len(steps) > MOST_FILES:
            for step in steps[1 : len(steps) // 2 : 2]:
                _path(directory, step, name).unlink(missing_ok=True)


def read_samples(directory: Path, step: int, name: str | None = None) -> list[SampleRow]:
    """Return the samples that `write_samples` wrote, [] if none; raise OSError or RecordError."""
    return read_rows(_path(directory, step, name), SampleRow)


def list_written(directory: Path) -> list[tuple[int, str | None]]:
    """Return step and name of all written files, in order of steps."""
    found: list[tuple[int, str | None]] = []
    for file in (directory / FOLDER).glob("*-*.jsonl"):
        kind, step, *name = file.stem.split("-", 2)
        if step.isdigit() and kind in ("step", "evaluation"):
            found.append((int(step), name[0] if name else None))
    return sorted(found, key=lambda place: (place[0], place[1] or ""))


def by_reward(samples: Iterable[SampleRow], *, best_first: bool = False) -> list[SampleRow]:
    """Return samples in order of reward, by default the worst first; missing rewards come last."""
    sign, missing = -1 if best_first else 1, float("inf")
    return sorted(samples, key=lambda sample: missing if sample["reward"] is None else sign * sample["reward"])


def pick(samples: Sequence[SampleRow], most: int) -> list[SampleRow]:
    """Pick at most `most` samples, from the worst to the best, including one without a reward if there is any."""
    ordered = by_reward(samples)
    places = np.linspace(0, len(ordered) - 1, min(most, len(ordered))).round().astype(int)
    return [ordered[place] for place in places]


def reward_of(sample: SampleRow) -> str:
    """Return the reward as text."""
    return "reward missing" if sample["reward"] is None else f"reward {sample['reward']:g}"


def escape(text: str, most: int | None = None) -> str:
    """Return a model's text for a terminal: control characters escaped, and cut in the middle beyond `most`."""
    if most is not None and len(text) > most:
        text = f"{text[: most // 2]} … {text[-(most // 2) :]}"
    return "".join(c if c.isprintable() or (c == "\n" and most is None) else repr(c)[1:-1] for c in text)


def _stretches(versions: Ints) -> list[list[int]]:
    """Return value and length of each stretch of equal values."""
    starts = np.flatnonzero(np.diff(versions, prepend=versions[0] - 1))
    return np.stack([versions[starts], np.diff(starts, append=len(versions))], axis=1).tolist()


def _path(directory: Path, step: int, name: str | None) -> Path:
    file = f"step-{step:06}.jsonl" if name is None else f"evaluation-{step:06}-{name}.jsonl"
    return directory / FOLDER / file
