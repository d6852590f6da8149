"""Real servers of a run that die, hang or lose their actor: all are restarted and join, and the run never stops."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest
from running import ENDLESS, run

pytestmark = pytest.mark.covers("server restart")

TWO_SERVERS = ("actor.backend=megatron:d1", "rollout.backend=sglang:d2", "cluster.n_gpus_per_node=3")
LIMITS = ("rollout.request_timeout_s=45", "weight_update.timeout_s=90")


@pytest.mark.long
def test_servers_that_die_hang_or_lose_their_actor_are_restarted(tmp_path: Path) -> None:
    with run(tmp_path, *TWO_SERVERS, *ENDLESS, *LIMITS) as started:
        started.wait_for_step(2)
        ends = (("server-0.log", signal.SIGKILL), ("rollout-0.log", signal.SIGKILL), ("server-1.log", signal.SIGSTOP))
        for log, signals in ends:
            before = len(started.serving())
            for process in started.find(log):
                os.kill(process.pid, signals)
            started.wait_for(lambda at=before: 1.0 in started.serving()[at:])
            started.wait_for(lambda at=before: started.serving()[at:][-3:] == [2.0] * 3)
        assert re.search(
            "server-0 ended with exit code -9.*1 server continues. The failed server is restarted", started.output
        )
        assert re.search(r"the process died \(.*1 server continues. The failed server is restarted", started.output)
        assert "server 1 made no progress on requests" in started.output
        for rank, number in ((0, 2), (0, 3), (1, 4)):
            assert f"Server {rank} restarted as server {number}. It rejoins" in started.output
        os.killpg(started.process.pid, signal.SIGINT)
        assert started.end() == 130
        assert started.remains() == []
