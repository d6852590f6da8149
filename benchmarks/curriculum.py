"""Compare the CPU demo with and without a curriculum and single rollouts: steps and samples to an evaluation reward.

    python -m benchmarks.curriculum [--variants grpo,curriculum] [--target 0.9] [--limit-s 900] [key=value ...]

Every variant trains 512 samples per step: 64 prompts with 8 samples each, or 512 prompts with one. The demo has 8192
rows, of which many have equal prompts, so a prompt comes several times. Figures are merged into the result file, which
docs/benchmarks.md shows. A run that exceeds the limit is stopped, and its last evaluation counts.
"""

from __future__ import annotations

import json
from typing import Annotated

import typer

from benchmarks.demo import demo
from benchmarks.report import ROOT, save

RESULTS = ROOT / "benchmarks/results/curriculum_cpu.json"
SHARED = ("evaluator.freq_steps=5",)
SINGLE = ("algorithm=single_rollout", "gconfig.n_samples=1", "train_dataset.batch_size=512", "total_train_epochs=10")
CURRICULUM = ("train_dataset.curriculum={}",)
VARIANTS = {
    "grpo": (),
    "curriculum": CURRICULUM,
    "single_rollout": SINGLE,
    "single_rollout_curriculum": (*SINGLE, *CURRICULUM),
}


def main(
    overrides: Annotated[list[str] | None, typer.Argument(metavar="key=value ...")] = None,
    variants: str = ",".join(VARIANTS),
    target: float = 0.9,
    limit_s: float = 900,
) -> None:
    for name in variants.split(","):
        result = demo([*SHARED, *VARIANTS[name], *(overrides or [])], target, limit_s)
        print(name, {key: value for key, value in result.items() if key != "held_out"}, flush=True)
        known = json.loads(RESULTS.read_text())["variants"] if RESULTS.exists() else {}
        save("curriculum_cpu", {"target": target, "variants": known | {name: result}})


if __name__ == "__main__":
    typer.run(main)
