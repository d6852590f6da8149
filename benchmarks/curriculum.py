"""Compare runs on a CPU with and without a curriculum and single rollouts: steps and samples to an evaluation reward.

    python -m benchmarks.curriculum [--variants grpo,curriculum] [--seeds 1,2,3] [--limit-s 900] [key=value ...]

A step of the CPU demo's data has 512 samples: 64 prompts with 8 samples each, or 512 prompts with one. A step of the
data of `varied_difficulty.py` has 32 prompts with 8 samples each. Figures are merged into the result file, which
docs/benchmarks.md shows. A run that exceeds the limit is stopped, and its last evaluation counts.
"""

from __future__ import annotations

import itertools
import json
from typing import Annotated

import typer

from benchmarks.demo import demo
from benchmarks.report import ROOT, save

RESULTS = ROOT / "benchmarks/results/curriculum_cpu.json"
SHARED = ("evaluator.freq_steps=5", "total_train_steps=60")
SINGLE = ("algorithm=single_rollout", "gconfig.n_samples=1", "train_dataset.batch_size=512", "total_train_epochs=10")
CURRICULUM = ("train_dataset.curriculum={}",)
DATA = {"train_dataset": "train", "valid_dataset": "test"}
VARIED = (
    *(f"{section}.path=benchmarks/varied_difficulty.py:{name}" for section, name in DATA.items()),
    "train_dataset.batch_size=32",
)
VARIANTS = {
    "grpo": (),
    "curriculum": CURRICULUM,
    "single_rollout": SINGLE,
    "single_rollout_curriculum": (*SINGLE, *CURRICULUM),
    "varied": VARIED,
    "varied_curriculum": (*VARIED, "train_dataset.curriculum={field: kind, low: 0.2, high: 0.97}"),
}


def main(
    overrides: Annotated[list[str] | None, typer.Argument(metavar="key=value ...")] = None,
    variants: str = ",".join(VARIANTS),
    seeds: str = "1",
    target: float = 0.9,
    limit_s: float = 900,
) -> None:
    for seed, name in itertools.product(seeds.split(","), variants.split(",")):
        result = demo([*SHARED, *VARIANTS[name], f"seed={seed}", *(overrides or [])], target, limit_s)
        print(name, seed, {key: value for key, value in result.items() if key != "held_out"}, flush=True)
        known = json.loads(RESULTS.read_text())["runs"] if RESULTS.exists() else {}
        save("curriculum_cpu", {"target": target, "runs": known | {f"{name}, seed {seed}": result}})


if __name__ == "__main__":
    typer.run(main)
