"""Sections of `docs/benchmarks.md` about learning curves, algorithms and killed runs, for `figures.py`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[2] / "benchmarks/results"
CURVES = {"staleness_cpu": "CPU demo, 80 steps", "contract_curves_h200": "100M parameters, 20 steps on an H200"}
SHARED = ("actor.eps_clip=null", "actor.eps_clip_higher=null", "actor.use_decoupled_loss=null")  # of all runs


def sections() -> Iterator[str]:
    """Yield the sections, line by line."""
    yield STALENESS
    yield from table(["Run", "Setting", "Reward at the end, by seed", "Samples to 0.9, by seed"], curves())
    yield DISTANCE
    yield from table(["`weight_update.requests`", "One version", "Several versions", "Throughput"], distances())
    yield PRESETS
    yield from table(
        ["`algorithm`", "Samples to 0.9", "Seconds", "CPU seconds", "Reward at the end", "With"], presets()
    )
    yield CURRICULUM
    yield from table(["Run", "Steps to 0.9", "Samples to 0.9", "Last evaluation", "Keys"], prompt_results())
    yield SOAK
    yield from table(["Killed", "Kills", "Lost at most, s", "Until every process has ended, at most, s"], kills())


def table(head: Sequence[str], rows: Iterator[Sequence[str]]) -> Iterator[str]:
    """Yield a Markdown table."""
    yield f"| {' | '.join(head)} |"
    yield "|" + "---|" * len(head)
    for row in rows:
        yield f"| {' | '.join(row)} |"


def curves() -> Iterator[Sequence[str]]:
    """Yield the final reward of each setting, one number per seed."""
    for name, title in CURVES.items():
        settings: dict[str, list[Mapping[str, Any]]] = {}
        for run in read(name)["runs"].values():
            settings.setdefault(run["name"], []).append(run)
        for setting, runs in sorted(settings.items(), key=lambda one: one[0] if one[0].startswith("η") else "ω"):
            rewards = ", ".join(f"{run['final_reward']:.2f}" for run in runs)
            samples = ", ".join(f"{run['samples_to_target']:,}" if run["samples_to_target"] else "–" for run in runs)
            yield f"[{title}](../benchmarks/results/{name}.json)", setting.replace("naive", "plain"), rewards, samples


def distances() -> Iterator[Sequence[str]]:
    """Yield how far the servers' log-probs are from recomputed ones, by the way requests are treated."""
    case = read("update_cost_cpu")["cases"][0]
    for requests, found in case["apart"].items():
        several, kept = found["several_versions"], case["ratio"].get(requests)
        yield (
            "no updates" if requests == "none" else f"`{requests}`",
            f"{found['one_version']:.0e}",
            "–" if several is None else f"{several:.0e}",
            "–" if kept is None else f"{kept:.2f}",
        )


def presets() -> Iterator[Sequence[str]]:
    """Yield what each algorithm makes of the demo, the fastest learner first."""
    found = read("presets_cpu")["presets"]
    for name, figures in sorted(found.items(), key=lambda one: (one[1]["samples_to_target"] or float("inf"), one[0])):
        samples, seconds = figures["samples_to_target"], figures["seconds_to_target"]
        cpu_s = figures.get("cpu_seconds_to_target")
        own = [one for one in figures["settings"] if one not in SHARED and not one.startswith("algorithm=")]
        yield (
            f"`{name}`",
            f"{samples:,}" if samples else "not reached",
            f"{seconds:.0f}" if seconds else "–",
            f"{cpu_s:.0f}" if cpu_s else "–",
            f"{figures['final_reward']:.3f}",
            ", ".join(f"`{one}`" for one in own),
        )


