"""Trinity-RFT: YAML. vLLM engines come first, and the trainers get the remaining GPUs.

Trinity-RFT's configuration guide defines the keys; below `trainer.trainer_config` they are verl's.
"""

import re
from dataclasses import replace

from allocation.convert import verl
from allocation.convert.drafts import Draft, fill_data_parallel, join
from allocation.convert.megatron import MEGATRON
from allocation.convert.settings import Reading, dump
from allocation.convert.system import System
from allocation.diagnostics import Finding
from allocation.plan import ParallelSizes, Plan

_TRINITY = verl.VerlDialect("Trinity-RFT", prefix="trainer.trainer_config.", ref_follows_actor=False)
# The part below `trainer.trainer_config`, which its guides show alone.
_PART = replace(_TRINITY, prefix="")
_NODES, _GPUS = "cluster.node_num", "cluster.gpu_per_node"
_MODEL = "explorer.rollout_model"
_TRAINING = ("trainer", "algorithm", "buffer")
_SERVING = ("explore", "bench", "serve")


def read(text: str) -> tuple[str, list[Finding]]:
    """Return the engines of Trinity-RFT's settings."""
    reading = Reading.of_config(text)
    mode = reading.value("mode") or "both"
    dialect = _PART if reading.has("actor_rollout_ref", "critic") else _TRINITY
    found = [] if mode in _SERVING else list(verl.trainers(reading, dialect))
    if not found and mode not in _SERVING and reading.has(*_TRAINING) and reading.size(_GPUS, default=0):
        found = [_default_trainer(reading)]
    served = mode != "train" and reading.has(_MODEL)
    if not reading.settings or not (found or served):
        return reading.nothing("Trinity-RFT", f"{_MODEL} or trainer.trainer_config")
    engine_type = reading.find(f"{_MODEL}.engine_type")
    if engine_type and not engine_type.value.startswith("vllm"):
        reading.report(backend=engine_type)
    rollout = ParallelSizes(tp=reading.size(f"{_MODEL}.tensor_parallel_size"), dp=reading.size(f"{_MODEL}.engine_num"))
    taken = (rollout.tp * rollout.dp if served else 0) + _auxiliary(reading)
    total = reading.size(_NODES) * reading.size(_GPUS, default=0)
    left = total if mode == "colocate" else total - taken
    if not total:
        left = verl.smallest_pool(found)
        reading.report(where=f"{_NODES} and {_GPUS}", smallest=left + taken)
    elif found and left < 1:
        reading.report(role="actor", n_gpus=max(0, left), replica=1, setting=reading.find(_GPUS))
    trainers = [fill_data_parallel(reading, *engine, max(1, left), _GPUS) for engine in found]
    servers = [Draft("rollout", "vllm", rollout)] if served else []
    groups = [[*servers, *trainers]] if mode == "colocate" else [servers, trainers]
    return join([group for group in groups if group]), reading.findings


def _default_trainer(reading: Reading) -> verl.Found:
    """Return the actor of settings without a section of it: FSDP, on all GPUs that the explorer leaves."""
    if reading.value("trainer.trainer_strategy") == "megatron":
        sizes = {name: f"trainer.megatron.{key}" for name, key in MEGATRON.items()}
        return "actor", "megatron", reading.sizes(sizes)
    return "actor", "fsdp", ParallelSizes(cp=reading.size("trainer.ulysses_sequence_parallel_size"))


def _auxiliary(reading: Reading) -> int:
    """Return GPUs of auxiliary models, which no allocation holds."""
    taken = 0
    places = {match[0] for key in reading.settings if (match := re.match(r"explorer\.auxiliary_models\.\d+", key))}
    for place in sorted(places):
        taken += reading.size(f"{place}.engine_num") * reading.size(f"{place}.tensor_parallel_size")
        first = next(setting for key, setting in reading.settings.items() if key.startswith(place))
        reading.report(unread=first, reason="an auxiliary model serves rewards or tools; its GPUs are reserved")
    return taken


def write(plan: Plan) -> str:
    """Return YAML with the cluster, the rollout model and the trainers."""
    servers, trainers = verl.rollouts(plan), verl.trainers_of(plan)
    if not servers and not trainers:
        return ""
    written = verl.count_gpus([*servers, *trainers], _NODES, _GPUS)
    for engine in servers:
        written |= {f"{_MODEL}.engine_type": "vllm", f"{_MODEL}.engine_num": engine.sizes.dp}
        written |= {f"{_MODEL}.tensor_parallel_size": engine.sizes.tp}
    return dump(written | verl.trainer_settings(trainers, _TRINITY))


SYSTEM = System(
    "trinity",
    "Trinity-RFT",
    read,
    write,
    {
        "CONVERT-LOSES-ENGINE": "the engines of Trinity-RFT are rollout, actor, critic and ref",
        "CONVERT-LOSES-BACKEND": "Trinity-RFT serves with vLLM",
        "CONVERT-LOSES-SIZE": "a vLLM engine has only a tensor-parallel size; trainers use all remaining GPUs",
        "CONVERT-LOSES-GPUS": "the explorer's engines come first, and all trainers share the remaining GPUs",
    },
    even="all",
)
