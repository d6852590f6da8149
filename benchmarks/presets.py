"""Compare the algorithms on the CPU demo: time and samples to an evaluation reward, and the final reward.

    python -m benchmarks.presets [--presets grpo,ppo] [--target 0.9] [--limit-s 900] [key=value ...]

Each preset runs once with its own defaults (the demo's `eps_clip`, `eps_clip_higher` and `use_decoupled_loss` would
override them) and with the sections it requires. Seconds count from the evaluation before the first step and include
evaluations. CPU seconds cover all processes of the run and depend less on other load. Figures are merged into the
result file, which docs/benchmarks.md shows. A run that exceeds the limit is stopped, and its last evaluation counts.
"""

from __future__ import annotations

import json
from typing import Annotated

import typer

from benchmarks.demo import demo
from benchmarks.report import ROOT, save

RESULTS = ROOT / "benchmarks/results/presets_cpu.json"
SHARED = ("actor.eps_clip=null", "actor.eps_clip_higher=null", "actor.use_decoupled_loss=null")  # of all runs
PRESETS = {
    "grpo": (),
    "dr_grpo": (),
    "dapo": (),
    "rloo": (),
    "reinforce_pp": (),
    "gspo": (),
    "cispo": (),
    "ppo": ("critic={}",),
    # as many samples in each of its optimizer steps as the others have, and more of these, at a lower rate
    "dpo": (
        *("ref={}", "actor.ppo_n_minibatches=1", "train_dataset.batch_size=32"),
        *("total_train_steps=280", "actor.optimizer.lr=5e-4"),
    ),
}


def main(
    overrides: Annotated[list[str] | None, typer.Argument(metavar="key=value ...")] = None,
    presets: str = ",".join(PRESETS),
    target: float = 0.9,
    limit_s: float = 900,
) -> None:
    for name in presets.split(","):
        settings = [*SHARED, f"algorithm={name}", *PRESETS[name], *(overrides or [])]
        result = demo(settings, target, limit_s)
        print(name, {key: value for key, value in result.items() if key != "held_out"}, flush=True)
        known = json.loads(RESULTS.read_text())["presets"] if RESULTS.exists() else {}
        save("presets_cpu", {"target": target, "presets": known | {name: result}})


if __name__ == "__main__":
    typer.run(main)
