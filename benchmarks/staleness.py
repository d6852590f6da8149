"""Measure an example's learning curve by staleness and by weight-update mode: rewards at equal numbers of samples.

    python -m benchmarks.staleness [--eta 0,1,2,4,8] [--losses decoupled,naive] [--seeds 1] [key=value ...]
    python -m benchmarks.staleness --requests in_place,recompute,drain [--seeds 1,2,3] [key=value ...]
    python -m benchmarks.staleness --requests … --config examples/math/gsm8k_grpo.yaml --name contract_curves_h200

The first command compares staleness bounds (`rollout.max_head_offpolicyness`) and the two losses of
`actor.use_decoupled_loss`. The second compares the values of `weight_update.requests`. The third does the same with
another example. Figures are merged into benchmarks/results; `python docs/generate/pictures.py` draws
docs/images/learning_curves.svg from the demo's.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.demo import CONFIG, demo
from benchmarks.report import ROOT, save

LOSSES = {"decoupled": "true", "naive": "false"}


def main(
    overrides: Annotated[list[str] | None, typer.Argument(metavar="key=value ...")] = None,
    eta: str = "0,1,2,4,8",
    losses: str = ",".join(LOSSES),
    requests: str = "",
    seeds: str = "1",
    limit_s: float = 900,
    config: Path = CONFIG,
    name: Annotated[str, typer.Option(help="of the file with the figures")] = "staleness_cpu",
) -> None:
    file = ROOT / f"benchmarks/results/{name}.json"
    variants = contracts(requests) if requests else bounds(eta, losses)
    for (variant, settings), seed in itertools.product(list(variants), seeds.split(",")):
        result = demo([*settings, f"seed={seed}", *(overrides or [])], 0.9, limit_s, config)
        print(variant, seed, {key: value for key, value in result.items() if key != "held_out"}, flush=True)
        runs = json.loads(file.read_text())["runs"] if file.exists() else {}
        save(name, {"runs": runs | {f"{variant}, seed {seed}": {"name": variant, "seed": int(seed), **result}}})


def bounds(eta: str, losses: str) -> Iterator[tuple[str, list[str]]]:
    """Every bound with every loss."""
    for bound, loss in itertools.product(eta.split(","), losses.split(",")):
        settings = [f"rollout.max_head_offpolicyness={bound}", f"actor.use_decoupled_loss={LOSSES[loss]}"]
        yield f"η = {bound}, {loss}", settings


def contracts(requests: str) -> Iterator[tuple[str, list[str]]]:
    """Every way to treat requests, where weights change while most of them run."""
    for way in requests.split(","):
        yield way, [f"weight_update.requests={way}", "rollout.max_head_offpolicyness=2"]


if __name__ == "__main__":
    typer.run(main)
