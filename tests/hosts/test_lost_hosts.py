"""A run over several hosts loses one that has a server alone, dead or cut off, and continues with the other servers."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from host_runs import check_exactly_once, has_ray, host_of, interrupt, resumed, run_on, written_by
from namespaces import reason_to_skip
from running import ENDLESS, Run

from areal_like.metrics.event_file import read_events

pytestmark = [
    pytest.mark.hosts,
    pytest.mark.long,
    pytest.mark.covers("server restart", "updates: collective", "updates: disk"),
    pytest.mark.skipif(reason_to_skip() is not None, reason=str(reason_to_skip())),
]
STUCK_S = 3.0  # after which the run waits for the server's answers, or for an update of its weights
CONTINUES_S = 15.0  # with the default of `cluster.host_timeout_s`
# a trainer on one host, and a server on each of two others
LAYOUT = ("actor.backend=megatron:d1", "rollout.backend=sglang:d2", "cluster.n_nodes=3")


def check_requests_continued(run: Run, lost_at: float) -> None:
    """Check that requests of the lost server failed soon, by the run's own clock, and were answered by another one."""
    moved = [event for event in read_events(run.directory) if event.lane == "requests" and event.start > lost_at]
    if not moved:  # the loss fell into an update, for which requests had been drained
        print("no request was on the lost server")
        return
    first = min(event.start for event in moved) - lost_at, min(event.end for event in moved) - lost_at
    print(f"{len(moved)} requests continued: the first one after {first[0]:.1f} s, answered after {first[1]:.1f} s")
    assert first[0] < CONTINUES_S


@pytest.mark.parametrize(("how", "transport"), [("kill", "collective"), ("cut", "disk"), ("cut", "collective")])
def test_a_host_with_a_server_alone_is_lost_and_the_run_continues(tmp_path: Path, how: str, transport: str) -> None:
    with run_on(tmp_path, 4, *LAYOUT, *ENDLESS, f"weight_update.mode={transport}") as (run, machines, _):
        run.wait_for_step(2)
        lost, trainer = host_of(run, "rollout-1.log", machines), host_of(run, "actor-0.log", machines)
        assert lost is not trainer
        for process in written_by(run, "server-1.log"):
            process.suspend()  # its requests are so brief that few losses would find one
        time.sleep(STUCK_S)
        seen, lost_at = time.monotonic(), time.time()
        getattr(lost, how)()
        run.wait_for(lambda: "1 server continues. The failed server is restarted." in run.output)
        print(f"noticed after {time.monotonic() - seen:.1f} s")
        silent = f"host {lost.address} did not answer for 10 s (cluster.host_timeout_s)"
        assert silent in run.output or how == "kill", run.output  # the connections of one that is dead are closed
        run.wait_for(lambda: run.serving()[-2:] == [1.0] * 2)
        check_requests_continued(run, lost_at)
        print(f"two steps with the other server after {time.monotonic() - seen:.1f} s")
        if how == "cut":
            lost.mend()
            run.wait_for(lambda: run.serving()[-2:] == [2.0] * 2)
        interrupt(run)


# two trainer ranks and a server, each on a host of its own
TRAINER = ("actor.backend=megatron:d2", "rollout.backend=sglang:d1", "cluster.n_nodes=3")
RECOVERS = ("recover.mode=auto", "recover.freq_steps=2")


@pytest.mark.parametrize("how", ["kill", "cut", "layout"])
def test_a_host_with_a_trainer_rank_is_lost_and_the_trainer_restarts(tmp_path: Path, how: str) -> None:
    layouts = ("recover.layouts=[megatron:d1]",) if how == "layout" else ()
    spare = how == "kill"
    with run_on(tmp_path, 4 + spare, *TRAINER, *ENDLESS, *RECOVERS, *layouts) as (run, machines, start):
        run.wait_for_step(3)
        lost, servers = host_of(run, "actor-1.log", machines), written_by(run, "server-0.log")
        seen = time.monotonic()
        lost.kill() if how == "kill" else lost.cut()
        run.wait_for(lambda: "The trainer restarts from the last checkpoint" in run.output)
        print(f"noticed after {time.monotonic() - seen:.1f} s")
        if how == "cut":
            run.wait_for(lambda: f"The trainer waits for host {lost.address}" in run.output)
            lost.mend()
            run.wait_for(lambda: resumed(run) or not has_ray(lost))
            if not has_ray(lost):
                start(lost)
        run.wait_for(lambda: resumed(run))
        print(f"trained a step after {time.monotonic() - seen:.1f} s")
        assert ("The trainer continues as megatron[actor]:d1" in run.output) == (how == "layout")
        assert set(servers) <= set(written_by(run, "server-0.log"))
        check_exactly_once(run)
        if how == "layout":
            lost.mend()
        interrupt(run)
