"""Adapters of one base train as each would alone: to the last bit, in any order, also from a checkpoint."""

from __future__ import annotations

import socket
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file
from test_layouts import world
from trainer_jobs import POLICY, TEMPERATURE, Machine, Setting, engine, make_batch

from allocation import ParallelSizes
from areal_like.core.algorithms.losses import sft
from areal_like.core.config.schema import OptimizerConfig
from areal_like.core.trainer.engine import LoRA, Rendezvous, RoleError
from areal_like.core.types import LossSpec

pytestmark = pytest.mark.covers("LoRA")

ALL = LoRA(rank=4, alpha=8, targets=("all-linear",))
NAMES = ("math", "code")
LOSSES = {"math": LossSpec(sft), "code": POLICY}
TWO = ParallelSizes(dp=2, edp=2)


@dataclass(frozen=True)
class Trained:
    """One rank's view of an adapter: its steps, its log-probs after them if it has any, on rank 0 the adapter."""

    steps: list[dict[str, float]]
    log_probs: np.ndarray | None
    matrices: dict[str, np.ndarray]


def train(
    rendezvous: Rendezvous,
    listener: socket.socket | None,
    setting: Setting,
    order: tuple[str, ...],
    folder: Path | None = None,
    resumed: bool = False,
) -> dict[str, Trained]:
    """Train the adapters in this order, each on batches of its own; save to `folder` after the first four steps.

    A `resumed` engine begins with that checkpoint.
    """
    steps: dict[str, list[dict[str, float]]] = {name: [] for name in order}
    with engine(rendezvous, listener, setting) as made, tempfile.TemporaryDirectory() as scratch:
        for place, name in enumerate(order):
            if resumed and place == 4:
                made.load(folder)
            if not (resumed and place < 4):
                if setting.adapters:
                    made.select(name)
                seed = order[:place].count(name) + 100 * NAMES.index(name)
                steps[name].append(made.train(make_batch(seed), LOSSES[name], temperature=TEMPERATURE))
            if folder and not resumed and place == 3:
                made.save(folder)
                made.finish_save()
        found = {}
        for name in steps:
            if setting.adapters:
                made.select(name)
            log_probs = made.log_probs(make_batch(7), TEMPERATURE)
            made.save_adapters(path := Path(scratch, name))
            saved = {} if rendezvous.rank else load_file(path / "adapter_model.safetensors")
            found[name] = Trained(
                steps[name], log_probs and log_probs[1], {key: value.float().numpy() for key, value in saved.items()}
            )
    return found


def assert_equal(found: Trained, wanted: Trained) -> None:
    assert found.steps == wanted.steps[-len(found.steps) :]
    np.testing.assert_array_equal(found.log_probs, wanted.log_probs)
    assert found.matrices.keys() == wanted.matrices.keys()
    for name, matrix in wanted.matrices.items():
        np.testing.assert_array_equal(found.matrices[name], matrix, err_msg=name)


SETTING = Setting(
    Path(),
    lora=ALL,
    backend="fsdp",
    optimizer=OptimizerConfig(lr=1e-2, lr_scheduler_type="cosine", warmup_steps_proportion=0.2),
    total_steps=5,
)
ORDER = ("math", "code", "code", "math", "math", "code", "math")


MEGATRON = {"backend": "megatron"}
ROWS = {
    "d1": {},
    "d2": {"sizes": TWO},
    "offload": {"offload": True},
    "t2": {"sizes": ParallelSizes(tp=2)},
    "megatron": {**MEGATRON, "offload": True},
    "megatron-d2": {**MEGATRON, "sizes": TWO, "megatron": {"overlap_grad_reduce": True, "overlap_param_gather": True}},
    "megatron-t2": {**MEGATRON, "sizes": ParallelSizes(tp=2, etp=2), "machine": Machine("cpu", "bfloat16")},
    "megatron-p2": {**MEGATRON, "sizes": ParallelSizes(pp=2), "machine": Machine("cpu", "float16")},
    "megatron-not-distributed": {
        **MEGATRON,
        "sizes": TWO,
        "megatron": {"use_distributed_optimizer": False},
        "machine": Machine("cpu", "bfloat16"),
    },
}


SHORT = ("d2", "offload", "megatron-d2")


@pytest.mark.parametrize(
    "how", [pytest.param(row, id=name, marks=[] if name in SHORT else pytest.mark.long) for name, row in ROWS.items()]
)
def test_an_adapter_beside_another_trains_as_it_does_alone(ranks, models, tmp_path, how):
    alone = replace(SETTING, model=models["tied"], **how)
    both, size = replace(alone, adapters=NAMES), world(alone.sizes)
    together = ranks.run(train, size, both, ORDER, tmp_path / "state")
    resumed = ranks.run(train, size, both, ORDER, tmp_path / "state", True)
    for name in NAMES:
        only = ranks.run(train, size, alone, tuple(each for each in ORDER if each == name))
        for found, again, wanted in zip(together, resumed, only, strict=True):
            assert_equal(found[name], wanted[name])
            assert_equal(again[name], wanted[name])
    first, second = (together[0][name].matrices for name in NAMES)
    assert any((first[name] != second[name]).any() for name in first)


def refusals(rendezvous: Rendezvous, listener: socket.socket | None, setting: Setting) -> str:
    with engine(rendezvous, listener, setting) as made, pytest.raises(RoleError) as refused:
        made.select("poetry")
    return str(refused.value)


def test_an_unknown_adapter_is_refused(ranks, models):
    (refused,) = ranks.run(refusals, 1, replace(SETTING, model=models["tied"], adapters=NAMES))
    assert refused == "the actor has no adapter poetry"
