"""A run through its command line, watched from outside: what it is made of, what it says, what it leaves."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest
from limits import HUNG_S

from areal_like.backends.ray.janitor import RUN_VARIABLE, members
from areal_like.backends.ray.lifetime import temporary_directory

ROOT = Path(__file__).parents[1]
SCRIPT, CONFIG = ROOT / "examples/math/gsm8k_rl.py", ROOT / "examples/math/gsm8k_grpo_cpu.yaml"
REST = 10  # multiples of the CPU time of one look, until the next one
LISTEN = "0A"  # a state in /proc/net/tcp, proc_pid_net(5)
# Small, but with two trainer ranks and a server, and a model that solves some problems and not all.
SMALL = (
    "experiment_name=test",
    "trial_name=run",
    "recover.mode=off",
    "train_dataset.batch_size=4",
    "train_dataset.arithmetic.size=64",
    "valid_dataset.arithmetic.size=64",
    "gconfig.n_samples=4",
    "warm_start.batch_size=128",
    "evaluator.freq_steps=null",
    "scheduler.startup_timeout_s=1500",
    "rollout.startup_timeout_s=1500",
    "weight_update.timeout_s=600",
    "evaluator.temperature=0",  # greedy, so that transformers can give the same answers
)

# Tiny, and without an end: for what happens to its servers.
ENDLESS = (
    *("total_train_epochs=10000", "total_train_steps=null", "warm_start=null"),
    *("evaluator.at_start=false", "evaluator.at_end=false"),
    *("actor.init_model.num_hidden_layers=1", "actor.init_model.hidden_size=64", "train_dataset.batch_size=2"),
)


class Run:
    """A started run. `observe` while it lives: the more often, the more is known that has to be gone."""

    def __init__(
        self,
        folder: Path,
        *overrides: str,
        script: Path = SCRIPT,
        config: Path = CONFIG,
        prefix: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        output: str = "",
    ) -> None:
        self.directory = folder / "runs/test/run"
        self.weights = self.directory / ".weights"  # on their way to the servers, or to a checkpoint
        self._output, self._errors = folder / f"{output}output.txt", folder / f"{output}errors.txt"
        small = SMALL if config == CONFIG else [item for item in SMALL if ".arithmetic." not in item]
        overrides = (*small, f"cluster.fileroot={folder / 'runs'}", *overrides)
        with self._output.open("wb") as output, self._errors.open("wb") as errors:
            self.process = subprocess.Popen(
                [*prefix, sys.executable, str(script), "--config", str(config), *overrides],
                env={**os.environ, "PYTHONPATH": str(ROOT), **(env or {})},
                stdout=output,
                stderr=errors,
                start_new_session=True,
            )
        self.run_id = ""
        self._processes: dict[int, psutil.Process] = {}
        self._ports: set[int] = set()
        self._memory: set[str] = set()
        self._next_look = 0.0

    @property
    def output(self) -> str:
        """What the run printed."""
        return self._output.read_text()

    @property
    def errors(self) -> str:
        """What the run complained about."""
        return self._errors.read_text()

    def steps(self) -> list[int]:
        """Numbers of the rows of the step table."""
        return [int(row[1]) for row in re.finditer(r"^ {1,4}(\d+) ", self.output, re.MULTILINE)]

    def wait_for_step(self, step: int, limit_s: float = 1500) -> None:
        """Return when the run has printed a step."""
        deadline = time.monotonic() + limit_s
        while step not in self.steps():
            if self.process.poll() is not None or time.monotonic() > deadline:
                pytest.fail(f"no step {step}\n{self.output}\n{self.errors}")
            self._look()
            time.sleep(0.2)
        self.observe()

    def wait_for(self, what: Callable[[], object], *, lives: bool | None = True) -> None:
        """Return when something is so, during which the run lives, or is over; None: either."""
        deadline = time.monotonic() + HUNG_S
        while not what():
            assert lives is None or (self.process.poll() is None) == lives, self.output + self.errors
            assert time.monotonic() < deadline, self.output
            self._look()
            time.sleep(0.2)
        self.observe()

    def serving(self) -> list[float]:
        """How many servers held the weights at each step."""
        lines = (self.directory / "metrics.jsonl").read_text().splitlines()
        rows = [json.loads(line) for line in lines if line.endswith("}")]
        return [row["rollout/servers"] for row in rows if "rollout/servers" in row]

    def end(self, limit_s: float = 1500) -> int:
        """Wait for the end; the exit code."""
        deadline = time.monotonic() + limit_s
        while self.process.poll() is None and time.monotonic() < deadline:
            self._look()
            time.sleep(0.2)
        assert self.process.returncode is not None, f"it does not end\n{self.output}\n{self.errors}"
        return self.process.returncode

    def _look(self) -> None:
        """Observe, unless this took a tenth of a core since the last look: the run needs the processors."""
        if time.monotonic() >= self._next_look:
            start = time.thread_time()
            self.observe()
            self._next_look = time.monotonic() + REST * (time.thread_time() - start)

    def observe(self) -> None:
        """Note processes, ports and shared memory."""
        try:
            alive = psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return
        for process in alive:
            try:
                self.run_id = process.environ().get(RUN_VARIABLE, self.run_id)
                self._memory |= set(re.findall(r"/dev/shm/\S+", Path(f"/proc/{process.pid}/maps").read_text()))
            except (psutil.Error, OSError):
                continue
            self._processes[process.pid] = process
        sockets = listening_sockets()
        for pid in (self.process.pid, *self._processes):
            self._ports |= {sockets[link] for link in open_files(pid) & sockets.keys()}

    def find(self, log: str) -> list[psutil.Process]:
        """Living processes of the run that write to `logs/LOG`, oldest first."""
        file = str(self.directory / "logs" / log)
        found = [process for process in self._processes.values() if _standard_output(process) == file]
        return sorted(found, key=lambda process: process.create_time())

    def remains(self) -> list[str]:
        """What of the run is left a while after its end; empty as soon as nothing is."""
        assert self.run_id, "nothing was observed"
        assert len(self._processes) > 5
        assert len(self._ports) > 3
        deadline = time.monotonic() + HUNG_S
        while (left := self._left()) and time.monotonic() < deadline:
            time.sleep(0.2)
        undocumented = undocumented_files(self.directory)
        return [*left, *(f"file {file}, without a row in docs/run.md" for file in undocumented)]

    def _left(self) -> list[str]:
        janitors = [
            process for process in psutil.process_iter(["cmdline"]) if self.run_id in (process.info["cmdline"] or [])
        ]
        observed = [process for process in self._processes.values() if process.is_running()]
        partial = map(str, self.directory.glob("checkpoints/.*"))
        files = [str(temporary_directory(self.run_id)), str(self.weights), *partial, *self._memory]
        return [
            *(f"process {process}" for process in {*members(self.run_id), *janitors, *observed}),
            *(f"port {port}" for port, pid in listening().items() if port in self._ports and not self._is_foreign(pid)),
            *(f"file {file}" for file in files if os.path.exists(file)),
        ]

    def _is_foreign(self, pid: int | None) -> bool:
        """Whether a process is of another run, which may have taken a port that this one had."""
        try:
            return psutil.Process(pid).environ().get(RUN_VARIABLE, self.run_id) != self.run_id if pid else False
        except psutil.Error:
            return False


def undocumented_files(directory: Path) -> list[str]:
    """Return the files of a run's directory that the table of docs/run.md, which has their limits, does not name."""
    rows = re.findall(r"^\| (`[^|]*) \|[^|]+\| +\S.*\|$", (ROOT / "docs/run.md").read_text(), re.MULTILINE)
    names = [name for row in rows for name in re.findall(r"`([^`]+)`", row)]
    # RANK, N and the like stand for one part of a name, and a folder for everything in it
    patterns = [re.sub(r"\b[A-Z]+\b", "[^/]+", re.escape(name)) + ".*" * name.endswith("/") for name in names]
    files = [str(file.relative_to(directory)) for file in directory.rglob("*") if file.is_file()]
    return [file for file in files if not any(re.fullmatch(pattern, file) for pattern in patterns)]


