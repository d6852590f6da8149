"""The layout of another system's configuration as one allocation, with SGLang servers and the number of nodes."""

from typing import Any

from allocation import AllocationError, compile, parse
from allocation.convert import read
from allocation.convert.settings import Reading
from allocation.diagnostics import Severity
from allocation.language.spelling import normalise, spell
from allocation.language.syntax import Allocation, Group
from allocation.plan import Plan
from areal_like.interop.rules.translation import Translation

_ROLES = ("ref", "critic")
_PACKED = ".mb_spec.max_tokens_per_mb"
_OWN_POOLS = ("rollout", "actor_rollout_ref.rollout")
_KEYS = ("allocation_mode", "actor.backend", "rollout.backend")
_SHARED = "rollout.scheduling_strategy"
_WITHOUT_GENERATION = ("sft", "dpo")  # algorithms whose origins start no servers


def write_layout(reading: Reading, peer: Translation) -> None:
    """Write the allocation, the GPU sharing, and the cluster.

    An unreadable layout is left to the user: it does not change training.
    """
    text, findings = _read(reading, peer)
    errors = [str(found.message) for found in findings if found.severity is Severity.ERROR]
    for place, found in enumerate(findings):
        if found.severity is not Severity.ERROR:
            peer.renamed[f"layout {place + 1}"] = str(found.message)
    if errors or not text:
        _leave(peer, "; ".join(errors) or "the configuration contains no layout")
        return
    for key in _KEYS:
        peer.ours.pop(key, None)
    if "vllm" in text:
        peer.renamed["layout"] = "the servers are SGLang instead of vLLM"
    try:
        allocation = _two_roles(text.replace("vllm", "sglang"), peer)
        plan = compile(allocation)
    except AllocationError as error:
        _leave(peer, f"{text}: {'; '.join(str(found.message) for found in error.findings)}")
        return
    peer.layout = plan
    if not any(engine.servers for engine in plan.engines):
        _leave(peer, f"{allocation} has no servers, which every run needs: write sglang:d1+{allocation}")
        return
    peer.ours["allocation_mode"] = allocation
    _role_layouts(parse(allocation), peer)
    _packing(plan, peer)
    _pools(plan, peer)
    _cluster(plan.n_gpus, peer)
    if any(len(group.members) > 1 for group in parse(allocation).groups):
        _sharing(reading, peer)


def share_trainer_gpus(peer: Translation) -> None:
    """Put the servers of a run that generates for its evaluation alone on the trainer's GPUs, as no GPU is theirs."""
    if peer.ours.get("algorithm") not in _WITHOUT_GENERATION or peer.layout is None:
        return
    actor = next(engine for engine in peer.layout.engines if not engine.servers)
    t = actor.sizes.tp
    allocation = f"sglang:d{actor.world_size // t}{f't{t}' if t > 1 else ''}|{actor.text}"
    for key in ("cluster.n_nodes", "scheduler.type") if peer.system == "slime" else ():
        peer.ours.pop(key, None)  # counted with the servers
    peer.missing.pop("allocation_mode", None)
    peer.ours |= {"allocation_mode": allocation, "rollout.sharing": "alternate", "rollout.max_head_offpolicyness": 0}
    _cluster(actor.world_size, peer)


def _leave(peer: Translation, why: str) -> None:
    """Leave the layout to the user."""
    for key in _KEYS:
        peer.ours.pop(key, None)
    peer.fill("allocation_mode", f"{why}: write a layout such as sglang:d4+fsdp:d4 (docs/allocation.md)")


def _read(reading: Reading, peer: Translation) -> tuple[str, list[Any]]:
    if peer.system == "slime":
        return _slime(reading)
    if peer.system != "areal" or not any(key in peer.ours for key in _KEYS):
        return read(peer.system, reading.text)
    own = [key for key in _KEYS if key in peer.ours and peer.ours[key] is not None]
    if own == ["allocation_mode"]:
        return read("areal", str(peer.ours["allocation_mode"]))
    lines = [f"{key}={peer.ours[key]}" for key in own if key != "allocation_mode"]
    for role in ("actor", "rollout"):
        place = f"{role}.scheduling_strategy"
        if peer.get(f"{place}.type") == "colocation" and peer.get(f"{place}.target") in ("actor", "rollout"):
            lines += [f"{place}.type=colocation", f"{place}.target={peer.get(f'{place}.target')}"]
    if not any("colocation" in line for line in lines) and _is_colocated(peer, lines):
        lines += [f"{_SHARED}.type=colocation", f"{_SHARED}.target=actor"]
    return read("areal", "\n".join(lines))


def _is_colocated(peer: Translation, lines: list[str]) -> bool:
    """Return whether trainer and servers share GPUs without a key for it: AReaL's awex with offload, on few GPUs."""
    if peer.get("actor.weight_update_mode") != "awex" or not peer.is_on("enable_offload"):
        return False
    nodes, each = peer.get("cluster.n_nodes") or 1, peer.get("cluster.n_gpus_per_node") or 8
    text, findings = read("areal", "\n".join(lines))
    if not text or any(found.severity is Severity.ERROR for found in findings):
        return False
    return bool(compile(_two_roles(text, peer)).n_gpus > nodes * each)


def _sharing(reading: Reading, peer: Translation) -> None:
    """Write `rollout.sharing` for GPUs that trainer and servers share: most systems time-share them."""
    stays = {
        "areal": not peer.is_on("enable_offload"),
        "slime": peer.get("offload") is False and peer.get("offload-rollout") is False,
    }
    if not stays.get(peer.system):
        peer.ours["rollout.sharing"] = "alternate"


