"""The reward curve as a picture."""

from collections.abc import Mapping
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # a run has no screen

from matplotlib import pyplot


def draw_rewards(path: Path, title: str, training: Mapping[int, float], held_out: Mapping[int, float]) -> None:
    """Write a PNG of the mean reward by step: of each training batch, and of the evaluations."""
    figure, axes = pyplot.subplots(figsize=(7, 4), dpi=150, layout="constrained")
    axes.plot(list(training), list(training.values()), color="#9ecae1", label="training batches (sampled)")
    axes.plot(list(held_out), list(held_out.values()), color="#08519c", marker="o", label="evaluation")
    for step in {min(held_out), max(held_out)} if held_out else ():
        axes.annotate(
            f"{held_out[step]:.2f}", (step, held_out[step]), xytext=(0, -16), textcoords="offset points", ha="center"
        )
    axes.set(xlabel="training step", ylabel="mean reward", title=title)
    axes.set_ylim(bottom=min(0.0, *training.values()) if training else 0.0)
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.savefig(path)
    pyplot.close(figure)