@contextmanager
def run(
    folder: Path,
    *overrides: str,
    script: Path = SCRIPT,
    config: Path = CONFIG,
    env: Mapping[str, str] | None = None,
) -> Iterator[Run]:
    """Start a run, and end it at the latest with the block."""
    started = Run(folder, *overrides, script=script, config=config, env=env)
    try:
        yield started
    finally:
        if started.process.poll() is None:
            started.process.send_signal(signal.SIGKILL)
            started.process.wait()


def listening() -> dict[int, int | None]:
    """Process of every listening TCP port of this host."""
    return {c.laddr.port: c.pid for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN}


def listening_sockets() -> dict[str, int]:
    """Port of every listening TCP socket of this host, by the name that /proc/PID/fd gives it."""
    tables = [Path(f"/proc/self/net/{name}") for name in ("tcp", "tcp6")]
    rows = [line.split() for table in tables if table.exists() for line in table.read_text().splitlines()[1:]]
    return {f"socket:[{row[9]}]": int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == LISTEN}


def open_files(pid: int) -> set[str]:
    """What the descriptors of a process refer to."""
    found = set()
    with suppress(OSError):  # ended meanwhile
        for entry in os.scandir(f"/proc/{pid}/fd"):
            with suppress(OSError):  # closed meanwhile
                found.add(os.readlink(entry.path))
    return found


def writing(logs: Path) -> list[psutil.Process]:
    """Living processes whose output goes to a run's logs: ranks, servers and the actors around them."""
    found = []
    for process in psutil.process_iter():
        try:
            if os.readlink(f"/proc/{process.pid}/fd/1").startswith(str(logs)):
                found.append(process)
        except OSError:  # ended meanwhile, or another user's
            continue
    return found


def _standard_output(process: psutil.Process) -> str | None:
    try:
        return os.readlink(f"/proc/{process.pid}/fd/1")
    except OSError:
        return None
