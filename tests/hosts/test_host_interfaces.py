"""Hosts in two networks: processes listen in the one that `cluster.interface` names, or the run ends with the fix."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from host_runs import cluster_on, interrupt
from namespaces import NETWORKS, Host, reason_to_skip
from running import ENDLESS

pytestmark = [
    pytest.mark.hosts,
    pytest.mark.long,
    pytest.mark.skipif(reason_to_skip() is not None, reason=str(reason_to_skip())),
]
LAYOUT = ("actor.backend=megatron:d1", "rollout.backend=sglang:d1", "cluster.n_nodes=2")
# of the host that runs it: addresses at which processes of the run listen, Ray's own left out
LISTENERS = """
import json, psutil
found = set()
for each in psutil.net_connections("tcp"):
    if each.status == "LISTEN" and not each.laddr.ip.startswith("127.") and each.pid:
        if "sglang.launcher" in " ".join(psutil.Process(each.pid).cmdline()) or 21000 <= each.laddr.port < 22000:
            found.add(each.laddr.ip)
print(json.dumps(sorted(found)))
"""


def listening(host: Host) -> list[str]:
    text, _ = host.start(sys.executable, "-c", LISTENERS, stdout=subprocess.PIPE).communicate()
    return list(json.loads(text))


def test_a_run_listens_at_the_interface_that_is_chosen(tmp_path: Path) -> None:
    overrides = (*LAYOUT, *ENDLESS, "cluster.ports=21000-21999")
    with cluster_on(tmp_path, 3, networks=2) as cluster:
        missing = cluster.run(*overrides, "cluster.interface=eth7")
        assert missing.end() == 1
        for host in cluster.machines[1:]:
            assert f"node {host.address} has no address of cluster.interface=eth7. Its interfaces are" in missing.errors
            assert f"eth1 ({host.address_in(1)})" in missing.errors
        cluster.machines[2].cut(1)
        apart = cluster.run(*overrides, "cluster.interface=eth1")
        assert apart.end() == 1
        there = cluster.machines[2].address_in(1)
        assert f"node {cluster.machines[1].address_in(1)} cannot connect to {there}:21" in apart.errors
        assert f"this host, which has the controller, cannot connect to {there}:21" in apart.errors
        assert "Set it to an interface of a network that connects all hosts of the run" in apart.errors
        cluster.machines[2].mend(1)
        files = ("weight_update.mode=disk", "weight_update.url=auto")  # so that the controller's host listens too
        run = cluster.run(*overrides, *files, f"cluster.interface={NETWORKS[1]}0/24")
        run.wait_for_step(2)
        controller, *others = [listening(host) for host in cluster.machines]
        assert controller == [cluster.machines[0].address_in(1)]
        # the server's host; the other one has a trainer that listens on loopback alone
        assert sorted(others) in [[[], [host.address_in(1)]] for host in cluster.machines[1:]]
        interrupt(run)


def test_a_run_over_hosts_that_have_ipv6_alone_trains(tmp_path: Path) -> None:
    with cluster_on(tmp_path, 3, ipv6=True) as cluster:
        run = cluster.run(*LAYOUT, *ENDLESS, "cluster.ports=21000-21999")
        run.wait_for_step(2)
        # the server's host; the trainer's has closed its rendezvous
        assert sorted(map(listening, cluster.machines[1:])) in [[[], [host.address]] for host in cluster.machines[1:]]
        interrupt(run)
