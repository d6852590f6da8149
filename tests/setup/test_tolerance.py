"""The tolerances of numeric tests have room for rounding, and hide no error of 1e-4."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import mutations
import numpy as np
import pytest
from tolerance import BACKWARD, LAYERS, THOUSAND, assert_close, assert_gradient, close_to, rounding

TESTS, ROOT = str(Path(__file__).parents[1]), str(Path(__file__).parents[2])
VALUES = np.array([-11.3, -5.0, np.nan, -0.2], np.float32)


@pytest.mark.parametrize("depth", [LAYERS, BACKWARD])
@pytest.mark.parametrize("magnitude", [1.0, 5.0, 300.0])
def test_an_error_of_1e_4_of_the_magnitude_is_seen(depth: int, magnitude: float) -> None:
    values = np.linspace(-magnitude, magnitude, 7)
    with pytest.raises(AssertionError):
        assert_close(values + 1e-4 * magnitude, values, depth)
    assert magnitude * (1 + 1e-4) != close_to(magnitude, depth)


@pytest.mark.parametrize(("name", "size"), [("lr", 1e-6), ("grad_norm", 1e-3), ("loss", 0.1), ("entropy", 5.0)])
def test_an_error_of_1e_4_of_a_metric_is_seen(name: str, size: float) -> None:
    assert {name: size * (1 + 1e-4)} != close_to({name: size})
    assert {name: size * (1 + 1e-7)} == close_to({name: size})


def test_the_last_bits_of_a_layer_pass() -> None:
    assert_close(VALUES + 4.3e-6, VALUES)  # as instruction sets differed in two layers
    assert 1 + 8 * np.finfo(np.float32).eps == close_to(1.0)


def test_an_undefined_number_is_not_close() -> None:
    with pytest.raises(AssertionError):
        assert_close(np.nan_to_num(VALUES), VALUES)


def test_comparisons_that_see_no_error_of_1e_4_are_listed(tmp_path: Path) -> None:
    (tmp_path / "test_numbers.py").write_text(
        "import sensitivity, numpy as np, pytest\n"
        f"sensitivity.watch_comparisons({str(tmp_path / 'seen')!r})\n"
        "def test_all():\n"
        "    np.testing.assert_allclose([0.01], [0.01], atol=1e-5)\n"
        "    assert 0.02 == pytest.approx(0.02, abs=1e-5)\n"
        "    np.testing.assert_allclose([2.0, 0], [2.0, 0], atol=1e-5)\n"
        "    assert 3.0 == pytest.approx(3.0)\n"
    )
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--rootdir", str(tmp_path), str(tmp_path)]
    subprocess.run(command, env={**os.environ, "PYTHONPATH": TESTS}, cwd=tmp_path, check=True)
    rows = [json.loads(line) for line in (tmp_path / "seen").read_text().splitlines()]
    assert [row["size"] for row in rows] == [0.01, 0.02]


@pytest.mark.parametrize(
    ("kind", "wrong"), [pytest.param("logprobs", [True, True], marks=pytest.mark.long), ("gradient", [False, True])]
)
def test_a_mutation_changes_what_it_names(kind: str, wrong: list[bool]) -> None:
    code = """if True:
        import json, mutations, torch
        from areal_like.core.trainer.logprobs import log_probs_and_entropy
        logits = torch.tensor([[1.0, 2.0, 4.0]], requires_grad=True)
        made = log_probs_and_entropy(logits * 1, torch.tensor([0]), temperature=1.0, vocab_size=3, group=None)[0]
        made.sum().backward()
        expected = logits.detach().clone().requires_grad_()
        right = expected.log_softmax(-1)[:, 0]
        right.sum().backward()
        pairs = [(made, right), (logits.grad, expected.grad)]
        print(json.dumps([abs((found / right).flatten()[0].item() - 1) > 5e-5 for found, right in pairs]))
    """
    environment = {**os.environ, "PYTHONPATH": f"{TESTS}{os.pathsep}{ROOT}", "MUTATION": kind}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == wrong


def test_no_two_engines_of_a_mutation_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    from areal_like.backends.training import rank
    from areal_like.core.trainer.device_batch import DeviceBatch

    monkeypatch.setattr(rank, "make_engine", lambda spec, rendezvous: None)
    monkeypatch.setattr(DeviceBatch, "of_tokens", DeviceBatch.of_tokens)
    mutations.tell_engines_apart()
    found = []
    for number in (0, 0, 1, 1):
        rank.make_engine(None, SimpleNamespace(rank=number))
        found.append(DeviceBatch.of_tokens(SimpleNamespace(expand=None), 1.0))
    assert np.diff(sorted([1.0, *found])).min() > 0.9e-4


@pytest.mark.parametrize("size", [1e-3, 1e-2, 1.0, 30.0])
@pytest.mark.parametrize("is_update", [False, True])
def test_an_error_of_1e_4_of_a_gradient_is_seen(size: float, is_update: bool) -> None:
    gradient = np.linspace(-size, size, 7, dtype=np.float32)
    found = gradient * (THOUSAND if is_update else 1)
    assert_gradient(found * (1 + 2e-6), gradient, is_update=is_update)
    with pytest.raises(AssertionError):
        assert_gradient(found * (1 + 1e-4), gradient, is_update=is_update)


def test_a_depth_whose_rounding_would_hide_errors_is_refused() -> None:
    with pytest.raises(ValueError, match="hide"):
        rounding(depth=100)
