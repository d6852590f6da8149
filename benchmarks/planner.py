"""Measure the planner's time, and compare its order of trainer layouts with measured step times.

python -m benchmarks.planner         CPU seconds of this process, and the table of benchmarks/results
python -m benchmarks.planner FILE    the table of another file of benchmarks.memory

The table has predicted beside measured step times. A step is the log-prob pass, forward and backward, and the optimizer
step. Layouts of one shape train on the same sequences; the correlation is Spearman's rank correlation. The rows of
benchmarks.trainer_throughput have one shape each.

In all rows but those of `settings`, each expert had kernels of its own, and so in the prediction. In rows that are not
of RECENT, Transformer Engine compiled its small functions, because ranks set NVTE_TORCH_COMPILE after its import. Calls
of compiled functions made launching EARLIER times as long, on one GPU as on four.
"""

from __future__ import annotations

import itertools
import json
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any
from unittest.mock import patch

import typer

import allocation
from allocation import BatchSpec, Cluster
from allocation import efficiency as eff
from allocation.hardware import GPUS
from allocation.planner.search import plan_layouts
from allocation.planner.seconds import training_seconds
from allocation.planner.task import Task
from allocation.settings import MegatronSettings
from benchmarks import memory
from benchmarks.report import ROOT, save

MEASURED = ROOT / "benchmarks/results/memory_h200x4.json"
RECENT, EARLIER = "638b50d5f9", 1.51
_LAUNCHES = ("LAUNCH", "LAUNCH_BATCH", "LAUNCH_TP", "LAUNCH_CP", "LAUNCH_MOE", "LAUNCH_EXPERT")
_MEASURED_GPU = replace(GPUS["h200"], groups_experts=False)
_PASSES = {"step": "seconds", "log_probs": "log_probs"}
_EXPERTS = memory.SHAPES["qwen3-moe-6-layers"] | {"num_hidden_layers": 16}
# Shape, recomputation, tokens of a micro-batch, and the trained share of tokens of files of trainer_throughput.
THROUGHPUT: dict[str, tuple[dict[str, Any], dict[str, Any], int, float]] = {
    "qwen3_0.6b_h200": (memory.SHAPES["qwen3-0.6b"], {}, 16384, 0.28),
    "qwen3_0.6b_all_h200": (memory.SHAPES["qwen3-0.6b"], {}, 16384, 1.0),
    "qwen3_4b_h200": (memory.SHAPES["qwen3-4b"], memory.FULL, 16384, 0.28),
    "qwen3_8b_h200": (memory.SHAPES["qwen3-8b"], memory.FULL, 16384, 0.28),
    "qwen3_moe_h200": (_EXPERTS, {}, 8192, 0.28),
    "folded_h200x4": (_EXPERTS, {}, 32768, 0.28),
}
SETTINGS = {  # files of expert_settings, and their shapes
    "experts_h200": _EXPERTS,
    "dense_0.6b_h200": memory.SHAPES["qwen3-0.6b"],
    "dense_0.1b_h200": memory.SHAPES["qwen3-0.6b"]
    | {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "num_key_value_heads": 4}
    | {"head_dim": 64, "intermediate_size": 2048, "vocab_size": 32768},
}
CASES = (("qwen3-8b", "1x8"), ("qwen3-30b-a3b", "4x8"), ("qwen3-30b-a3b", "128x8"), ("qwen3-235b-a22b", "128x8"))


def main(file: Annotated[Path | None, typer.Argument(help="of benchmarks.memory")] = None) -> None:
    if file is None:
        time_planner()
        show({"throughput": {"rank_correlation": None, "layouts": throughputs()}})
    show(measured(file or MEASURED))


def time_planner() -> None:
    results = []
    for name, cluster in CASES:
        task = Task(
            allocation.load_model(name), Cluster.parse(cluster), batch=BatchSpec(256, 8, max_tokens_per_mb=16384)
        )
        start = time.process_time()
        choices = plan_layouts(task)
        seconds = time.process_time() - start
        best = choices[0].allocation if choices else None
        results.append({"model": name, "cluster": cluster, "seconds": round(seconds, 3), "best": best})
        print(results[-1])
    save(
        "planner",
        {
            "unit": "CPU seconds",
            "cases": results,
            "measured": measured(MEASURED),
            "throughput": throughputs(),
            "settings": settings(),
        },
    )


