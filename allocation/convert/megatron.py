"""Megatron-LM: the command line of one training job, started by torchrun.

`megatron/training/arguments.py` defines the options. Data parallelism follows from torchrun's number of processes; ETP
defaults to TP.
"""

from dataclasses import replace

from allocation.convert.drafts import engines, fill_data_parallel, join, pool
from allocation.convert.settings import Reading, number
from allocation.convert.system import System
from allocation.diagnostics import Finding
from allocation.grid import DEFAULT_ORDER
from allocation.plan import EnginePlan, Plan

PP_BEFORE_DP = "tp-cp-ep-pp-dp"
# The names of Megatron-core, which verl, siiRL, Trinity-RFT and ROLL share.
MEGATRON = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "vpp": "virtual_pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
}
_SIZES = {name: key.replace("_", "-") for name, key in MEGATRON.items() if name != "vpp"}
_NODES, _PROCESSES, _VIRTUAL = "nnodes", "nproc-per-node", "num-virtual-stages-per-pipeline-rank"
_UNREAD = {
    "use-tp-pp-dp-mapping": f"an allocation has no rank order; call the compiler with order={PP_BEFORE_DP!r}",
    "pipeline-model-parallel-layout": "an allocation does not define the layers of a stage",
    "decoder-first-pipeline-num-layers": "an allocation does not define the layers of a stage",
    "decoder-last-pipeline-num-layers": "an allocation does not define the layers of a stage",
    "use-megatron-fsdp": "an allocation does not define how parameters are sharded",
}


def read(text: str) -> tuple[str, list[Finding]]:
    """Return the trainer of a Megatron-LM command line."""
    reading = Reading.of_command(text)
    if reading.findings or not reading.has(*_SIZES.values(), _PROCESSES):
        return reading.nothing("Megatron-LM", "an option such as --tensor-model-parallel-size 2")
    sizes = reading.sizes(_SIZES)
    if not reading.find(_SIZES["etp"]) and (sizes.ep > 1 or reading.has("num-experts")):
        sizes = replace(sizes, etp=sizes.tp)
    world = reading.size(_NODES) * reading.size(_PROCESSES, default=0)
    if not world:
        world = sizes.smallest_world
        reading.report(where="torchrun's --nnodes and --nproc-per-node", smallest=world)
    draft = fill_data_parallel(reading, "actor", "megatron", sizes, world, _PROCESSES)
    for key, reason in _UNREAD.items():
        if setting := reading.find(key):
            reading.report(unread=setting, reason=reason)
    draft = replace(draft, sizes=replace(draft.sizes, vpp=_virtual(reading, sizes.pp)))
    return join([[draft]]), reading.findings


def _virtual(reading: Reading, pp: int) -> int:
    """Return virtual stages per rank, given directly or as layers of a virtual stage."""
    per_stage = reading.find("num-layers-per-virtual-pipeline-stage")
    if per_stage is None:
        return reading.size(_VIRTUAL)
    layers, held = number(reading.value("num-layers") or ""), number(per_stage.value)
    if not layers or not held or layers % (pp * held):
        reading.report(unread=per_stage, reason="the virtual stages follow only from --num-layers, evenly divided")
        return 1
    return layers // (pp * held)


def megatron_config(engine: EnginePlan) -> dict[str, object]:
    """Return every size of a Megatron trainer by the names of Megatron-core."""
    sizes = {
        key: getattr(engine.sizes, name) for name, key in MEGATRON.items() if name != "vpp" or engine.sizes.vpp > 1
    }
    return {**sizes, "sequence_parallel": engine.sequence_parallel}


def write(plan: Plan) -> str:
    """Return the command line of the plan's Megatron trainer, the actor where there are several."""
    trainers = engines(plan, backends=["megatron"])
    if not trainers:
        return ""
    engine = trainers[0]
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
