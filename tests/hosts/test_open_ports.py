"""A host outside of the cluster finds no port of a run that does more than refuse it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from host_runs import cluster_on, interrupt
from limits import HUNG_S
from namespaces import Host, reason_to_skip
from running import ENDLESS

pytestmark = [
    pytest.mark.hosts,
    pytest.mark.long,
    pytest.mark.skipif(reason_to_skip() is not None, reason=str(reason_to_skip())),
]
LAYOUT = ("actor.backend=megatron:d1", "rollout.backend=sglang:d1", "cluster.n_nodes=2")
RANGE = range(21000, 22000)
# of the host that runs it: address, port and command of every listener that other hosts could reach
LISTENERS = """
import json, psutil
found = []
for each in psutil.net_connections("tcp"):
    if each.status == "LISTEN" and not each.laddr.ip.startswith("127.") and each.laddr.ip != "::1":
        command = " ".join(psutil.Process(each.pid).cmdline())[:120] if each.pid else ""
        found.append([each.laddr.ip, each.laddr.port, command])
print(json.dumps(found))
"""
# connects to every port of the hosts, and sends requests without a token to those that are open
SCAN = """
import asyncio, json, sys
hosts = sys.argv[1:]
REQUESTS = [b"GET /%s HTTP/1.1\\r\\nHost: x\\r\\nConnection: close\\r\\n\\r\\n" % path for path in
            (b"model_info", b"v1/models", b"metrics", b"")]
GRPC = ("NodeInfoGcsService/GetAllNodeInfo", "NodeManagerService/GetNodeStats", "ObjectManagerService/Push",
        "CoreWorkerService/GetCoreWorkerStats", "RayletDriver/ListNamedActors")

async def is_open(host, port, turns):
    async with turns:
        for _ in range(3):
            try:
                _, writer = await asyncio.wait_for(asyncio.open_connection(host, port), 5)
            except ConnectionRefusedError:
                return False
            except (OSError, TimeoutError):
                continue
            writer.close()
            return True
        return False

async def ask(host, port, request):
    try:
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(request)
        answer = await asyncio.wait_for(reader.read(300), 5)
        writer.close()
        return answer.split(b"\\r\\n")[0].decode(errors="replace")
    except TimeoutError:
        return "silence"
    except OSError:
        return ""

async def call(host, port, method):
    import grpc
    async with grpc.aio.insecure_channel(f"{host}:{port}") as channel:
        try:
            await channel.unary_unary(f"/ray.rpc.{method}")(b"", timeout=5)
            return "OK"
        except grpc.aio.AioRpcError as error:
            return error.code().name

async def probe(host, port):
    answers = await asyncio.gather(*(ask(host, port, request) for request in REQUESTS))
    return host, port, answers, await asyncio.gather(*(call(host, port, method) for method in GRPC))

async def main():
    turns, found = asyncio.Semaphore(500), []
    for host in hosts:
        opened = await asyncio.gather(*(is_open(host, port, turns) for port in range(1, 65536)))
        ports = [port for port, is_there in enumerate(opened, 1) if is_there]
        found += await asyncio.gather(*(probe(host, port) for port in ports))
    print(json.dumps(found))

asyncio.run(main())
"""


# what answers without a token, by its command; docs/clusters.md lists it
SILENT = ("ray::Worker", "sglang::scheduler")  # gloo, which has no token


def output_of(machine: Host, code: str, *arguments: str) -> Any:
    env = {**os.environ, "GRPC_VERBOSITY": "NONE"}
    done = machine.start(sys.executable, "-c", code, *arguments, stdout=subprocess.PIPE, env=env)
    text, _ = done.communicate(timeout=HUNG_S)
    return json.loads(text)


def judge(answers: list[str], calls: list[str]) -> str:
    """Return what a port does with requests that have no token."""
    if all(" 401 " in answer for answer in answers) or ("UNAUTHENTICATED" in calls and "OK" not in calls):
        return "refuses"
    return "is silent" if set(answers) <= {"silence", ""} and "OK" not in calls else f"answers {answers} {calls}"


@pytest.mark.parametrize("transport", ["collective", "disk"])
def test_a_host_outside_of_the_cluster_is_refused_at_every_port(tmp_path: Path, transport: str) -> None:
    """But for those of gloo, which has no token and says nothing."""
    own = ("weight_update.url=auto",) if transport == "disk" else ()
    with cluster_on(tmp_path, 3, spare=1) as made:
        *cluster, outside = made.machines
        ports = f"cluster.ports={RANGE.start}-{RANGE.stop - 1}"
        run = made.run(*LAYOUT, *ENDLESS, ports, f"weight_update.mode={transport}", *own)
        run.wait_for_step(1)
        commands = {
            (machine.address, port): command
            for machine in cluster
            for _, port, command in output_of(machine, LISTENERS)
        }
        found = output_of(outside, SCAN, *(machine.address for machine in cluster))
        interrupt(run)
    verdicts = {(host, port): judge(answers, calls) for host, port, answers, calls in found}
    for where, verdict in verdicts.items():
        command = commands.get(where, "")
        silent = verdict == "is silent" and command.startswith(SILENT) and transport == "collective"
        assert verdict == "refuses" or silent, f"{where} of {command} {verdict}"
    (server,) = (where for where, command in commands.items() if "areal_like.backends.sglang.launcher" in command)
    assert verdicts[server] == "refuses"
    assert server[1] in RANGE
    # the server, and where it downloads weights; the rendezvous of trainer and server is closed
    assert len([where for where in commands if where[1] in RANGE]) == 1 + len(own)