def measured(file: Path) -> dict[str, Any]:
    """For each shape of the file its layouts, quickest first, and the correlation of predicted and measured order."""
    shapes: dict[str, Any] = {}
    for _, group in itertools.groupby(memory.measured([file]), key=lambda case: case["shape"]):
        rows = sorted((row(case) for case in group), key=lambda one: one["measured_s"])
        sides = [[one[side] for one in rows] for side in ("measured_s", "predicted_s")]
        correlation = statistics.correlation(*sides, method="ranked")
        kind = "experts" if "ffn" in rows[0]["layout"] else "dense"
        shapes[kind] = {"rank_correlation": round(correlation, 3), "layouts": rows}
    return shapes


def throughputs() -> list[dict[str, Any]]:
    """Rows of THROUGHPUT."""
    rows = []
    for name, (shape, recompute, tokens, trained) in THROUGHPUT.items():
        found = json.loads((MEASURED.parent / f"trainer_throughput_{name}.json").read_text())
        total, speed = found["tokens_per_step"], found["tokens_per_second"]
        case = {"shape": shape, "recompute": recompute, "tokens": tokens, "layout": found["layout"]}
        case |= {"tokens_per_step": total, "length": 1344, "trained": trained, "recent": found["commit"] == RECENT}
        case |= {"step_seconds": total / speed["engine"], "log_probs_seconds": total / speed["log_probs"]}
        rows.append({"name": name, **row(case)})
    return rows


def settings() -> list[dict[str, Any]]:
    """Rows of benchmarks.expert_settings, of experts those in which one kernel computed all of a layer."""
    return [row for file, shape in SETTINGS.items() for row in _settings(file, shape)]


def _settings(file: str, shape: dict[str, Any]) -> list[dict[str, Any]]:
    found = json.loads((MEASURED.parent / f"{file}.json").read_text())
    recomputed = {
        "": {},
        "full": memory.FULL,
        "experts": {"recompute_granularity": "selective", "recompute_modules": ("moe",)},
    }
    rows = []
    for name, arm in found["arms"].items():
        total, trained = found["tokens_per_step"], found["trained_tokens_per_step"] / found["tokens_per_step"]
        case = {"shape": shape, "recompute": recomputed[arm["recompute"]], "tokens": arm["tokens"]}
        case |= {"tokens_per_step": total, "length": 1344, "trained": trained, "recent": True, "layout": "megatron:d1"}
        case |= {f"{part}_seconds": statistics.median(arm[key]) for part, key in _PASSES.items()}
        if arm["grouped"] or "num_experts" not in shape:
            with patch(f"{__name__}._MEASURED_GPU", GPUS["h200"]):
                rows.append({"name": f"{file} {name}", **row(case)})
    return rows


def row(case: dict[str, Any]) -> dict[str, Any]:
    parts = predicted(case)
    return {
        "layout": case["layout"],
        "measured_s": round(case["step_seconds"] + case["log_probs_seconds"], 3),
        "predicted_s": round(sum(parts.values()), 3),
        "parts": {name: round(part, 3) for name, part in parts.items() if part >= 0.0005},
    }


def predicted(case: dict[str, Any]) -> dict[str, float]:
    """Seconds of a step by the planner, whose mean sequence is half of the longest prompt and response together."""
    model, sizes = memory.described(case)
    length, gpus, trained = case["length"], sizes.dp * sizes.per_replica, case.get("trained", 1.0)
    batch = BatchSpec(round(case["tokens_per_step"] / length), 1, 1, length, case["tokens"])
    prompt = round(2 * length * (1 - trained))
    task = Task(model, Cluster(1, gpus), _MEASURED_GPU, batch, prompt=prompt, response=2 * length - prompt)
    slower = 1.0 if case.get("recent") else EARLIER
    with patch.multiple(eff, **{name: getattr(eff, name) * slower for name in _LAUNCHES}):
        return training_seconds(task, sizes, MegatronSettings(**case["recompute"]), case["tokens"])


def show(shapes: dict[str, Any]) -> None:
    for kind, found in shapes.items():
        print(f"{kind}: rank correlation {found['rank_correlation']}")
        for one in found["layouts"]:
            print("  {layout:28} {measured_s:7.3f} s, predicted {predicted_s:7.3f} s  {parts}".format(**one))


if __name__ == "__main__":
    typer.run(main)
