"""The ids that tokens were sampled from: asked for where sampling is cut, checked, and kept per token."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from fake_server import Body, FakeServer, open_pool, output

from areal_like.backends import http as client
from areal_like.core.errors import ServerError
from areal_like.core.rollout import router
from areal_like.core.rollout.pool import Response, Sampling
from areal_like.core.rollout.sample import Sample
from areal_like.core.sampling_masks import KEPT
from areal_like.core.trainer.device_batch import to_device
from areal_like.core.trainer.packing import pack
from areal_like.core.types import Batch

CUT = Sampling(max_new_tokens=3, top_p=0.9, top_k=4, min_p=0.05)
SAID = [3, 4, 5]


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router, "PAUSE_S", 0.02)
    monkeypatch.setattr(client, "AFTERMATH_S", 0.02)


def answers(body: Body, masks: list[Any] | None, logprobs: list[float]) -> list[dict[str, Any]]:
    """Answers of a server that returns `masks` where they are asked for."""
    made = []
    for _ in body["input_ids"]:
        answer = output(SAID, reason="length")
        if body.get("return_sampling_mask") and masks is not None:
            answer["meta_info"]["output_token_sampling_mask"] = masks
            answer["meta_info"]["output_token_sampling_logprobs"] = logprobs
        made.append(answer)
    return made


def responses(
    samplings: list[Sampling],
    masks: list[Any] | None,
    logprobs: tuple[float, ...] = (-0.5, -0.25, 0.0),
) -> tuple[list[Response], Any]:
    """What a server's answers become, and the request that it got."""

    async def run() -> tuple[list[Response], Any]:
        async def generate(_: FakeServer, body: Body) -> Any:
            return answers(body, masks, list(logprobs))

        server = FakeServer(generate)
        async with open_pool(server) as pool:
            made = await asyncio.gather(*(pool.sample([1, 2], sampling) for sampling in samplings))
        return made, server.bodies("/generate")

    return asyncio.run(run())


def test_ids_are_asked_for_and_kept_where_sampling_is_cut():
    masks = [[3, 9], [4], [1, 2, 5, 7]]
    (cut, whole), bodies = responses([CUT, Sampling(max_new_tokens=3)], masks)
    assert sorted((body.get("return_sampling_mask", False), len(body["input_ids"])) for body in bodies) == [
        (False, 1),
        (True, 1),
    ]
    params = [params for body in bodies for params in body["sampling_params"]]
    assert sorted((it.get("top_k", 0), it.get("min_p", 0)) for it in params) == [(0, 0), (4, 0.05)]
    kept = cut.columns[KEPT]
    assert kept.ids.tolist() == [3, 9, 4, 1, 2, 5, 7] and kept.counts.tolist() == [2, 1, 4]
    assert cut.logprobs.tolist() == [-0.5, -0.25, 0.0], "over the kept ids"
    assert not whole.columns and whole.logprobs.tolist() == [-3, -4, -5]


@pytest.mark.parametrize(
    "sampling", [Sampling(3), Sampling(3, temperature=0.0), Sampling(3, temperature=0.0, top_p=0.9, top_k=4)]
)
def test_greedy_and_full_sampling_ask_for_nothing(sampling):
    _, (body,) = responses([sampling], None)
    assert "return_sampling_mask" not in body
    assert Sample(np.array([1], np.int32), Sampling(3)).params.keys().isdisjoint({"top_k", "min_p"})


@pytest.mark.parametrize(
    ("masks", "problem"),
    [
        (None, "server 0 does not return the ids"),
        ([[3], [4]], "server 0 does not return the ids"),
        ([[3], [], [5]], "server 0 does not return the ids"),
        ([[3], [4], [5, 6, 7, 8, 9, 10]], "server 0 returned 6 ids that a token was sampled from, where its top_k is 4"),
        ([[3], [9, 7], [5]], "server 0 sampled the token 4, which is not among the ids that it reported as kept"),
        ([[3], [4, -1], [5]], "server 0 returned the id -1 among the ids that a token was sampled from"),
        ([[3], [4, 1 << 40], [5]], "server 0 returned ids that no token has"),
        ([[3], "4", [5]], r"server 0 gave an unusable answer: Expected `array | null`, got `str` - at .*sampling_mask"),
    ],
)  # fmt: skip
def test_a_server_without_usable_ids_is_named_with_the_keys_at_its_first_answer(masks, problem):
    with pytest.raises(ServerError, match=problem) as raised:
        responses([CUT], masks)
    assert "Set gconfig.top_p=1, gconfig.top_k=-1 and gconfig.min_p=0" in str(raised.value)


def test_log_probs_that_are_not_one_for_each_token_are_refused():
    with pytest.raises(ServerError, match="server 0 returned 2 log-probs over the ids that 3 tokens were sampled from"):
        responses([CUT], [[3], [4], [5]], logprobs=(-0.5, -0.25))


def test_a_micro_batch_has_the_ids_of_its_labels_as_rows_of_one_width():
    (response,), _ = responses([CUT], [[3, 9], [4], [1, 2, 5, 7]])
    lengths, tokens = np.array([3], np.int32), response.tokens
    batch = Batch(lengths, tokens, response.columns)
    made = to_device(pack(tokens, lengths, (0,), 1), batch, np.array([True, False, True]), device=_cpu())
    assert made.labels.tolist() == [5] and made.of_labels[KEPT].tolist() == [[1, 2, 5, 7]]
    without = to_device(pack(tokens, lengths, (0,), 1), batch.with_field(KEPT, None), np.ones(3, bool), device=_cpu())
    assert not without.of_labels


def _cpu() -> Any:
    import torch

    return torch.device("cpu")
