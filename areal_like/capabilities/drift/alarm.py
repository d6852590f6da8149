"""The drift alarm: from time to time, servers and trainer score the same responses and have to agree.

A few responses of a batch are the probe. Every server scores them with its present weights, once with its prefix
cache and once without; the trainer scores them as it trains, packed and with shared prompts, before the step. Where the
run replays routes, the trainer's routers choose the experts that a server scored with.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from areal_like.capabilities.drift.backoff import LONGEST, Backoff
from areal_like.capabilities.drift.causes import Distances, Rerouted, likely_cause
from areal_like.capabilities.drift.evidence import find_wrong_layer, measure_pairs
from areal_like.capabilities.drift.routes import ROUTES, Routes, differ, find_rerouted
from areal_like.capabilities.drift.schedule import SHARE, Schedule
from areal_like.capabilities.drift.schema import DriftKeys
from areal_like.core.algorithms.batch import batch_of
from areal_like.core.columns import Columns, join
from areal_like.core.config.keys import with_keys
from areal_like.core.config.schema import RunConfig
from areal_like.core.errors import RunError, ServerError, WeightUpdateError
from areal_like.core.loop.logprob_check import allowed_logprob_diff
from areal_like.core.rollout.http import Deadline
from areal_like.core.rollout.pool import ServerPool
from areal_like.core.rollout.server import Server
from areal_like.core.trainer.remote import Trainer
from areal_like.core.types import Batch, Floats, Trajectory
from areal_like.core.weights import WeightSync, compare_checksums, publish

PROBE_S = 30.0  # that a step waits for all scores of its probe; a server that is late is left out of it


class LogprobDrift(RunError):
    """Trainer and servers have computed different log-probs for several steps; the message names the likely cause."""


@dataclass(frozen=True)
class Score:
    """Log-probs of the probe, and the experts that they were computed with, where the trainer replays them."""

    logprobs: Floats
    routes: Routes | None


@dataclass(frozen=True)
class Probe:
    """Responses, and each server's scores of them, recomputed and with its prefix cache.

    `told` are the tokens that are compared, `generated` the experts of their generation, and `passes` the trainer's
    log-probs of the probe by the experts that it replayed.
    """

    batch: Batch
    told: NDArray[np.bool]
    generated: Routes | None
    scores: dict[str, tuple[Score, Score]]
    passes: list[Score] = field(default_factory=list)


class DriftAlarm:
    """Compares servers and trainer in some steps, warns, and ends the run after `rollout.drift_patience` steps.

    `Schedule` selects the steps; once servers and trainer differ, all are compared.

    `say` gets the warnings; `has_experts`: whether the model is a mixture of experts, and `columns` the forms
    of the columns that servers return, such as the experts that the trainer replays. Of several adapters each has an
    alarm, with its name and its trainer, and the number of `alarms` divides their share of the time.
    """

    def __init__(
        self,
        config: RunConfig,
        trainer: Trainer,
        pool: ServerPool,
        sync: WeightSync,
        say: Callable[[str], None],
        *,
        has_experts: bool,
        columns: Mapping[str, Any],
        adapter: str | None = None,
        alarms: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._schedule = Schedule(SHARE / alarms, clock)
        self._config, self._trainer, self._pool, self._sync, self._say = config, trainer, pool, sync, say
        self._keys = with_keys(config.rollout, DriftKeys)
        self._has_experts, self._columns, self._adapter = has_experts, columns, adapter
        self._allowed = allowed_logprob_diff(config)
        self._probe: Probe | None = None
        self._since: dict[str, list[int]] = {"probe": [], "generation": []}  # versions in a row beyond the limit
        self._backoff = Backoff()
        self._unscored: set[str] = set()
        self._numbers = 0

    async def score(self, trajectories: Sequence[Trajectory]) -> None:
        """Score the probe of a batch on every server within PROBE_S seconds in all, if one is due.

        A server that fails, as under a heavy load, is left out of this step and, by `Backoff`, of some that follow.
        """
        chosen = choose_probe(trajectories, self._keys.drift_probe_tokens)
        self._probe = None
        if not chosen or not (self._since["probe"] or self._schedule.is_due()):
            return
        with self._schedule.measure():
            await self._score(chosen)

    async def _score(self, chosen: Sequence[Trajectory]) -> None:
        whole = batch_of(chosen, version=0)
        batch = Batch(whole.lengths, whole.tokens, {"loss_mask": whole.fields["loss_mask"]}, images=whole.images)
        told = batch.fields["loss_mask"] > 0
        told[np.cumsum(batch.lengths) - batch.lengths] = False
        servers, deadline = self._backoff.select(self._pool.serving), Deadline(PROBE_S)
        scores = await asyncio.gather(*(self._scores_of(server, chosen, deadline) for server in servers))
        found = {server.name: score for server, score in zip(servers, scores, strict=True) if score is not None}
        self._probe = Probe(batch, told, whole.fields.get(ROUTES), found) if found else None

    async def compare(self, version: int) -> dict[str, float]:
        """Compare the probe with the trainer at `version`; return the distance, {} without a probe.

        Raises LogprobDrift where that is beyond the limit for too many steps.
        """
        probe, self._probe = self._probe, None
        if probe is None:
            return {}
        with self._schedule.measure():
            found = {name: await self._distances(probe, *scores) for name, scores in probe.scores.items()}
        worst = float(np.max([(each.anew, each.cached) for each in found.values()]))  # or nan
        await self._judge("probe", version, worst, lambda last: self._cause(probe, found, version, last))
        return {"logprob_diff_probe": worst}

    async def _distances(self, probe: Probe, anew: Score, cached: Score) -> Distances:
        """Return the distances of one server from the trainer."""
        apart = (await self._measure(probe, anew))[probe.told]
        lengths = probe.batch.lengths
        positions = np.arange(len(probe.told)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        otherwise = None
        if anew.routes is not None:
            flips = find_rerouted(anew.routes, probe.generated)[probe.told]
            otherwise = Rerouted(flips, self._columns[ROUTES].with_experts)
        with_cache = (await self._measure(probe, cached))[probe.told]
        return Distances(float(apart.mean()), float(with_cache.mean()), apart, positions[probe.told], otherwise)

    async def _measure(self, probe: Probe, score: Score) -> Floats:
        """Return how far the trainer is from a score, token by token, at the experts that the score was computed with.

        A pass at another score's experts is enough where it agrees, so that servers which agree cost one pass in all.
        """
        for known in probe.passes:
            apart = np.abs(known.logprobs - score.logprobs)
            if apart[probe.told].mean() <= self._allowed or not differ(known.routes, score.routes):
                return apart
        trained = await self._trainer.log_probs(probe.batch.with_field(ROUTES, score.routes), 1.0)
        probe.passes.append(Score(trained, score.routes))
        return np.abs(trained - score.logprobs)

    async def observe(self, version: int, measured: float | None) -> None:
        """Judge the distance of log-probs that were returned during generation, of tokens of `version`.

        With `weight_update.requests=in_place` older weights' KV cache contributes to it without a fault.
        """
        if measured is None or self._config.weight_update.requests == "in_place":
            return

        async def cause(last: bool) -> str:
            return (
                "generation: log-probs of the same tokens agree when scored again, or were not scored again. On the servers "
                "decoding differs from prefill, or sampling differs from the trainer's scoring. Try "
                "sglang.extra_args.disable_cuda_graph=true, and check gconfig"
            )

        await self._judge("generation", version, measured, cause)

    async def _judge(self, kind: str, version: int, measured: float, cause: Callable[[bool], Awaitable[str]]) -> None:
        versions = self._since[kind]
        if measured <= self._allowed:  # nan is not
            versions.clear()
            return
        versions.append(version)
        patience = self._keys.drift_patience
        last = len(versions) >= patience
        policy = f" of the adapter {self._adapter}" if self._adapter else ""
        fact = (
            f"servers and trainer have different log-probs{policy} at version {_range(versions)}: "
            f"{measured:.2g} nats per token on average; rollout.max_logprob_diff allows {self._allowed:g}"
        )
        reason = await cause(last)
        if last:
            raise LogprobDrift(f"{fact}. The run ends after {patience} such steps (rollout.drift_patience). {reason}")
        self._say(f"warning: {fact} ({len(versions)} of {patience} steps). {reason}")

    async def _cause(self, probe: Probe, found: dict[str, Distances], version: int, last: bool) -> str:
        """Return the likely cause; before the run ends, weights are compared by sending them once more.

        Where these are the trainer's, further passes find the first server's difference.
        """
        anew = [name for name, each in found.items() if not each.anew <= self._allowed]
        weights = await self._differing_weights(version) if last and anew else None
        if last and anew and not weights:
            found = found | {anew[0]: await self._examine(probe, anew[0], found[anew[0]])}
        return likely_cause(found, self._allowed, weights, has_experts=self._has_experts)

    async def _examine(self, probe: Probe, name: str, distances: Distances) -> Distances:
        """Return the distances of a server with the evidence of further passes."""
        score = probe.scores[name][0]

        async def measure(routes: Routes) -> float:
            trained = await self._trainer.log_probs(probe.batch.with_field(ROUTES, routes), 1.0)
            return float(np.abs(trained - score.logprobs)[probe.told].mean())

        if distances.rerouted and score.routes is not None:
            wrong = await find_wrong_layer(measure, score.routes, self._allowed)
            distances = replace(distances, rerouted=replace(distances.rerouted, wrong=wrong))
        server = next((each for each in self._pool.serving if each.name == name), None)
        if self._config.rollout.alternates or server is None:
            return distances
        tokens = probe.batch.tokens[: probe.batch.lengths[0]]
        about = server, self._trainer, tokens, self._columns, Deadline(PROBE_S), self._adapter
        pairs = await measure_pairs(*about)
        return replace(distances, pairs=pairs)

    async def _differing_weights(self, version: int) -> dict[str, str] | None:
        """Return the servers whose weights are not the trainer's, and which are not; None if that cannot be told."""
        if self._config.rollout.alternates:  # servers have no memory for weights in the trainer's time slice
            return None
        problems: dict[str, str | None] = {}
        noted: set[str] = set()  # weights are sent again if a server leaves meanwhile, and are not to be noted then

        @asynccontextmanager
        async def comparing(servers: Sequence[Server], deadline: Deadline) -> AsyncIterator[None]:
            unchanged = [server for server in servers if server.name not in noted]
            noted.update(server.name for server in unchanged)
            await asyncio.gather(*(server.note_weights(deadline.left) for server in unchanged))
            adapters = self._config.weight_update.adapters  # alone are not the weights that the trainer sums up
            async with nullcontext() if adapters else compare_checksums(self._trainer, servers, deadline):
                yield
            found = await asyncio.gather(*(_problem(server, deadline.left) for server in servers))
            problems.update({server.name: text for server, text in zip(servers, found, strict=True)})

        checking, self._pool.checking = self._pool.checking, comparing
        try:
            await publish(self._sync, version, self._config.weight_update.timeout_s)
        except WeightUpdateError as error:
            refusal = _difference(error.__cause__)
            return {"every server": f"weights do not arrive as they are sent: {refusal}"} if refusal else None
        finally:
            self._pool.checking = checking
        differing = {name: text for name, text in problems.items() if text}
        return None if not differing and None in problems.values() else differing

    async def _scores_of(
        self, server: Server, chosen: Sequence[Trajectory], deadline: Deadline
    ) -> tuple[Score, Score] | None:
        """Return one server's scores of the probe anew and with its prefix cache; None if it fails."""

        async def score(number: int, cache: str | None) -> tuple[Floats, Columns]:
            item = chosen[number]
            start, left_s = int(np.argmax(item.generated)) - 1, deadline.left
            return await server.token_scores(
                item.tokens,
                left_s,
                start=start,
                cache=cache,
                columns=self._columns,
                images=item.images,
                adapter=self._adapter,
            )

        async def scores(cache: Callable[[int], str | None]) -> Score:
            first = await score(0, cache(0))  # the others find its prompt in the cache
            others = [asyncio.ensure_future(score(i, cache(i))) for i in range(1, len(chosen))]
            try:
                return _join([first, *await asyncio.gather(*others)])
            finally:
                for other in others:
                    other.cancel()

        self._numbers += 1
        shared = ROUTES in self._columns  # the trainer shares prompts and replays one prompt's experts for all
        try:
            anew = await scores(lambda number: f"drift {self._numbers}" + ("" if shared else f" {number}"))
            cached = await scores(lambda number: None)
        except ServerError as error:
            steps = self._backoff.note_failure(server)
            if server.name not in self._unscored:
                self._say(
                    f"warning: {server.name} did not score the drift probe: {error}. It is left out of {steps} more "
                    f"step{'s' * (steps > 1)}, and of twice as many after each further failure, up to {LONGEST}"
                )
            self._unscored.add(server.name)
            return None
        self._backoff.note_score(server)
        return anew, cached


