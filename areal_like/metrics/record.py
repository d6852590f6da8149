"""What a run leaves behind: numbers per step, checkpoints, the picture, and where each of them lies."""

import json
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path

from areal_like.errors import writing
from areal_like.metrics.console import View
from areal_like.metrics.phases import Phases
from areal_like.metrics.tensorboard import TensorBoard


class Record:
    """The files of one run directory; the console shows the same numbers.

    Raises RecordError where one of them cannot be written.
    """

    def __init__(self, directory: Path, title: str, view: View, tensorboard: bool) -> None:
        self.directory = directory
        self._title = title
        self._view = view
        self._phases = Phases()
        self._board = TensorBoard(directory / "tensorboard") if tensorboard else None
        self._rewards: dict[int, float] = {}
        self._held_out: dict[int, float] = {}
        self._last = 0
        self._waiting: dict[int, dict[str, float]] = {}  # rows of steps that are still being evaluated
        self._tokens_generated = 0

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Time the body as a phase of the current step."""
        return self._phases(name)

    def checkpoint(self, step: int) -> Path:
        """Where the Hugging Face checkpoint of `step` goes."""
        return self.directory / "checkpoints" / f"step-{step}"

    def held_out(self, step: int, results: Mapping[str, Mapping[str, float]]) -> None:
        """What each set of held-out problems gave after `step` training steps, mean@n first.

        `reward/held_out` is the mean of that over the sets.
        """
        reward = sum(next(iter(numbers.values())) for numbers in results.values()) / len(results)
        self._held_out[step] = reward
        tagged = {f"evaluation/{name}/{key}": value for name, of_it in results.items() for key, value in of_it.items()}
        self._write(step, {"reward/held_out": reward} | tagged)
        if step == 0:
            self._view.say(f"held-out reward before training: {reward:.3f}")
        if len(tagged) > 2:  # of one response to each prompt of one set the row says it all
            said = (
                f"{name} " + ", ".join(f"{key} {value:.3f}" for key, value in of_it.items())
                for name, of_it in results.items()
            )
            self._view.say(f"  held-out at step {step}: " + "; ".join(said))
        if step in self._waiting:
            self._view.row(self._waiting.pop(step) | {"held-out": reward})

    def start(self) -> None:
        """The first step begins: what came before is not part of it."""
        self._phases.pop()

    def step(self, step: int, stats: Mapping[str, float], tokens_generated: int, *, evaluating: bool = False) -> None:
        """One training step with the statistics that it has; `tokens_generated` counts from the start of the run.

        While the step is evaluated, its row waits for `held_out`.
        """
        seconds = self._phases.pop()
        rollout_tokens, self._tokens_generated = tokens_generated - self._tokens_generated, tokens_generated
        throughput = {"throughput/rollout_tokens_per_second": rollout_tokens / seconds["step"]}
        if "tokens" in stats and "training" in seconds:
            throughput["throughput/train_tokens_per_second"] = stats["tokens"] / seconds["training"]
        self._last = step
        if "reward" in stats:
            self._rewards[step] = stats["reward"]
        else:
            self._view.say(f"step {step} was skipped: all of its rewards are missing")
        if stats.get("skipped"):
            self._view.say(f"step {step}: a gradient was not finite, and its optimizer step was skipped")
        tagged = {_TAGS.get(name, name if "/" in name else f"train/{name}"): value for name, value in stats.items()}
        phases = {f"seconds/{name.replace(' ', '_')}": value for name, value in seconds.items()}
        self._write(step, tagged | throughput | phases)
        row = {"step": step, "tok/s": throughput["throughput/rollout_tokens_per_second"], "s": seconds["step"]}
        row |= {column: stats[name] for column, name in _COLUMNS.items() if name in stats}
        if evaluating and step not in self._held_out:
            self._waiting[step] = row
        else:
            self._view.row(row | ({"held-out": self._held_out[step]} if step in self._held_out else {}))

    def finish(self) -> None:
        """Write the summary and the picture, and say where everything lies."""
        from areal_like.metrics.picture import draw_rewards

        picture = self.directory / "rewards.png"
        with writing(picture):
            draw_rewards(picture, self._title, self._rewards, self._held_out)
        summary, last = self.directory / "summary.json", self._last
        numbers = {"steps": last, "held_out": self._held_out, "rewards": self._rewards}
        with writing(summary):
            summary.write_text(json.dumps(numbers, indent=1) + "\n")
        if self._held_out:
            evaluated = sorted({min(self._held_out), max(self._held_out)})
            rewards = " -> ".join(f"{self._held_out[step]:.3f} at step {step}" for step in evaluated)
            self._view.say(f"\nheld-out reward: {rewards} of {last}")
        for what, where in {
            "checkpoint": self.checkpoint(last),
            "reward curve": picture,
            "TensorBoard": self.directory / "tensorboard" if self._board else None,
            "configuration": self.directory / "config.yaml",
            "summary": summary,
        }.items():
            if where:
                self._view.say(f"  {what:<14}{where}")

    def close(self) -> None:
        """Show the rows whose evaluation did not end, and end the files that were kept open."""
        for row in self._waiting.values():
            self._view.row(row)
        if self._board:
            self._board.close()

    def _write(self, step: int, scalars: Mapping[str, float]) -> None:
        if self._board:
            self._board.write(step, scalars)


_COLUMNS = {  # of the table, and the statistics that they show
    "reward": "reward",
    "loss": "loss",
    "kl": "kl",
    "entropy": "entropy",
    "clip": "clip_share",
    "stale": "staleness_mean",
    "lp-diff": "logprob_diff",
}
_TAGS = {
    "reward": "reward/mean",
    "reward_missing": "reward/missing",
    "skipped_batches": "reward/skipped_batches",
    "queue_seconds_mean": "reward/queue_seconds_mean",
    "queue_seconds_max": "reward/queue_seconds_max",
    "staleness_mean": "staleness/mean",
    "staleness_max": "staleness/max",
    "response_length": "rollout/response_length",
    "truncated_share": "rollout/truncated_share",
    "logprob_diff": "rollout/logprob_diff_server_trainer",
    "on_policy_share": "rollout/on_policy_share",
    "tokens": "train/tokens",
}
