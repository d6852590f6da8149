"""Lose hosts and processes of one run over several hosts at random moments, and check that nothing is trained twice.

    python benchmarks/soak_hosts.py [--losses 50] [--minutes 60] [--seed 1]

Needs root: the hosts are network namespaces on this machine (tests/hosts/namespaces.py). The run has Ray's head and its
controller on host 1, a trainer of two ranks on two hosts, and a server on each of two others. Each loss is one of:

- a trainer rank or a server receives SIGKILL,
- a host is cut off for a while, which heals before or after `cluster.host_timeout_s`,
- all processes of a host receive SIGKILL, and Ray starts there again some seconds later.

Ray ends on a host that was cut off for longer than Ray waits. The script starts it there again, as a supervisor does.

The seconds of a loss last until the run has trained a step after it. Effective training time is the seconds of steps
in the metrics, divided by all seconds since the first step. After each loss the journal must contain no group twice and
every step once, and so must the metrics. Writes
benchmarks/results/soak_hosts_cpu.json after every loss.
"""

import argparse
import json
import os
import random
import re
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import psutil

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests/hosts")]

from host_runs import check_exactly_once, has_ray, interrupt, run_on, written_by  # noqa: E402
from namespaces import Host, reason_to_skip  # noqa: E402
from running import ENDLESS, Run  # noqa: E402

from areal_like.checkpoint.store import DIRECTORY  # noqa: E402
from areal_like.metrics.lines import read_rows  # noqa: E402
from areal_like.metrics.names import METRICS_FILE  # noqa: E402

RESULT = ROOT / "benchmarks/results/soak_hosts_cpu.json"
LAYOUT = ("actor.backend=megatron:d2", "rollout.backend=sglang:d2", "cluster.n_nodes=4")
SETTINGS = (
    *("recover.mode=auto", "recover.freq_steps=5", "recover.restarts_per_hour=1000", "rollout.max_restarts=1000"),
    *("stats_logger.samples=0", "stats_logger.report=false"),
)
RESTARTS = "The trainer restarts from the last checkpoint"
KINDS = ("trainer rank", "server", "brief cut", "long cut", "dead host")
TRAINING_S = 10.0  # between two losses at most, once all servers have the weights
LONGEST_S = 900.0  # until it trains again: hung
BRIEF_S, LONG_S = (2.0, 6.0), (14.0, 25.0)  # of a cut
BACK_S = 5.0  # until Ray starts on a dead host
LOOK_S = 2.0  # between two looks at the hosts for one without Ray


def lose(what: str, rng: random.Random, run: Run, hosts: list[Host]) -> str:
    """Cause one loss; return the part that was lost once its host is back, or before Ray is on it again."""
    role = {"trainer rank": "actor", "server": "rollout"}.get(what) or rng.choice(("actor", "rollout"))
    log = f"{role}-{rng.randrange(2)}.log"
    processes = written_by(run, log)
    if not processes:
        return f"{log} (was not there)"
    newest = max(processes, key=psutil.Process.create_time)
    if what in ("trainer rank", "server"):
        with suppress(psutil.NoSuchProcess):
            newest.kill()
        return log
    (host,) = (each for each in hosts if each.runs(newest))
    if what == "dead host":
        for process in host.processes():
            with suppress(psutil.NoSuchProcess):  # it has ended with another one
                process.kill()
        time.sleep(BACK_S)
        return log
    host.cut()
    time.sleep(rng.uniform(*(BRIEF_S if what == "brief cut" else LONG_S)))
    host.mend()
    return log


def step_of(run: Run) -> int:
    """Return how many rows of steps the run has printed, those of steps that were trained once more included."""
    return len(re.findall(r"^ {1,4}\d+ ", run.output, re.MULTILINE))


def wait(run: Run, what: Callable[[], object], hosts: list[Host], start: Callable[[Host], None]) -> None:
    """Wait until something is so, and start Ray where it has ended; end the program where the run ends or hangs."""
    began = looked = time.monotonic()
    while not what():
        if run.process.poll() is not None or time.monotonic() - began > LONGEST_S:
            raise SystemExit(f"the run ended or hangs\n{run.output[-5000:]}\n{run.errors[-3000:]}")
        if time.monotonic() - looked > LOOK_S:
            for host in hosts:
                if not has_ray(host):
                    print(f"Ray has ended on {host.address} and is started again", flush=True)
                    start(host)
            looked = time.monotonic()
        time.sleep(0.1)