def choose_probe(trajectories: Sequence[Trajectory], most_tokens: int) -> list[Trajectory]:
    """Return responses of one group, which share their prompt, up to a number of tokens, and at least one."""
    usable = [item for item in trajectories if item.generated[1:].any() and not item.generated[0]]
    if not usable or not most_tokens:
        return []
    group = sorted((item for item in usable if item.group_id == usable[0].group_id), key=lambda item: len(item.tokens))
    totals = np.cumsum([len(item.tokens) for item in group])
    return group[: max(1, int((totals <= most_tokens).sum()))]


def _join(parts: Sequence[tuple[Floats, Columns]]) -> Score:
    """Return the scores of sequences back to back."""
    logprobs = np.concatenate([each for each, _ in parts])
    return Score(logprobs, join([(len(each), columns) for each, columns in parts]).get(ROUTES))


async def _problem(server: Server, limit_s: float) -> str | None:
    """Return which weights of a server changed when they were sent again, '' if none, None if it did not report."""
    try:
        await server.compare_noted(limit_s)
    except ServerError as error:
        return _difference(error)
    return ""


def _difference(error: BaseException | None) -> str | None:
    """Return which tensors a server found to differ; None for another error, such as a server that is late."""
    _, differs, tensors = str(error).rpartition("ValueError: ")
    return tensors if isinstance(error, ServerError) and differs else None


def _range(versions: Sequence[int]) -> str:
    return str(versions[0]) if len(versions) == 1 else f"{versions[0]} to {versions[-1]}"
