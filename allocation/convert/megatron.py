"""Megatron-LM: the command line of one training job, started by torchrun.

Options as in `megatron/training/arguments.py`. Data parallelism is what torchrun's number of processes leaves; ETP
is TP unless it is given.
"""

from __future__ import annotations

import math

from allocation.convert.drafts import Draft, engines, join, pool
from allocation.convert.settings import Reading, number
from allocation.convert.system import System
from allocation.diagnostics import Finding
from allocation.grid import DEFAULT_ORDER
from allocation.plan import EnginePlan, ParallelSizes, Plan

PP_BEFORE_DP = "tp-cp-ep-pp-dp"
_SIZES = {
    "tp": "tensor-model-parallel-size",
    "pp": "pipeline-model-parallel-size",
    "cp": "context-parallel-size",
    "ep": "expert-model-parallel-size",
    "etp": "expert-tensor-parallel-size",
}
_NODES, _PROCESSES, _VIRTUAL = "nnodes", "nproc-per-node", "num-virtual-stages-per-pipeline-rank"
_UNREAD = {
    "use-tp-pp-dp-mapping": f"an allocation has no rank order; give the compiler order={PP_BEFORE_DP!r}",
    "pipeline-model-parallel-layout": "an allocation does not say which layers a stage has",
    "decoder-first-pipeline-num-layers": "an allocation does not say which layers a stage has",
    "decoder-last-pipeline-num-layers": "an allocation does not say which layers a stage has",
    "use-megatron-fsdp": "an allocation does not say how parameters are sharded",
}


def read(text: str) -> tuple[str, list[Finding]]:
    """The trainer of a Megatron-LM command line."""
    reading = Reading.of_command(text)
    if not reading.findings and not reading.has(*_SIZES.values(), _PROCESSES):
        reading.report(title="Megatron-LM", expected="an option such as --tensor-model-parallel-size 2")
    if reading.findings:
        return "", reading.findings
    tp, pp, cp, ep = (reading.size(_SIZES[name]) for name in ("tp", "pp", "cp", "ep"))
    experts = ep > 1 or reading.has("num-experts")
    etp = reading.size(_SIZES["etp"], default=tp if experts else 1)
    smallest = pp * math.lcm(tp * cp, etp * ep)
    world = reading.size(_NODES) * reading.size(_PROCESSES, default=0)
    if not world:
        reading.report(where="torchrun's --nnodes and --nproc-per-node", smallest=smallest)
        world = smallest
    replica = tp * pp * cp
    if world % replica:
        reading.report(role="actor", n_gpus=world, replica=replica, setting=reading.find(_PROCESSES))
    for key, reason in _UNREAD.items():
        if setting := reading.find(key):
            reading.report(unread=setting, reason=reason)
    sizes = ParallelSizes(tp=tp, pp=pp, cp=cp, dp=world // replica or 1, ep=ep, etp=etp, vpp=_virtual(reading, pp))
    return join([[Draft("actor", "megatron", sizes)]]), reading.findings


def _virtual(reading: Reading, pp: int) -> int:
    """Virtual stages per rank, given directly or as layers of a virtual stage."""
    per_stage = reading.find("num-layers-per-virtual-pipeline-stage")
    if per_stage is None:
        return reading.size(_VIRTUAL)
    layers, held = number(reading.value("num-layers") or ""), number(per_stage.value)
    if not layers or not held or layers % (pp * held):
        reading.report(unread=per_stage, reason="the virtual stages follow only from --num-layers, evenly divided")
        return 1
    return layers // (pp * held)


def write(plan: Plan) -> str:
    """The command line of the plan's Megatron trainer, the actor where there are several."""
    trainers = [engine for engine in engines(plan, kind="trainer") if engine.backend == "megatron"]
    return _command(trainers[0]) if trainers else ""


def _command(engine: EnginePlan) -> str:
    gpus, s = pool(engine.gpus, engine.n_gpus_per_node), engine.sizes
    lines = [f"torchrun --{_NODES} {gpus.nodes} --{_PROCESSES} {gpus.per_node} pretrain_gpt.py"]
    lines += [f"    --{option} {getattr(s, name)}" for name, option in _SIZES.items()]
    if s.vpp > 1:
        lines.append(f"    --{_VIRTUAL} {s.vpp}")
    if engine.sequence_parallel:
        lines.append("    --sequence-parallel")
    if engine.order == PP_BEFORE_DP:
        lines.append("    --use-tp-pp-dp-mapping")
    return " \\\n".join(lines) + "\n"


SYSTEM = System(
    "megatron",
    "Megatron-LM",
    read,
    write,
    {
        "CONVERT-LOSES-ENGINE": "a Megatron-LM command line is one training job",
        "CONVERT-LOSES-GPUS": "torchrun starts equally many processes on every node, from GPU 0",
    },
    orders=(DEFAULT_ORDER, PP_BEFORE_DP),
    even="each",
)
