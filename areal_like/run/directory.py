"""The directory of a run: owned by one process at a time, and opened again by the command that resumes the run."""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from psutil import Error, Process

from areal_like.backends.ray import janitor
from areal_like.core.checkpoint.files import size_of, write_durably
from areal_like.core.checkpoint.journal import Journal, RunState, count_steps
from areal_like.core.checkpoint.recovery import Recovery, Saves
from areal_like.core.checkpoint.store import (
    DIRECTORY,
    INTERRUPTED,
    JOURNAL,
    Checkpoint,
    Store,
    lost_by_restart,
    newest,
    put_aside,
)
from areal_like.core.config.load import dump
from areal_like.core.config.schema import RunConfig, TrainerRole
from areal_like.core.errors import CheckpointError, DirectoryTaken, PreparationError, private, private_files
from areal_like.data.dataset import fingerprints
from areal_like.job import Job
from areal_like.metrics.console import View, complain
from areal_like.metrics.names import METRICS_FILE, SUMMARY_FILE
from areal_like.metrics.record import Record
from areal_like.metrics.rollback import forget
from areal_like.metrics.scalars import StatsSink
from areal_like.preflight.machine import CONFIG_FILE, FAILED_FILE
from areal_like.runtime.owner import Ownership, Silence, describe_owner, holders, last_owner, take_over

CLEAN_UP_S = 120.0  # that the clean-up of a run that was killed may take; it takes seconds
END_S = 15.0  # that a run may take which is just ending
FORK_S = 2.0  # for a new fork, which holds the lock for a moment
_kept: set[int] = set()


def patience(holders: Sequence[Process]) -> float:
    """Return how long to wait for the lock's holders: only a run's janitor certainly ends by itself."""
    ours = [_is_janitor(process) for process in holders]
    if all(ours):  # also where there are none, as the holder is on another host
        return CLEAN_UP_S
    return END_S if any(ours) else FORK_S


def describe_holders(holders: Sequence[Process]) -> tuple[str, str]:
    """Return who holds the lock, and how to end them; janitors end with the others."""
    chosen = [process for process in holders if not _is_janitor(process)] or holders
    ids = " ".join(str(process.pid) for process in chosen)
    return "; ".join(map(_describe, chosen)), f"End it with `kill {ids}` (`kill -9 {ids}` if that does not help)"


@contextmanager
def kept_from_forks(descriptor: int) -> Iterator[None]:
    """Release the lock in forks of this process: a fork that outlives it would keep the run's directory."""
    _kept.add(descriptor)
    try:
        yield
    finally:
        _kept.discard(descriptor)


def _describe(process: Process) -> str:
    with suppress(Error):
        started = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(process.create_time()))
        return f"process {process.pid} (`{_command(process)[:200]}`, started {started}) holds its lock"
    return f"process {process.pid} holds its lock"


def _is_janitor(process: Process) -> bool:
    return janitor.__name__ in _command(process)


def _command(process: Process) -> str:
    with suppress(Error):
        return " ".join(process.cmdline())
    return ""


def _let_go() -> None:
    """Release the locks in a fork; the numbers stay in use, because the fork may close them once more."""
    for descriptor in _kept:
        nowhere = os.open(os.devnull, os.O_RDWR)
        os.dup2(nowhere, descriptor, inheritable=False)
        os.close(nowhere)


os.register_at_fork(after_in_child=_let_go)


@dataclass(frozen=True)
class RunDirectory:
    """A run's record and the state it starts from; `lock` is the descriptor of the directory's lock."""

    record: Record
    checkpoint: Checkpoint | None = None
    store: Store | None = None
    journal: Journal | None = None
    lock: int | None = None

    @property
    def state(self) -> RunState:
        """State of the checkpoint, or of a new run."""
        return self.checkpoint.state if self.checkpoint else RunState()

    def roll_back(self, open_sinks: Callable[[int], Sequence[StatsSink]], say: Callable[[str], None]) -> "RunDirectory":
        """Return the run at its newest whole checkpoint, or at its beginning if it has no step; later steps are void.

        Blocks, so that a thread has to call it. Raises CheckpointError where steps have no checkpoint.
        """
        if self.store is None or self.journal is None:
            raise CheckpointError(f"{self.record.directory} has no checkpoints (recover.mode=off)")
        found, incomplete = newest(self.store.directory)
        complain(f"{problem}; searching for an earlier checkpoint" for problem in incomplete)
        if found is None and (lost := lost_by_restart(self.store.directory, incomplete)):
            raise CheckpointError(f"{lost}. The trainer cannot restart without one: lower recover.freq_steps")
        version = found.state.version if found else 0
        self.journal.cut(version)
        self.store.clean(version)
        self.record.roll_back(version if found else None, open_sinks)
        if found:
            self.record.resume(found.state.record, version)
            say(f"resuming from {found.path}, after step {version}")
        return replace(self, checkpoint=found)

    def recovery(self, config: RunConfig, trained: Mapping[TrainerRole, Saves]) -> Recovery | None:
        """Return the recovery that saves checkpoints of the run, or None with `recover.mode: off`."""
        if self.store is None or self.journal is None:
            return None
        return Recovery(
            config=config.recover,
            store=self.store,
            journal=self.journal,
            trained=trained,
            version=self.state.version,
            warn=lambda text: complain([text]),
        )


