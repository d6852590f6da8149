"""The metrics of a step, by their names in loggers."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from areal_like.core.events import Event


class StatsSink(Protocol):
    """Receives the scalars of each step; both methods raise RecordError if writing fails."""

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Add one value per name at `step`; a step may be logged several times."""

    def close(self) -> None:
        """Close the sink after the last call of `log`."""


def idle_share(events: Iterable[Event], role: str, start: float, end: float) -> float | None:
    """Return the mean share of `start` to `end` without events in lanes `ROLE 0`, `ROLE 1`, ...; None without any."""
    lanes: dict[str, list[tuple[float, float]]] = {}
    for event in events:
        if event.lane.rpartition(" ")[0] == role:
            lanes.setdefault(event.lane, []).append((max(event.start, start), min(event.end, end)))
    if not lanes or end <= start:
        return None
    return 1 - sum(map(_cover, lanes.values())) / (len(lanes) * (end - start))


def _cover(spans: list[tuple[float, float]]) -> float:
    """Return the seconds in at least one of the spans."""
    seconds, reached = 0.0, 0.0
    for start, end in sorted(spans):
        seconds += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return seconds


CONTROLLER = "controller"  # the lane's name
_ROLES = {"idle/trainer": "actor", "idle/servers": "server"}  # and the roles of its lanes
_TAGS = {
    "reward": "reward/mean",
    "reward_missing": "reward/missing",
    "skipped_batches": "reward/skipped_batches",
    "queue_seconds_mean": "reward/queue_seconds_mean",
    "queue_seconds_max": "reward/queue_seconds_max",
    "staleness_mean": "staleness/mean",
    "staleness_max": "staleness/max",
    "dropped_groups": "rollout/dropped_groups",
    "response_length": "rollout/response_length",
    "truncated_share": "rollout/truncated_share",
    "logprob_diff": "rollout/logprob_diff_server_trainer",
    "logprob_diff_probe": "rollout/logprob_diff_probe",
    "on_policy_share": "rollout/on_policy_share",
    "routed_share": "rollout/routed_share",
    "kept_ids": "rollout/kept_ids",
    "tokens": "train/tokens",
}


def step_scalars(
    stats: Mapping[str, float], events: Sequence[Event], began: float, end: float, rollout_tokens: int
) -> dict[str, float]:
    """Return the metrics of a step between two times from its statistics, its events and its generated tokens."""
    seconds = {"step": max(end - began, 1e-6)}  # a clock may be set back
    for event in events:
        if event.lane == CONTROLLER:
            seconds[event.name] = seconds.get(event.name, 0.0) + max(event.end - event.start, 0.0)
    throughput = {"throughput/rollout_tokens_per_second": rollout_tokens / seconds["step"]}
    if "tokens" in stats and seconds.get("training", 0.0) > 0:
        throughput["throughput/train_tokens_per_second"] = stats["tokens"] / seconds["training"]
    tagged = {_TAGS.get(name, name if "/" in name else f"train/{name}"): value for name, value in stats.items()}
    phases = {f"seconds/{name.replace(' ', '_')}": value for name, value in seconds.items()}
    shares = {tag: idle_share(events, role, began, end) for tag, role in _ROLES.items()}
    idle = {tag: share for tag, share in shares.items() if share is not None}
    return tagged | throughput | phases | idle
