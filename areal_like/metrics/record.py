"""The record of a run: metrics per step, checkpoints and the picture, with their paths."""

import asyncio
import json
import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from areal_like.core.errors import RecordError, private, writing
from areal_like.core.events import Event, EventLog, now, recording, span
from areal_like.core.types import Trajectory
from areal_like.metrics.console import COLUMNS, View, complain
from areal_like.metrics.event_file import EVENTS_FILE, EventFile
from areal_like.metrics.listener import Listener
from areal_like.metrics.names import ABOUT_FILE, SUMMARY_FILE
from areal_like.metrics.rollback import forget
from areal_like.metrics.samples import Decode, SampleRow, escape, pick, reward_of, sample_of, thin_out, write_samples
from areal_like.metrics.scalars import CONTROLLER, StatsSink, step_scalars

WAIT_S = 600.0  # a write that takes longer hangs


class Writer:
    """Executes calls in order; the first failure ends the run at the next call of `do` or `wait`."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._error: BaseException | None = None
        self._closed = False
        threading.Thread(target=self._work, name="record", daemon=True).start()

    def do(self, call: Callable[[], None]) -> None:
        """Queue a call. Raises the error of an earlier one."""
        self._raise()
        self._calls.put(call)

    def wait(self) -> None:
        """Wait until all queued calls have run; blocks, so call it in a thread. Raises RecordError."""
        done = threading.Event()
        self._calls.put(done.set)
        if not self._closed and not done.wait(WAIT_S):
            raise RecordError(f"the run's record was not written within {WAIT_S:g} s: its file system hangs")
        self._raise()

    def close(self) -> None:
        """Stop the thread after all queued calls, which `wait` waits for."""
        self._calls.put(None)
        self._closed = True

    def _raise(self) -> None:
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            try:
                call()
            except BaseException as error:  # noqa: BLE001 - it is the caller's
                self._error = self._error or error


PREFIX = "reward_parts/"
MOST, LONGEST = 100, 200  # names, and characters of a name


class PartNames:
    """The first MOST names of a run's reward parts; `say` receives one warning about all others."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._known: set[str] = set()
        self._has_warned = False

    def limit(self, stats: Mapping[str, float]) -> dict[str, float]:
        """Return a step's statistics without the parts that are not recorded."""
        return {name: value for name, value in stats.items() if PREFIX not in name or self._admit(name)}

    def _admit(self, name: str) -> bool:
        if name in self._known:
            return True
        part = name.partition(PREFIX)[2]
        if len(self._known) < MOST and len(part) <= LONGEST:
            self._known.add(name)
            return True
        if not self._has_warned:
            self._has_warned = True
            shown = part if len(part) <= LONGEST else f"{part[:LONGEST]}..."
            self._say(
                f"warning: the values that reward.function or workflow returns beside the reward have more than {MOST} "
                f"names, or a name of more than {LONGEST} characters. {shown!r} and further such names are not recorded "
                "in the metrics. Return a dict with the same few keys for every response"
            )
        return False


SHOWN_CHARACTERS = 60  # per prompt and response in the console


