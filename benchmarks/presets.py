"""What each algorithm makes of the CPU demo: seconds, processor seconds and samples to a held-out reward, and the last.

    python -m benchmarks.presets [--presets grpo,ppo] [--target 0.9] [--limit-s 900] [key=value ...]

Each preset is run once with its own defaults, which the demo's `eps_clip`, `eps_clip_higher` and `use_decoupled_loss`
would hide, and with what it cannot do without. Seconds count from the evaluation before the first step; evaluations
are included. Processor seconds are those of all processes of the run, which depend less on what else the machine
does. Figures are added to those of other presets in the file, from which `python docs/generate/presets.py` writes the
table of docs/algorithms.md; a run that outlasts the limit is ended, and its last evaluation counts.
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