def restarts_trainer(what: str, which: str) -> bool:
    """Whether a loss takes a rank of the trainer, or its host for longer than `cluster.host_timeout_s`."""
    return which in ("actor-0.log", "actor-1.log") and what != "brief cut"


def trains_again(run: Run, restarts: int, rows: int, restarted: bool) -> bool:
    """Whether a step was trained since: after the restart of the trainer, if there was or has to be one."""
    output = run.output
    if restarted or output.count(RESTARTS) > restarts:
        _, found, after = output.rpartition("resuming from ")
        again = bool(found and re.search(r"^ {1,4}\d+ ", after, re.MULTILINE))
        return again and _restarted(output) and output.count(RESTARTS) > restarts
    return step_of(run) > rows


def _restarted(output: str) -> bool:
    return output.rfind("resuming from ") > output.rfind(RESTARTS)


def soak(losses: int, deadline: float, seed: int, tell: Callable[[dict[str, Any]], None]) -> None:
    """Execute one run with up to so many losses; `tell` receives what is known so far after each."""
    rng, done = random.Random(seed), list[dict[str, Any]]()
    with (
        tempfile.TemporaryDirectory() as name,
        run_on(Path(name), 5, *LAYOUT, *ENDLESS, *SETTINGS) as (run, hosts, start),
    ):
        # Before the first complete checkpoint, the loss of a trainer rank ends the run.
        saved = (run.directory / DIRECTORY).glob
        wait(run, lambda: any(saved("step-*/manifest.json")), hosts, start)
        began = time.monotonic()
        while len(done) < losses and time.time() < deadline:
            wait(run, lambda: run.serving()[-1:] == [2.0], hosts, start)
            time.sleep(rng.uniform(0, TRAINING_S))
            what, restarts = rng.choice(KINDS), run.output.count(RESTARTS)
            lost = time.monotonic()
            which = lose(what, rng, run, hosts)
            rows = step_of(run)
            restarted = restarts_trainer(what, which)
            again = partial(trains_again, run, restarts, rows, restarted)
            wait(run, again, hosts, start)
            loss = {"what": what, "of": which, "seconds_lost": round(time.monotonic() - lost, 1)}
            done.append(loss | {"trainer_restarted": run.output.count(RESTARTS) > restarts})
            print(f"loss {len(done)}: {done[-1]}", flush=True)
            tell(_summary(done, run, time.monotonic() - began, seed))
        interrupt(run)
        tell(_summary(done, run, time.monotonic() - began, seed))


def _summary(done: list[dict[str, Any]], run: Run, seconds: float, seed: int) -> dict[str, Any]:
    check_exactly_once(run)
    rows = [
        row for row in read_rows(run.directory / METRICS_FILE, dict[str, int | float | None]) if "seconds/step" in row
    ]
    recorded = [row["step"] for row in rows]
    if recorded != list(range(1, len(recorded) + 1)):
        raise SystemExit(f"the record is not that of one run: steps {recorded}")
    trained = sum(row["seconds/step"] or 0.0 for row in rows[1:])
    of_kind = {kind: [each["seconds_lost"] for each in done if each["what"] == kind] for kind in KINDS}
    return {
        "losses": len(done),
        "trainer_restarts": sum(each["trainer_restarted"] for each in done),
        "seconds": round(seconds, 1),
        "steps": len(recorded),
        "effective_training_time": round(min(1.0, trained / seconds), 3),
        "seconds_lost": {
            kind: {"losses": len(of_it), "median": round(median(of_it), 1), "most": max(of_it)}
            for kind, of_it in of_kind.items()
            if of_it
        },
        "cores": os.cpu_count(),
        "seed": seed,
        "all": done,
    }


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--losses", type=int, default=50)
    parser.add_argument("--minutes", type=float, default=60.0, help="after which no further loss is caused")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    if reason := reason_to_skip():
        raise SystemExit(reason)
    deadline = time.time() + 60 * arguments.minutes
    soak(
        arguments.losses,
        deadline,
        arguments.seed,
        lambda summary: RESULT.write_text(json.dumps(summary, indent=1) + "\n") and None,
    )


if __name__ == "__main__":
    main()
