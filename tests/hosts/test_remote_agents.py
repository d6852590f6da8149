"""Agents on hosts of their own, each in its own network, play the episodes of a run on another host."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import remote_agents
from host_runs import interrupt
from limits import HUNG_S
from namespaces import Host, hosts, reason_to_skip
from running import ENDLESS, ROOT, Run

pytestmark = [
    pytest.mark.hosts,
    pytest.mark.long,
    pytest.mark.covers("agents"),
    pytest.mark.skipif(reason_to_skip() is not None, reason=str(reason_to_skip())),
]
PORT, TRIES = 8700, 5
LAYOUT = ("actor.backend=megatron:d1", "rollout.backend=sglang:d1", "cluster.n_gpus_per_node=2")
ASK = """
import asyncio, sys
sys.path.insert(0, {folder!r})
from remote_agents import converse
asyncio.run(converse({url!r}, {key!r}, "x"))
"""


def test_agents_on_other_hosts_play_the_episodes(tmp_path: Path) -> None:
    shared = (tmp_path, *(path for path in (ROOT, Path(sys.prefix)) if path.is_relative_to("/tmp")))
    with hosts(3, *shared) as (main, *others):
        started = [serve(host, tmp_path) for host in others]
        urls = [f"http://{host.netloc}:{PORT}/" for host in others]
        (workflow := tmp_path / "workflow.py").write_text(remote_agents.WORKFLOW.format(urls=urls))
        agents = (f"workflow={workflow}:run", "episode.endpoint=true", f"episode.endpoint_host={main.address}")
        limits = ("episode.max_turns=2", "episode.max_tokens=120")
        run = start(main, tmp_path, *ENDLESS, *LAYOUT, *agents, *limits)
        run.wait_for_step(2)
        for host in others:
            episodes = [line.split() for line in seen(host, tmp_path).read_text().splitlines()]
            assert len(episodes) == len({key for _, key in episodes}) > 1
            assert {url.startswith(f"http://{main.address}:") for url, _ in episodes} == {True}
            url, key = episodes[0]
            assert "does not belong to a running episode" in ask(host, url, key)  # its episode is over
            assert "Connection error" in ask(host, url.replace(main.address, "127.0.0.1"), key)
        rows = map(json.loads, (run.directory / "metrics.jsonl").read_text().splitlines()[:-1])
        counts = sum((Counter(row) for row in rows), Counter[str]())
        assert counts["episodes/done"] > 0 and counts["turns/exact"] > 0, counts
        assert {name for name in counts if name.startswith("episodes/")} == {"episodes/done"}, counts
        interrupt(run)
        assert [service.poll() for service in started] == [None, None]


def start(host: Host, folder: Path, *overrides: str) -> Run:
    """Start a run on a host; on a busy machine Ray gives up while its node starts."""
    for trial in range(TRIES):
        run = Run(folder, *overrides, f"trial_name={trial}", prefix=host.entering)
        run.directory = run.directory.with_name(str(trial))
        run.wait_for(lambda run=run: "ready: " in run.output or run.process.poll() is not None, lives=None)
        if run.process.poll() is None:
            return run
        assert "timed out during startup" in run.output + run.errors, run.output + run.errors
    pytest.fail(f"Ray does not start on host {host.address}")


def serve(host: Host, folder: Path) -> subprocess.Popen[bytes]:
    """Start the service of agents on a host."""
    file = Path(remote_agents.__file__)
    return host.start(sys.executable, file, host.address, str(PORT), seen(host, folder))


def seen(host: Host, folder: Path) -> Path:
    """Return the file with the episodes that were played on a host."""
    return folder / f"episodes-{host.number}.txt"


def ask(host: Host, url: str, key: str) -> str:
    """Return the error that an agent on a host gets."""
    code = ASK.format(folder=str(Path(__file__).parent), url=url, key=key)
    asking = host.start(sys.executable, "-c", code, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    _, errors = asking.communicate(timeout=HUNG_S)
    assert asking.returncode == 1, errors
    return str(errors)
