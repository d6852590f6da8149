"""`train`, as `from areal_like import train` gives it, and `check`: the functions that command line, scripts and
notebooks call."""

import asyncio
import json
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from pathlib import Path, PurePath
from typing import Any

from areal_like.core.config.findings import ConfigError
from areal_like.core.config.load import LoadedConfig, load
from areal_like.core.config.schema import RunConfig
from areal_like.core.errors import RunError
from areal_like.core.user_code import register
from areal_like.job import Job
from areal_like.metrics.console import View, complain
from areal_like.preflight import preflight
from areal_like.rewards import worker
from areal_like.run.assemble import run

type Config = str | Path | Mapping[str, Any] | RunConfig | LoadedConfig


def train(
    config: Config,
    overrides: Sequence[str] | Mapping[str, Any] = (),
    *,
    reward: Any = None,
    workflow: Any = None,
    algorithm: Any = None,
    dataset: Any = None,
    valid_dataset: Any = None,
) -> Path:
    """Check a configuration, train, and return the directory of the run, the only thing that the run leaves.

    `config` is a YAML file, nested mappings, or a configuration; `overrides` are `["gconfig.n_samples=4"]` or
    `{"gconfig.n_samples": 4}`. The objects are used as if `reward.function`, `workflow`, `algorithm`,
    `train_dataset.path` and `valid_dataset.path` named them; a text is what such a key may hold. It works within a
    running event loop too, as in a notebook: there it blocks the cell, and an interrupt ends the run.

    Raises ConfigError with all findings before anything starts, RunError where the run fails, KeyboardInterrupt, and
    SystemExit after SIGTERM.
    """
    if multiprocessing.parent_process() is not None or worker.VARIABLE in os.environ:
        raise RunError("train() was called by a worker process: put the call below `if __name__ == '__main__':`")
    objects = {
        "reward.function": reward,
        "workflow": workflow,
        "algorithm": algorithm,
        "train_dataset.path": dataset,
        "valid_dataset.path": valid_dataset,
    }
    with register({key: it for key, it in objects.items() if it is not None}) as references, _main_script_stays_here():
        changes = [*_texts(overrides), *_texts(references)]
        loaded = config if isinstance(config, LoadedConfig) and not changes else load(config, changes)
        with _main_script_stays_here():
            job = check(loaded)
        view = View(job.config.stats_logger.console)
        try:
            with view.live():
                _run_to_its_end(job, view)
        except ExceptionGroup as group:
            first: Exception = group
            while isinstance(first, ExceptionGroup):
                first = first.exceptions[0]
            for note in getattr(group, "__notes__", ()):
                first.add_note(note)
            raise first from group
        return job.config.run_dir


def check(loaded: LoadedConfig, *, dry_run: bool = False) -> Job:
    """Run every check that needs no process, and report warnings; raises ConfigError if there are errors."""
    checked = preflight(loaded, dry_run=dry_run)
    if checked.job is None:
        raise ConfigError(checked.findings)
    complain(checked.findings)
    return checked.job


def _texts(overrides: Sequence[str] | Mapping[str, Any]) -> list[str]:
    """Return overrides in the form of the command line; JSON is YAML."""
    if not isinstance(overrides, Mapping):
        return list(overrides)
    return [
        f"{key}={value if isinstance(value, str | PurePath) else json.dumps(value)}" for key, value in overrides.items()
    ]


def _run_to_its_end(job: Job, view: View) -> None:
    """Run in this thread, or in one of its own where this one's event loop is busy."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        asyncio.run(run(job, view))
        return
    started: Future[tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]]] = Future()

    async def tell_and_run() -> None:
        async with asyncio.TaskGroup() as tasks:
            started.set_result((asyncio.get_running_loop(), tasks.create_task(run(job, view))))

    with ThreadPoolExecutor(1, "areal-like run") as threads:
        ended = threads.submit(asyncio.run, tell_and_run())
        try:
            with _interrupts_raise():
                ended.result()
        except KeyboardInterrupt:
            loop, task = started.result()
            with suppress(RuntimeError):  # the loop is closed: the run has just ended
                loop.call_soon_threadsafe(task.cancel)
            wait([ended])
            raise


@contextmanager
def _interrupts_raise() -> Iterator[None]:
    """Raise KeyboardInterrupt here on Ctrl-C: asyncio.run's handler would cancel a task of the loop that waits."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def _main_script_stays_here() -> Iterator[None]:
    """Keep multiprocessing's workers from running the caller's script again; they receive the functions that they
    need."""
    names: dict[str, Any] = vars(sys.modules["__main__"])
    hidden: dict[str, Any] = {name: names.pop(name) for name in ("__file__", "__spec__") if name in names}
    names["__spec__"] = None
    try:
        yield
    finally:
        names.update(hidden)