def prompt_results() -> Iterator[Sequence[str]]:
    """Yield results with and without a curriculum and single rollouts, one number per seed."""
    variants: dict[str, list[Mapping[str, Any]]] = {}
    for name, run in read("curriculum_cpu")["runs"].items():
        variants.setdefault(name.partition(", ")[0], []).append(run)
    for name, runs in variants.items():
        keys = [one for one in runs[0]["settings"] if not one.startswith(("evaluator.", "total_train_steps", "seed="))]
        yield (
            f"`{name}`",
            ", ".join(str(run["steps_to_target"] or "–") for run in runs),
            ", ".join(f"{run['samples_to_target']:,}" if run["samples_to_target"] else "–" for run in runs),
            ", ".join(f"{run['final_reward']:.3f} at step {run['steps']}" for run in runs),
            ", ".join(f"`{key}`" for key in keys),
        )


def kills() -> Iterator[Sequence[str]]:
    """Yield what kills at random moments cost, by when they came."""
    found = [kill for run in read("soak_cpu")["runs"] for kill in run["kills"]]
    early = [kill for kill in found if kill["seconds_lost"] > 1]
    late = [kill for kill in found if kill["seconds_lost"] <= 1]
    for when, group in (("during start-up, or soon after it", early), ("later", late)):
        lost, end = (max(kill[key] for kill in group) for key in ("seconds_lost", "seconds_to_end"))
        yield when, str(len(group)), f"{lost:.1f}", f"{end:.1f}"


def read(name: str) -> Any:
    """Return a result file."""
    return json.loads((RESULTS / f"{name}.json").read_text())


STALENESS = """
## Learning and staleness

The demo's evaluation reward for each η and loss, and for each `weight_update.requests` at η = 2 (`python -m
benchmarks.staleness`), beside the 100M model's. Seeds differ by a few hundredths, so up to η = 2 the results do not differ from
synchronous training, and three seeds do not separate the three ways to treat requests.

![Evaluation reward over steps, for each η with both losses, and for each way to treat requests](images/learning_curves.svg)
"""
DISTANCE = """
## Log-probs across updates

Mean distance of the servers' log-probs from those that transformers recomputes in float32 with the version of each token, for
responses of one version and of several. The weights change by one percent per update. Throughput is relative to no updates, on two
CPU cores ([file](../benchmarks/results/update_cost_cpu.json), `python -m benchmarks.update_cost --device cpu`). For two H200, NCCL and
a model of 0.6B parameters, [this file](../benchmarks/results/update_contracts_h200x2.json) has the throughput of each.
"""
PRESETS = """
## Algorithms

The CPU demo with each algorithm: 80 steps of 512 samples, seed 1, one run each on two cores
([file](../benchmarks/results/presets_cpu.json), `python -m benchmarks.presets`). Some runs shared the cores with other work, so
samples and CPU seconds (of all processes) are more comparable than seconds. The target is evaluation reward 0.9.
"""
CURRICULUM = """
## Curriculum and single rollouts

Runs on two busy cores, evaluated every 5 steps, one number per seed
([file](../benchmarks/results/curriculum_cpu.json), `python -m benchmarks.curriculum`).

- **The CPU demo.** It has 1,444 different training prompts, and a step trains 64. In 25 steps a run visits 1,600 rows, of which about
  940 are first visits of their prompt, and a curriculum can only skip prompts that it has visited. So no gain is expected here.
- **Varied difficulty.** One training row in four is a sum of the demo. The others are questions whose answer is a number in the text,
  and questions without the numbers that the answer needs ([file](../benchmarks/varied_difficulty.py)). The evaluation has sums only.
  The curriculum knows the success rate of each of the three kinds after a step. One seed each does not separate the two runs: they
  differ by 0.06 after 40 steps, and the one with a curriculum was behind until step 30. So no gain is shown here either.
"""
SOAK = """
## Killed runs

`make soak` kills runs on two CPU cores at random moments and resumes them with the same command
([file](../benchmarks/results/soak_cpu.json)). All four runs of 60 steps completed, each group was trained exactly once, and a
checkpoint was due every two steps. Nearly everything lost is start-up time. The runs have not been repeated on GPUs.
"""