def _role_layouts(allocation: Allocation, peer: Translation) -> None:
    """Leave out the layout of a role on the actor's GPUs, which is the default."""
    texts = {it.backend.text: spell(Allocation((Group((it,)),))) for group in allocation.groups for it in group.members}
    actor = next((text for backend, text in texts.items() if backend in ("megatron", "fsdp")), None)
    for role in [role for role in _ROLES if peer.said.get(f"{role}.backend")]:
        peer.ours.pop(f"{role}.backend", None)
        own, _ = read("areal", str(peer.get(f"{role}.backend")))  # AReaL alone has this key
        where = {name: peer.ours.pop(f"{role}.scheduling_strategy.{name}", None) for name in ("type", "target")}
        if own == actor and where["type"] != "separation" and where["target"] in (None, "actor"):
            peer.unneeded[f"{role}.backend"] = "the role has the actor's layout and GPUs"
        elif peer.number("actor.kl_ctl") or role == "critic":
            keys = f"actor.backend={actor}, rollout.backend={texts.get('sglang')} and {role}.backend={own}"
            peer.fill("allocation_mode", f"{role}.backend is not the actor's: write {keys} in place of allocation_mode")


def _packing(plan: Plan, peer: Translation) -> None:
    """Count the tokens of a micro-batch over the GPUs that share a sequence, as areal-like does."""
    cp = max(engine.sizes.cp for engine in plan.engines)
    for key in [key for key in peer.ours if key.endswith(_PACKED) and peer.system != "areal" and cp > 1]:
        if isinstance(peer.ours[key], int):
            peer.ours[key] *= cp
            peer.renamed[key] = f"{peer.ours[key]}, for {cp} GPUs that share sequences"


def _pools(plan: Plan, peer: Translation) -> None:
    """Write the cluster of a trainer and of servers that verl gives a number of nodes and GPUs each."""
    nodes, each = peer.get("trainer.nnodes") or 1, peer.get("trainer.n_gpus_per_node")
    own = next((place for place in _OWN_POOLS if peer.number(f"{place}.nnodes")), None)
    if own is None or peer.system == "trinity" or not isinstance(each, int):
        return
    more, served = peer.get(f"{own}.nnodes"), peer.get(f"{own}.n_gpus_per_node") or each
    if not (isinstance(served, int) and isinstance(nodes, int) and isinstance(more, int)):
        return
    beside = nodes == more and each + served <= 8  # on the same nodes
    peer.ours["cluster.n_gpus_per_node"] = each + served if beside else max(each, served)
    peer.ours["cluster.n_nodes"] = nodes if beside else nodes + more


def _cluster(gpus: int, peer: Translation) -> None:
    """Write at least as many nodes as the layout needs; several nodes need a Ray cluster that exists before the run."""
    per_node = peer.ours.setdefault("cluster.n_gpus_per_node", min(gpus, 8))
    needed = -(-gpus // per_node) if isinstance(per_node, int) and per_node > 0 else 1
    nodes = peer.ours.setdefault("cluster.n_nodes", needed)
    if isinstance(nodes, int) and nodes < needed:
        peer.ours["cluster.n_nodes"] = nodes = needed
        peer.renamed["cluster.n_nodes"] = f"{needed}, because the layout has {gpus} GPUs"
    if isinstance(nodes, int) and nodes > 1 and peer.ours.get("scheduler.type") != "ray":
        peer.ours["scheduler.type"] = "ray"
        peer.renamed["scheduler.type"] = f"ray, because {nodes} nodes need a Ray cluster, started before the run"


def _two_roles(text: str, peer: Translation) -> str:
    """Return the allocation without roles that have their own sections."""
    groups = []
    for group in parse(text).groups:
        kept = tuple(member for member in group.members if not member.name or member.name.text in ("actor", "rollout"))
        for member in group.members:
            if member not in kept and member.name:
                peer.unneeded[f"layout of {member.name.text}"] = f"the section {member.name.text} adds this role"
        if kept:
            groups.append(Group(kept))
    return spell(normalise(Allocation(tuple(groups))))


def _slime(reading: Reading) -> tuple[str, list[Any]]:
    """Return slime's layout: actor nodes and server GPUs, on separate GPUs or colocated."""
    tp, pp = reading.size("tensor-model-parallel-size"), reading.size("pipeline-model-parallel-size")
    cp = reading.size("context-parallel-size")
    ep, etp = reading.size("expert-model-parallel-size"), reading.size("expert-tensor-parallel-size")
    gpus = reading.size("actor-num-nodes") * reading.size("actor-num-gpus-per-node", default=8)
    each = reading.size("rollout-num-gpus-per-engine")
    experts = reading.size("sglang-ep-size", "sglang-expert-parallel-size")
    shared = reading.has("colocate")
    servers = max(1, (gpus if shared else reading.size("rollout-num-gpus", default=gpus)) // each)
    sizes = {"d": gpus // (tp * pp * cp), "p": pp, "t": tp, "c": cp}
    attn = "".join(f"{letter}{size}" for letter, size in sizes.items() if size != 1 or letter == "d")
    actor = f"megatron:(attn:{attn}|ffn:e{ep}t{etp})" if ep > 1 else f"megatron:{attn}"
    server = f"sglang:d{servers}" + (f"t{each}" if each > 1 else "") + (f"e{experts}" if experts > 1 else "")
    return f"{server}{'|' if shared else '+'}{actor}", reading.findings
