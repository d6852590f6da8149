"""SGLang: one `sglang.launch_server` command line per server, or per node of a server that spans several.

`sglang/srt/server_args.py` defines the options. Replicas that one command starts (`--dp-size`) count as servers; with
`--enable-dp-attention` they are groups inside one server and need no GPUs of their own.
"""

import re
from dataclasses import replace
from itertools import groupby
from operator import attrgetter

from allocation.convert.drafts import Draft, engines, join
from allocation.convert.settings import Reading, number
from allocation.convert.system import System
from allocation.diagnostics import Finding
from allocation.gpus import merge
from allocation.plan import ParallelSizes, Plan, ServerPlan

_LONG = {"tp": "tensor-parallel-size", "pp": "pipeline-parallel-size", "dp": "data-parallel-size",
         "ep": "expert-parallel-size"}  # fmt: skip
MOST_ON_A_NODE = 1024
_INSIDE = "it groups GPUs inside a server; an allocation has no letter for that"
_UNREAD = dict.fromkeys(("moe-dp-size", "attn-cp-size", "dcp-size", "enable-dp-attention"), _INSIDE)


def read(text: str) -> tuple[str, list[Finding]]:
    """Return the servers of one or more launch commands."""
    readings = [Reading.of_command(command) for command in re.split(r"(?<!\\)\n|;|&", text)]
    servers = [draft for reading in readings if _launches(reading) for draft in _server(reading)]
    last = readings[-1]
    if other := next((draft for draft in servers if draft.sizes != servers[0].sizes), None):
        last.report(first=servers[0], other=other)
    findings = [finding for reading in readings for finding in reading.findings]
    if not servers:
        return ("", findings) if findings else last.nothing("SGLang", "an option such as --tp-size 4")
    sizes = replace(servers[0].sizes, dp=len(servers) * servers[0].sizes.dp)
    return join([[Draft("rollout", "sglang", sizes, _placement(servers, sizes))]]), findings


def _launches(reading: Reading) -> bool:
    """Return whether a command starts a server."""
    return "sglang" in reading.text or any(reading.has(f"{name}-size", long, name) for name, long in _LONG.items())


def _placement(servers: list[Draft], sizes: ParallelSizes) -> tuple[range, ...]:
    """Return GPU ids if the commands differ from the compiler's placement: none if ids repeat, as on several nodes."""
    world = sizes.dp * sizes.per_replica
    if any(not server.gpus for server in servers):
        return (range(world),)
    ids = [gpu for server in servers for gpus in server.gpus for gpu in gpus]
    if len(set(ids)) < world or ids == list(range(len(ids))):
        return ()
    return tuple(merge(range(gpu, gpu + 1) for gpu in ids))


def _server(reading: Reading) -> list[Draft]:
    """Return the server that one command starts, None for a further node of a server that spans several.

    It has GPU ids on its node, unless it spans several nodes.
    """
    tp, pp, dp, ep = (reading.size(f"{name}-size", _LONG[name], name) for name in ("tp", "pp", "dp", "ep"))
    for key, reason in _UNREAD.items():
        setting = reading.find(key)
        if setting and setting.value != "1":
            reading.report(unread=setting, reason=reason)
    nodes = reading.size("nnodes")
    if nodes > 1 and number(reading.value("node-rank") or "0") != 0:
        return []
    base = number(reading.value("base-gpu-id") or "0")
    if base is None:
        reading.report(size=reading.find("base-gpu-id"))
        base = 0
    step = reading.size("gpu-id-step")
    inside = (reading.value("enable-dp-attention") or "").lower() == "true"
    sizes = ParallelSizes(tp=tp, pp=pp, ep=ep, dp=1 if inside else dp)
    used = min(sizes.dp * tp * pp, MOST_ON_A_NODE) if nodes == 1 else 0
    gpus = tuple(range(gpu, gpu + 1) for gpu in range(base, base + used * step, step))
    return [Draft("rollout", "sglang", sizes, gpus)]


def write(plan: Plan) -> str:
    """Return one command for every server (and node of it) of the plan's first SGLang engine."""
    chosen = engines(plan, backends=["sglang"])
    if not chosen:
        return ""
    s = chosen[0].sizes
    written = {"tp": s.tp} | {name: size for name, size in (("pp", s.pp), ("ep", s.ep)) if size > 1}
    command = "python -m sglang.launch_server" + "".join(f" --{name}-size {size}" for name, size in written.items())
    return "".join(f"{command}{place}\n" for server in chosen[0].servers for place in _places(server))


def _places(server: ServerPlan) -> list[str]:
    """Return the options for the location of a server, one string for each of its nodes."""
    nodes = [[device.gpu for device in devices] for _, devices in groupby(server.devices, key=attrgetter("node"))]
    places = []
    for rank, gpus in enumerate(nodes):
        place = f" --nnodes {len(nodes)} --node-rank {rank}" if len(nodes) > 1 else ""
        place += f" --base-gpu-id {gpus[0]}" if gpus[0] else ""
        step = gpus[1] - gpus[0] if len(gpus) > 1 else 1
        places.append(place + (f" --gpu-id-step {step}" if step > 1 else ""))
    return places


SYSTEM = System(
    "sglang",
    "SGLang",
    read,
    write,
    {
        "CONVERT-LOSES-ENGINE": "SGLang arguments describe SGLang servers only",
        "CONVERT-LOSES-GPUS": "a command line names GPU ids of a node, but not the node",
    },
)
