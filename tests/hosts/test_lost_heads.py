"""A run whose controller or whose Ray head is lost ends on all hosts, and the same command resumes it."""

from __future__ import annotations

import time
from pathlib import Path

import psutil
import pytest
from host_runs import check_exactly_once, cluster_on, host_of, interrupt, start_ray
from namespaces import reason_to_skip
from running import ENDLESS, Run, writing

pytestmark = [
    pytest.mark.hosts,
    pytest.mark.long,
    pytest.mark.skipif(reason_to_skip() is not None, reason=str(reason_to_skip())),
]
LAYOUT = ("actor.backend=megatron:d1", "rollout.backend=sglang:d1", "cluster.n_nodes=2")
RECOVERS = ("recover.mode=auto", "recover.freq_steps=2", "cluster.host_timeout_s=20")


def wait_for_end(run: Run) -> None:
    """Wait until no process of a run is left on any host."""
    began = time.monotonic()
    run.wait_for(lambda: run.process.poll() is not None and not writing(run.directory / "logs"), lives=None)
    print(f"nothing is left after {time.monotonic() - began:.1f} s")


def test_a_lost_controller_or_head_ends_the_run_and_the_same_command_resumes(tmp_path: Path) -> None:
    with cluster_on(tmp_path, 3) as cluster:
        command = (*LAYOUT, *ENDLESS, *RECOVERS)
        run = cluster.run(*command)
        run.wait_for_step(3)
        trainer = host_of(run, "actor-0.log", cluster.machines)
        trainer.cut()  # heals before cluster.host_timeout_s
        time.sleep(4)
        trainer.mend()
        steps = len(run.steps())
        run.wait_for(lambda: len(run.steps()) >= steps + 2)
        assert "restarts from the last checkpoint" not in run.output
        (controller,) = psutil.Process(run.process.pid).children()
        second = cluster.run(*command, on=1, output="second")
        assert second.end() == 1
        assert f"{run.directory} belongs to a run that has not ended" in second.errors
        controller.kill()
        wait_for_end(run)
        run = cluster.run(*command, on=1)
        run.wait_for(lambda: "resuming from" in run.output)
        run.wait_for_step(max(run.steps(), default=0) + 4)
        check_exactly_once(run)
        for process in cluster.machines[0].processes():
            process.kill()  # Ray's head
        wait_for_end(run)
        for machine in cluster.machines:
            for process in machine.processes():
                process.kill()  # Ray ends by itself after it has looked for its head for minutes
        for alive, machine in enumerate(cluster.machines, 1):
            start_ray(machine, cluster.machines[0], alive, cluster.env)
        run = cluster.run(*command)
        run.wait_for(lambda: "resuming from" in run.output)
        run.wait_for(lambda: len(run.steps()) >= 2)
        check_exactly_once(run)
        interrupt(run)