class Record:
    """The files of one run directory; the console shows the same metrics.

    `about` is written to `run.json`. With `decode`, `n_samples` samples of each step are kept (None: all), and
    `n_shown` of each evaluation are printed. A thread writes everything. If metrics cannot be written, the run ends:
    the next call raises RecordError, and so does `close`. Failures to write events or samples, and failures of
    `listeners`, are reported once. With `void_from` earlier records of this and later steps are void.
    """

    def __init__(
        self,
        directory: Path,
        title: str,
        view: View,
        sinks: Sequence[StatsSink] = (),
        *,
        about: Mapping[str, Any] | None = None,
        listeners: Sequence[Listener] = (),
        void_from: int | None = None,
        decode: Decode | None = None,
        n_samples: int | None = None,
        n_shown: int = 0,
    ) -> None:
        self.directory = directory
        self._title = title
        self._view = view
        self._about = {"title": title, "started": now(), **(about or {})}
        with writing(directory / ABOUT_FILE), open(directory / ABOUT_FILE, "w", opener=private) as file:
            file.write(json.dumps(self._about, indent=1) + "\n")
        self._writer, self._log, self._events = Writer(), EventLog(), EventFile(directory)
        self._listeners, self._sinks = tuple(listeners), list(sinks)
        self._unwritten: set[str] = set()  # files and listeners whose failure was reported
        if void_from is not None:
            self._notify(lambda listener: listener.forget(void_from))
        self._notify(lambda listener: listener.describe(self._about))
        self._part_names = PartNames(view.say)
        self._decode, self._n_samples, self._n_shown = decode, n_samples, n_shown
        self._rewards: dict[int, float] = {}
        self._held_out: dict[int, float] = {}
        self._unjudged: set[int] = set()  # steps whose evaluation had no rewards
        self._last = 0
        self._waiting: dict[int, dict[str, float]] = {}  # rows of steps that are still being evaluated
        self._tokens_generated = 0
        self._step_began = now()

    @property
    def evaluations(self) -> Mapping[int, float]:
        """Mean evaluation reward by step."""
        return self._held_out

    def recording(self) -> AbstractContextManager[None]:
        """Record events (`areal_like.core.events`) of the body and of tasks that it starts."""
        return recording(self._log)

    @contextmanager
    def doing(self, what: str) -> Iterator[None]:
        """Show and record a phase before the first step."""
        with self._view.doing(what), span(CONTROLLER, what):
            yield

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time the body as a phase of the current step."""
        start = now()
        try:
            yield
        finally:
            self._log.note(CONTROLLER, name, start, now(), step=self._last + 1)

    def checkpoint(self, step: int) -> Path:
        """Return the path of the Hugging Face checkpoint of `step`."""
        return self.directory / "checkpoints" / f"step-{step}"

    def held_out(self, step: int, results: Mapping[str, Mapping[str, float]]) -> None:
        """Record the results of each evaluation set after `step` training steps, mean@n first.

        `reward/held_out` is the mean of mean@n over the sets. A set without results had no rewards at all.
        """
        judged = {name: numbers for name, numbers in results.items() if numbers}
        for name in results.keys() - judged.keys():
            self._view.say(
                f"evaluation of {name} at step {step}: all of its rewards are missing, because judging failed; training "
                f"continues (tracebacks: {self.directory / 'logs/rewards.log'})"
            )
        row = self._waiting.pop(step, None)
        if not judged:
            self._unjudged.add(step)
            if row:
                self._view.row(row)
            return
        reward = sum(next(iter(numbers.values())) for numbers in judged.values()) / len(judged)
        self._held_out[step] = reward
        tagged = {f"evaluation/{name}/{key}": value for name, of_it in judged.items() for key, value in of_it.items()}
        self._write(step, {"reward/held_out": reward} | tagged)
        if step == 0:
            self._view.say(f"evaluation reward before training: {reward:.3f}")
        if len(tagged) > 2:  # the row suffices for one response to each prompt of one set
            said = (
                f"{name} " + ", ".join(f"{key} {value:.3f}" for key, value in of_it.items())
                for name, of_it in judged.items()
            )
            self._view.say(f"  evaluation at step {step}: " + "; ".join(said))
        if row:
            self._view.row(row | {"eval": reward})

    def state(self, step: int) -> dict[str, Any]:
        """Return the state of earlier steps for a run resumed after `step`; their metrics are written first.

        Blocks, so call it in a thread. Raises RecordError.
        """
        self._writer.wait()
        rewards, held_out = (
            {number: value for number, value in list(of_it.items()) if number <= step}
            for of_it in (self._rewards, self._held_out)
        )
        return {"rewards": rewards, "held_out": held_out}

    def resume(self, state: Mapping[str, Any], step: int) -> None:
        """Continue after `step` with its `state`."""
        self._rewards, self._held_out = (
            {int(number): value for number, value in state[name].items()} for name in ("rewards", "held_out")
        )
        self._last = step

    def roll_back(self, step: int | None, open_sinks: Callable[[int], Sequence[StatsSink]]) -> None:
        """Void the steps after `step`, all with None; `open_sinks` receives the first void step.

        Blocks, so call it in a thread. Raises RecordError.
        """
        void_from = 0 if step is None else step + 1
        self._writer.wait()
        for sink in self._sinks:
            sink.close()
        forget(self.directory, void_from)
        self._notify(lambda listener: listener.forget(void_from))
        self._sinks = list(open_sinks(void_from))
        self._waiting.clear()
        self._unjudged = {each for each in self._unjudged if each < void_from}
        self._rewards, self._held_out, self._last, self._tokens_generated = {}, {}, 0, 0

    def start(self) -> None:
        """Start the first step, which excludes earlier events."""
        self._drain()

    async def samples(self, step: int, trajectories: Sequence[Trajectory], name: str | None = None) -> None:
        """Save some trajectories of a step, or of the evaluation set `name`, and show a few of the latter.

        A thread does the slow work.
        """
        if self._decode is None or self._n_samples == 0:
            return
        kept = await asyncio.to_thread(self._samples_of, trajectories[: self._n_samples])
        self._writer.do(partial(self._optional, "samples", partial(self._write_samples, step, name, kept)))
        self._notify(lambda listener: listener.samples(step, name, kept))
        for sample in pick(kept, self._n_shown) if name else ():
            prompt, response = (escape(sample[key], SHOWN_CHARACTERS) for key in ("prompt", "response"))
            self._view.say(f"  {name} at step {step}, {reward_of(sample)}: {prompt} -> {response}")

    def _samples_of(self, trajectories: Sequence[Trajectory]) -> list[SampleRow]:
        assert self._decode
        return [sample_of(item, self._decode) for item in trajectories]

    def _write_samples(self, step: int, name: str | None, samples: Sequence[SampleRow]) -> None:
        write_samples(self.directory, step, name, samples)
        if self._n_samples is not None:
            thin_out(self.directory, name)

    def step(
        self,
        step: int,
        stats: Mapping[str, float],
        tokens_generated: int,
        *,
        evaluating: bool = False,
        derive: Sequence[Callable[[Mapping[str, float]], Mapping[str, float]]] = (),
    ) -> None:
        """Record one training step with its statistics; `tokens_generated` counts from the start or resumption.

        The functions `derive` are given its metrics and return more of them.

        While the step is evaluated, its row waits for `held_out`.
        """
        began, events = self._step_began, self._drain()
        rollout_tokens, self._tokens_generated = tokens_generated - self._tokens_generated, tokens_generated
        stats = self._part_names.limit(stats)
        scalars = step_scalars(stats, events, began, self._step_began, rollout_tokens)
        for function in derive:
            scalars |= function(scalars)
        self._last = step
        if "reward" in stats:
            self._rewards[step] = stats["reward"]
        else:
            self._view.say(f"step {step} was skipped: all of its rewards are missing")
        if stats.get("unselected"):
            self._view.say(f"step {step} trained nothing: the algorithm selected no response")
        if stats.get("skipped"):
            self._view.say(f"step {step}: a gradient was not finite, and its optimizer step was skipped")
        self._write(step, scalars)
        found = stats | scalars
        row = {"step": step} | {column: found[name] for column, (name, _) in COLUMNS.items() if name in found}
        if evaluating and step not in self._held_out.keys() | self._unjudged:
            self._waiting[step] = row
        else:
            self._view.row(row | ({"eval": self._held_out[step]} if step in self._held_out else {}))

    def finish(self) -> None:
        """Write the summary and the picture, and report where the files are."""
        from areal_like.metrics.picture import draw_rewards

        picture = self.directory / "rewards.png"
        with writing(picture):
            draw_rewards(picture, self._title, self._rewards, self._held_out)
        summary, last = self.directory / SUMMARY_FILE, self._last
        numbers = {"steps": last, "held_out": self._held_out, "rewards": self._rewards}
        with writing(summary):
            summary.write_text(json.dumps(numbers, indent=1) + "\n")
        if self._held_out:
            evaluated = sorted({min(self._held_out), max(self._held_out)})
            rewards = " -> ".join(f"{self._held_out[step]:.3f} at step {step}" for step in evaluated)
            self._view.say(f"\nevaluation reward: {rewards} of {last}")
        board = self.directory / "tensorboard"
        with writing(board):
            has_board = board.exists()
        for what, where in {
            "checkpoint": self.checkpoint(last),
            "reward curve": picture,
            **{name: file for listener in self._listeners for name, file in listener.files.items()},
            "TensorBoard": board if has_board else None,
            "configuration": self.directory / "config.yaml",
            "summary": summary,
        }.items():
            if where:
                self._view.say(f"  {what:<14}{where}")

    def close(self) -> None:
        """Show the rows whose evaluation did not end, and close all files. Raises RecordError."""
        for row in self._waiting.values():
            self._view.row(row)
        with ExitStack() as closing:
            closing.callback(self._writer.close)
            for sink in self._sinks:
                closing.callback(sink.close)
            closing.callback(self._optional, EVENTS_FILE, self._events.close)
            for listener in self._listeners:
                closing.callback(self._optional, listener.name, listener.close)
            self._writer.wait()

    def end(self, how: str) -> None:
        """Record how the run ended; failures to write are ignored."""
        self._log.note("run", how, self._about["started"], now())
        with suppress(RecordError):
            self._drain()

    def _drain(self) -> list[Event]:
        """Write the events so far at the end of a step, and start the next one."""
        events = self._log.drain()
        self._writer.do(partial(self._optional, EVENTS_FILE, partial(self._events.write, events)))
        self._notify(lambda listener: listener.events(events))
        self._step_began = now()
        return events

    def _write(self, step: int, scalars: Mapping[str, float]) -> None:
        for sink in self._sinks:
            self._writer.do(partial(sink.log, step, scalars))
        self._notify(lambda listener: listener.log(step, scalars))

    def _notify(self, call: Callable[[Listener], None]) -> None:
        """Call each listener in the writing thread."""
        for listener in self._listeners:
            self._writer.do(partial(self._optional, listener.name, partial(call, listener)))

    def _optional(self, what: str, write: Callable[[], None]) -> None:
        """Write a file that the run does not need; report a failure once."""
        try:
            write()
        except (RecordError, OSError) as error:
            if what not in self._unwritten:
                self._unwritten.add(what)
                complain([f"{error}; training continues without it ({what})"])