@asynccontextmanager
async def run_directory(
    job: Job, view: View, open_record: Callable[[int | None], Record]
) -> AsyncIterator[RunDirectory]:
    """Take the directory of a run; `open_record` is given the step from which a record that is there is void.

    Raises PreparationError (DirectoryTaken) and CheckpointError."""
    path = job.config.run_dir
    async with AsyncExitStack() as leaving:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            leaving.enter_context(private_files())
            path.mkdir(exist_ok=True)
            if job.config.recover.mode == "off":
                void_from = _new(job.config, path)
                leaving.push(partial(_vacate, path))
                opened = RunDirectory(open_record(void_from))
            else:
                owner = await _take(path / DIRECTORY, view)
                leaving.callback(owner.release)
                leaving.enter_context(kept_from_forks(owner.lock))
                opened = _open(job, path, view, owner, open_record)
        except OSError as error:
            where, reason = error.filename or path, error.strerror or error
            raise PreparationError(f"{where} (in cluster.fileroot) cannot be used: {reason}") from error
        try:
            yield opened
        except (KeyboardInterrupt, SystemExit, asyncio.CancelledError) as stopped:  # an interrupt cancels its task
            if opened.store:
                if not isinstance(stopped, SystemExit):
                    (path / DIRECTORY / INTERRUPTED).touch()
                with suppress(CheckpointError):
                    stopped.add_note(_way_on(opened.store, job.config.trial_name))
            else:
                stopped.add_note(_NOT_KEPT)
            raise
        except Exception as error:
            if opened.store:
                with suppress(CheckpointError):
                    error.add_note(_way_on(opened.store, job.config.trial_name))
            raise


def _new(config: RunConfig, path: Path) -> int | None:
    """Write the configuration of a run without recovery; return 0 where another one has failed here before a step."""
    try:
        with open(
            path / CONFIG_FILE, "x", opener=private
        ) as file:  # of runs that start together, one has the directory
            file.write(dump(config))
    except FileExistsError as error:
        problem = f"{path} belongs to a run that started at the same time"
        raise DirectoryTaken(f"{problem}; set trial_name to another name") from error
    if size_of(path / FAILED_FILE) is None:
        return None
    forget(path, 0)
    (path / FAILED_FILE).unlink()
    return 0


def _vacate(path: Path, kind: type[BaseException] | None, *_: object) -> None:
    """Give up the directory of a run that failed before its first step: the same command may start again there."""
    if kind is not None and not size_of(path / METRICS_FILE):
        with suppress(OSError):
            (path / CONFIG_FILE).replace(path / FAILED_FILE)


def _open(
    job: Job, path: Path, view: View, owner: Ownership, open_record: Callable[[int | None], Record]
) -> RunDirectory:
    """Open the run at its newest complete checkpoint, or at its beginning without one."""
    config, directory, existed = job.config, path / DIRECTORY, size_of(path / CONFIG_FILE) is not None
    found, incomplete = newest(directory)
    complain(f"{problem}; searching for an earlier checkpoint" for problem in incomplete)
    journal = _journal(job, directory, owner)
    store = Store(directory, journal.run, config.recover.keep, owner.check)
    version = found.state.version if found else 0
    if found is None and (lost := put_aside(journal, store, incomplete, restart=config.recover.restart)):
        view.say(
            f"{lost}. The run starts at step 0 again (recover.restart), and keeps the old files as unused-… in {directory}"
        )
        journal = _journal(job, directory, owner)
        store = Store(directory, journal.run, config.recover.keep, owner.check)
    journal.cut(version)
    store.clean(version)
    write_durably(path / CONFIG_FILE, dump(config), mode=0o600)
    for ending in (directory / INTERRUPTED, path / SUMMARY_FILE):
        ending.unlink(missing_ok=True)
    void_from = version + 1 if found else 0 if existed else None
    if void_from is not None:
        forget(path, void_from)
    record = open_record(void_from)
    if found:
        store.last = found.path
        record.resume(found.state.record, version)
        view.say(f"resuming from {found.path}, after step {version}")
    return RunDirectory(record, found, store, journal, owner.lock)


def _journal(job: Job, directory: Path, owner: Ownership) -> Journal:
    return Journal(directory / JOURNAL, *fingerprints(job.train_prompts), check=owner.check)


async def _take(directory: Path, view: View) -> Ownership:
    """Wait until nothing is left of the run's last processes; the lock ends with this process and with its janitor."""
    directory.mkdir(exist_ok=True)
    lock = os.open(directory / "lock", os.O_RDWR | os.O_CREAT, 0o644)
    start, silence = time.monotonic(), Silence()
    try:
        with view.doing("waiting for the run's previous processes to end"):
            while (owner := take_over(directory, lock, silence)) is None:
                found = holders(directory / "lock")
                if time.monotonic() - start > patience(found):
                    raise DirectoryTaken(_describe_owner(directory, found))
                await asyncio.sleep(0.5)
            return owner
    except BaseException:
        os.close(lock)
        raise


def _describe_owner(directory: Path, found: Sequence[Process]) -> str:
    """Return the message about an unfinished run, with the present or last holders of its lock."""
    last = last_owner(directory)
    who, end = describe_holders(found) if found else (describe_owner(last[1] if last else None), "End it")
    fact = f"{directory.parent} belongs to a run that has not ended: {who}. Each run needs a directory of its own"
    return f"{fact}. {end}, or set trial_name to another name"


_NOT_KEPT = "Its steps cannot be resumed (recover.mode=off). Set recover.mode=auto to resume runs."


def _way_on(store: Store, name: str) -> str:
    if store.last is not None:
        return f"the last checkpoint is {store.last}; the same command with trial_name={name} resumes from it"
    if count_steps(store.directory / JOURNAL):
        return (
            f"no checkpoint is complete; the same command with trial_name={name} and recover.restart=true starts over"
        )
    return f"no step was completed; the same command with trial_name={name} starts over"
