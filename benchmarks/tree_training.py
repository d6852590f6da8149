"""Measure trainer tokens per second on branching conversations, packed as trees (`mb_spec.share_prompts`) and flat.

    python -m benchmarks.tree_training --config examples/math/gsm8k_grpo_cpu.yaml [key=value ...]
    python -m benchmarks.tree_training --config ... --layout fsdp:d1 --trees 4

One rank and one engine train the same batch alternately both ways. A tree is a conversation of 8 turns with 8 branches,
which share their first turns and their tokens; every branch is trained on all of its answers. Three shapes differ in
where the branches leave each other:

- `last`: all before the last turn, as samples of a last step.
- `halves`: two at a time, before turns 3, 5 and 7, as in a tree search.
- `each`: one before every turn from the first to the seventh, as retries of one conversation.

A token counts as often as it occurs in the sequences; `bound` is how many times fewer the tree has. On a CPU the
seconds are processor time, which other processes do not lengthen. The output includes loss and gradient norm of a step
without an update; tests compare the gradients.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

import allocation
from areal_like.core.config.load import load
from areal_like.core.trainer.engine import EngineSpec, Rendezvous
from areal_like.core.trainer.prefix_trees import find_trees
from areal_like.core.types import Batch
from areal_like.runtime.ports import listen
from benchmarks.report import save
from benchmarks.shared_prompts import Side, sharing
from benchmarks.trainer_throughput import DEVICE, peak_gib, seconds, spec_of, started

TURNS = BRANCHES = 8
# the first turn, from 0, that each branch does not share with the one before it
SHAPES = {"last": [7] * 7, "halves": [6, 4, 6, 2, 6, 4, 6], "each": [6, 5, 4, 3, 2, 1, 0]}


def main(
    config: Annotated[Path, typer.Option()],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="key=value ...")] = None,
    prompt: Annotated[int, typer.Option(help="tokens before the first turn, as of a system prompt")] = 128,
    question: Annotated[int, typer.Option(help="tokens of a turn before its answer, as of a tool's output")] = 32,
    answer: Annotated[int, typer.Option(help="tokens of a turn's answer")] = 64,
    trees: Annotated[int, typer.Option(help="of a batch")] = 1,
    layout: Annotated[str, typer.Option(help="of one rank")] = "megatron:d1",
    steps: int = 5,
    name: Annotated[str, typer.Option(help="of the result file, after tree_training_")] = "{device}",
) -> None:
    run, (plan,) = load(config, overrides or []).config, allocation.compile(layout).engines
    with tempfile.TemporaryDirectory() as folder:
        listener = listen("127.0.0.1")
        meeting = Rendezvous(0, 1, "127.0.0.1", listener.getsockname()[1], listener=listener)
        spec = spec_of(run, plan, Path(folder))
        engine = started(replace(spec, config=sharing(spec.config, True)), meeting)
        batches = {shape: make_batch(cuts, trees, prompt, question, answer) for shape, cuts in SHAPES.items()}
        shapes = {shape: measure(engine, spec, batch, steps) for shape, batch in batches.items()}
        engine.shutdown()
    figures = {
        "layout": layout,
        "dtype": run.actor.dtype,
        "turns": TURNS,
        "branches": BRANCHES,
        "trees": trees,
        "prompt_tokens": prompt,
        "question_tokens": question,
        "answer_tokens": answer,
        "ratio": {shape: found["ratio"]["train"] for shape, found in shapes.items()},
        "shapes": shapes,
    }
    save("tree_training_" + name.format(device=DEVICE), figures)


def measure(engine: Any, spec: EngineSpec, batch: Batch, steps: int) -> dict[str, Any]:
    """Train a batch flat and as trees, in turn."""
    sides = {side: Side(engine, sharing(spec.config, side == "tree"), batch) for side in ("flat", "tree")}
    still = {side: it.train(learning_rate=0.0) for side, it in sides.items()}
    peaks = {side: peak_gib(it.train) for side, it in sides.items()}
    times: dict[str, dict[str, list[float]]] = {part: {side: [] for side in sides} for part in ("train", "log_probs")}
    for _ in range(steps):
        for part, of_part in times.items():
            for side, it in sides.items():
                of_part[side].append(take_time(getattr(it, part)))
    rates = {
        part: {side: len(batch.tokens) / statistics.median(values) for side, values in of_part.items()}
        for part, of_part in times.items()
    }
    found = find_trees(batch, max_tokens=spec.config.mb_spec.max_tokens_per_mb, alignment=1)
    bound = len(batch.tokens) / int(found.lengths.sum())
    ratio = {part: of_part["tree"] / of_part["flat"] for part, of_part in rates.items()}
    print(f"tree / flat: {ratio}, at most {bound:.2f} by tokens, peak GiB {peaks}", flush=True)
    return {
        "tokens_per_step": len(batch.tokens),
        "bound": bound,
        "ratio": ratio,
        "tokens_per_second": rates,
        "peak_gib": peaks,
        "first_step": {side: {name: step[name] for name in ("loss", "grad_norm")} for side, step in still.items()},
        "seconds": times,
    }


def take_time(work: Callable[[], object]) -> float:
    """Return the seconds that some work takes, of this process's threads together on a CPU."""
    if DEVICE == "cuda":
        return seconds(work)
    start = time.process_time()
    work()
    return time.process_time() - start


def make_batch(cuts: Sequence[int], trees: int, prompt: int, question: int, answer: int) -> Batch:
    """Random tokens and advantages; branch i + 1 of a tree begins with the first `cuts[i]` turns of branch i."""
    rng, turn = np.random.default_rng(0), question + answer
    length, sequences = prompt + TURNS * turn, []
    for _ in range(trees):
        last = rng.integers(4, 30, length, dtype=np.int32)  # every tokenizer has these
        sequences.append(last)
        for cut in cuts:
            shared = prompt + cut * turn
            last = np.concatenate([last[:shared], rng.integers(4, 30, length - shared, dtype=np.int32)])
            sequences.append(last)
    n = len(sequences)
    mask = np.concatenate([np.zeros(prompt), np.tile(np.repeat([0, 1], [question, answer]), TURNS)])
    fields = {
        "loss_mask": np.tile(mask, n).astype(np.float32),
        "advantages": np.repeat(rng.normal(size=n), length).astype(np.float32),
        "behaviour_logprobs": rng.normal(-3, 0.1, n * length).astype(np.float32),
        "on_policy": np.ones(n * length, np.float32),
    }
    return Batch(np.full(n, length, np.int32), np.concatenate(sequences), fields)


if __name__ == "__main__":
    typer.run(main)
