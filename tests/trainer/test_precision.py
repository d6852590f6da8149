"""float16 with a loss scale, and the output layer in float32, on both engines."""

from __future__ import annotations

import socket
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from trainer_jobs import TEMPERATURE, Machine, Setting, engine, exported, make_batch, three_steps

from allocation import ParallelSizes
from areal_like.core.algorithms.losses import LossInputs, TokenLoss, sft
from areal_like.core.config.schema import OptimizerConfig
from areal_like.core.trainer.engine import Rendezvous
from areal_like.core.trainer.logprobs import fp32_logits, log_probs_and_entropy_of_hidden
from areal_like.core.types import LossSpec

HALF = Machine("cpu", "float16")
TWO = ParallelSizes(dp=2, edp=2)
LAYOUTS = {
    "one": {},
    "tensors": {"sizes": ParallelSizes(tp=2, etp=2)},
    "pipeline": {"sizes": ParallelSizes(pp=2)},
    "data": {"sizes": TWO},
    "not distributed": {"sizes": TWO, "megatron": {"use_distributed_optimizer": False}},
    "fsdp": {"sizes": TWO, "backend": "fsdp"},
    "fsdp tensors": {"sizes": ParallelSizes(tp=2), "backend": "fsdp"},
}


def ranks_of(how: dict) -> int:
    sizes = how.get("sizes", ParallelSizes())
    return sizes.dp * sizes.tp * sizes.pp


LONG = pytest.mark.long


