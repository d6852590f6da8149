"""The firewall rules of docs/clusters.md let hosts of the cluster connect to a run's ports, and nobody else."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from limits import HUNG_S
from namespaces import Host, hosts, reason_to_skip
from running import ROOT

MISSING = None if shutil.which("nft") else "the rules are nftables', and nft is not installed"
pytestmark = [
    pytest.mark.long,
    pytest.mark.hosts,
    pytest.mark.skipif(bool(reason_to_skip() or MISSING), reason=str(reason_to_skip() or MISSING)),
]
PORTS = (6379, 10000, 29500, 60999)  # of Ray, `cluster.ports` and the kernel's range
LISTEN = """
import socket, sys, time
listeners = [socket.create_server(("", int(port)), backlog=64) for port in sys.argv[1:]]
print("ready", flush=True)
time.sleep(3600)
"""
CONNECT = """
import socket, sys
from concurrent.futures import ThreadPoolExecutor
address, *ports = sys.argv[1:]
def connect(port):
    try:
        socket.create_connection((address, int(port)), timeout=2).close()
        return True
    except TimeoutError:
        return False
with ThreadPoolExecutor() as threads:
    print(*(port for port, open in zip(ports, threads.map(connect, ports)) if open))
"""


def rules(interface: str, network: str) -> list[str]:
    """Return the commands of the page for an interface and a network."""
    lines = (ROOT / "docs/clusters.md").read_text().splitlines()
    found = [line for line in lines if line.startswith("nft add ")]
    assert len(found) == 5
    return [line.replace("ib0", interface).replace("10.20.0.0/16", network) for line in found]


def listen(host: Host) -> None:
    listening = host.start(sys.executable, "-c", LISTEN, *map(str, PORTS), stdout=subprocess.PIPE, text=True)
    assert listening.stdout and listening.stdout.readline() == "ready\n"


def reached(host: Host, address: str) -> list[int]:
    """Return the ports of an address that a host can connect to."""
    command = (sys.executable, "-c", CONNECT, address, *map(str, PORTS))
    connecting = host.start(*command, stdout=subprocess.PIPE, text=True)
    return [int(port) for port in connecting.communicate(timeout=HUNG_S)[0].split()]


def test_the_rules_of_the_page_keep_strangers_out(tmp_path: Path) -> None:
    with hosts(4, tmp_path, networks=2) as (node, other, _, stranger):
        for host in (node, stranger):
            listen(host)
        assert reached(stranger, node.address) == [*PORTS]
        for rule in rules("eth0", "10.78.0.0/30"):  # the stranger is 10.78.0.4
            assert node.start("sh", "-c", rule).wait() == 0, rule
        assert reached(other, node.address) == reached(node, "127.0.0.1") == [*PORTS]
        assert reached(stranger, node.address) == []
        assert reached(stranger, node.address_in(1)) == reached(other, node.address_in(1)) == []
        assert reached(node, stranger.address) == [*PORTS]  # answers come back