@pytest.mark.parametrize(
    "layout", [pytest.param(it, marks=[] if it in ("tensors", "pipeline", "fsdp") else [LONG]) for it in LAYOUTS]
)
def test_float16_trains_as_float32_does(ranks, models, layout):
    """Gradients are scaled for the backward pass alone: their norm and the weights are those of float32, rounded."""
    how = LAYOUTS[layout]
    exact = ranks.once(three_steps, 1, Setting(models["tied"]))[0]
    for outcome in ranks.run(three_steps, ranks_of(how), Setting(models["tied"], machine=HALF, **how)):
        for step, expected in zip(outcome.steps, exact.steps, strict=True):
            assert step["skipped"] == 0 and step["loss_scale"] > 1
            assert step["loss"] == pytest.approx(expected["loss"], rel=2e-3, abs=1e-3)  # steps of float16 at 1
            assert step["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-2)
        for name, weight in outcome.weights.items():
            assert np.abs(weight - exact.weights[name]).max() < 2e-3, name


def steep(inputs: LossInputs, factor: float) -> TokenLoss:
    """Gradients whose scaled values float16 does not hold, if `factor` is large."""
    return -inputs.logprobs * factor, {}


@dataclass(frozen=True)
class Overflowed:
    """Steps of which the second overflows, and the step and the weights after a checkpoint that follows them."""

    steps: list[dict[str, float]]
    moved: bool
    continued: dict[str, float]
    weights: dict[str, np.ndarray]


def overflowing_steps(
    rendezvous: Rendezvous, listener: socket.socket | None, setting: Setting, folder: Path
) -> Overflowed:
    with engine(rendezvous, listener, setting) as made:
        steps = [made.train(make_batch(0), LossSpec(sft))]
        before = exported(made)
        steps += [made.train(make_batch(1), LossSpec(steep, 1e6)) for _ in range(4)]
        after = exported(made)
        made.save(folder)
        made.finish_save()
        continued = made.train(make_batch(2), LossSpec(sft))
        moved = any((before[name] != after[name]).any() for name in before)
        return Overflowed(steps, moved, continued, exported(made))


def resumed_step(
    rendezvous: Rendezvous, listener: socket.socket | None, setting: Setting, folder: Path
) -> tuple[dict[str, float], dict[str, np.ndarray]]:
    with engine(rendezvous, listener, setting) as made:
        made.load(folder)
        return made.train(make_batch(2), LossSpec(sft)), exported(made)


@pytest.mark.parametrize(
    "layout", ["one", "fsdp", *(pytest.param(it, marks=LONG) for it in ("data", "not distributed", "fsdp tensors"))]
)
def test_an_overflow_skips_the_step_and_lowers_the_scale_which_checkpoints_keep(ranks, models, tmp_path, layout):
    """More skips than `max_skipped_steps` do not end the run while a smaller scale may help."""
    how = LAYOUTS[layout]
    setting = Setting(
        models["tied"], machine=HALF, optimizer=OptimizerConfig(lr=1e-2, eps=1e-2, max_skipped_steps=1), **how
    )
    ran = ranks.run(overflowing_steps, ranks_of(how), setting, tmp_path / "saved")
    resumed = ranks.run(resumed_step, ranks_of(how), setting, tmp_path / "saved")
    for seen, (step, weights) in zip(ran, resumed, strict=True):
        assert [step["skipped"] for step in seen.steps] == [0, 1, 1, 1, 1]
        assert seen.steps[-1]["loss_scale"] < seen.steps[0]["loss_scale"]
        assert not seen.moved
        assert seen.continued["skipped"] == 0
        assert seen.continued["loss_scale"] < seen.steps[0]["loss_scale"]
        assert step == seen.continued
        for name in weights:
            np.testing.assert_array_equal(weights[name], seen.weights[name], err_msg=name)


def one_sided_overflow(rendezvous: Rendezvous, listener: socket.socket | None, setting: Setting) -> list[list[float]]:
    """Loss scales of dense and expert weights after each of two steps whose dense gradients alone are infinite."""
    from areal_like.backends.megatron import optimizer

    scales = []
    with engine(rendezvous, listener, setting) as made:
        parts = optimizer.parts(made._optimizer)  # type: ignore[attr-defined]
        collect = parts[0]._collect_main_grad_data_for_unscaling
        parts[0]._collect_main_grad_data_for_unscaling = lambda: [each.fill_(torch.inf) for each in collect()]
        for _ in range(3):
            step = made.train(make_batch(0), LossSpec(sft))
            assert step["skipped"] == 1
            scales.append([float(part.grad_scaler.scale) for part in parts])
    return scales


def test_dense_and_expert_weights_have_one_loss_scale(ranks, models):
    setting = Setting(models["moe"], ParallelSizes(dp=2, ep=2), machine=HALF)
    for scales in ranks.run(one_sided_overflow, 2, setting):
        assert all(len(each) == 2 and each[0] == each[1] for each in scales), scales
        assert scales[-1][0] < scales[0][0]


def head_error(rendezvous: Rendezvous, listener: socket.socket | None, setting: Setting) -> tuple[float, float]:
    """How far the output layer is from its own product in higher precision, and the gradient norm of a step."""
    errors = []

    def measured(hidden: torch.Tensor, weight: torch.Tensor, *rest: Any, in_fp32: bool, **more: Any) -> Any:
        found = log_probs_and_entropy_of_hidden(hidden, weight, *rest, in_fp32=in_fp32, **more)
        exact, _ = log_probs_and_entropy_of_hidden(hidden.float(), weight.float(), *rest, **more)
        errors.append(float((found[0] - exact).abs().max()))
        return found

    def note(layer: torch.nn.Module, inputs: tuple[torch.Tensor], logits: torch.Tensor) -> None:
        exact = inputs[0].double() @ layer.weight.double().t()
        errors.append(float((logits.double() - exact).abs().max()))

    with engine(rendezvous, listener, setting) as made:
        if setting.backend == "fsdp":
            made._model.get_output_embeddings().register_forward_hook(note)  # type: ignore[attr-defined]
        with mock.patch("areal_like.backends.megatron.engine.log_probs_and_entropy_of_hidden", measured):
            made.log_probs(make_batch(), TEMPERATURE)
        step = made.train(make_batch(), LossSpec(sft))
    return max(errors), step["grad_norm"]


@pytest.mark.parametrize("how", [{}, {"sizes": ParallelSizes(tp=2, etp=2)}, {"sizes": TWO, "backend": "fsdp"}])
@pytest.mark.parametrize("model", [pytest.param("tied", marks=LONG), "untied"])
def test_an_output_layer_in_float32_is_not_rounded(ranks, models, how, model):
    """Hidden states and weights are in bfloat16; the gradients are those of the rounded layer, but for rounding."""
    rounded = Setting(models[model], machine=Machine("cpu", "bfloat16"), **how)
    for (plain, norm), (kept, other) in zip(
        ranks.run(head_error, ranks_of(how), rounded),
        ranks.run(head_error, ranks_of(how), replace(rounded, fp32_head=True)),
        strict=True,
    ):
        assert kept < 1e-5 < 1e-3 < plain
        assert other == pytest.approx(norm, rel=5e-2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logits_in_float32_have_the_gradients_of_the_written_out_product(dtype):
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(size, 16, generator=generator).to(dtype).requires_grad_() for size in (7, 31))
    labels = torch.arange(7)
    logits = fp32_logits(hidden[None], weight)[0]
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, hidden.float() @ weight.float().t())
    log_probs = torch.log_softmax(logits / TEMPERATURE, -1)[labels, labels]
    found = torch.autograd.grad(log_probs.sum(), [hidden, weight])

    wide = [each.detach().float().requires_grad_() for each in (hidden, weight)]
    written = torch.log_softmax(wide[0] @ wide[1].t() / TEMPERATURE, -1)[labels, labels]
    expected = torch.autograd.grad(written.sum(), wide)
    for gradient, wanted, given in zip(found, expected, (hidden, weight), strict=True):
        assert gradient.dtype == dtype and gradient.shape == given.shape
        torch.testing.assert_close(gradient.float(), wanted, rtol=2e-2, atol=2e-2)

    weight.main_grad = torch.zeros(31, 16)
    joined, _ = log_probs_and_entropy_of_hidden(
        hidden, weight, labels, temperature=TEMPERATURE, vocab_size=31, group=None, in_fp32=True
    )
    torch.testing.assert_close(joined, written.detach())
    joined.sum().backward()
    torch.testing.assert_close(hidden.grad.float(), expected[0], rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(weight.main_grad, expected[1], rtol=2e-2, atol=2e-2)
