"""Routes and kept ids follow their tokens from a server's answer to a micro-batch."""

from __future__ import annotations

import asyncio
import base64
import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fake_server import Body, FakeServer, output, serving
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_like.backends import http as client
from areal_like.capabilities.agents.provenance import Generated, Responses
from areal_like.capabilities.router_replay.columns import ROUTES, RouteShape, unknown_expert
from areal_like.core.algorithms.batch import batch_of, join, policy_batches
from areal_like.core.algorithms.types import Algorithm
from areal_like.core.columns import Ragged
from areal_like.core.config.schema import MicroBatchConfig
from areal_like.core.errors import ServerError
from areal_like.core.rollout import router
from areal_like.core.rollout.http import Deadline
from areal_like.core.rollout.joining import as_response as prompt_of
from areal_like.core.rollout.joining import join_parts
from areal_like.core.rollout.pool import ServerPool
from areal_like.core.rollout.sample import Response, Sample, Sampling
from areal_like.core.sampling_masks import KEPT
from areal_like.core.trainer.packing import packs
from areal_like.core.types import FinishReason, LossSpec, Piece, Prompt, Reward, Trajectory

SHAPE = RouteShape(layers=3, with_experts=(1, 2), chosen=2, experts=8)
SAMPLING = Sampling(max_new_tokens=4, columns={ROUTES: SHAPE})


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router, "PAUSE_S", 0.02)
    monkeypatch.setattr(client, "AFTERMATH_S", 0.02)


def rows_of(tokens: list[int], shape: RouteShape = SHAPE) -> np.ndarray:
    """Routes that tell the token and its place: `[tokens, layers, chosen]`."""
    rows = np.zeros((len(tokens), shape.layers, shape.chosen), shape.dtype)
    for place, token in enumerate(tokens):
        rows[place] = [[(token + place + layer) % 8, (token + place + layer + 3) % 8] for layer in range(shape.layers)]
    return rows


def answered(body: Body, said: list[int], reason: str | None = "length", **changes: Any) -> list[dict[str, Any]]:
    """Answers of a server that returns routes where they are asked for."""
    answers = []
    for prompt in body["input_ids"]:
        answer = output(said, reason=reason, **changes)
        if reason and body.get("return_routed_experts"):
            rows = rows_of([*prompt, *said])[body["routed_experts_start_len"] : -1]
            answer["meta_info"]["routed_experts"] = base64.b64encode(rows.tobytes()).decode()
        answers.append(answer)
    return answers


async def opened(pool: ServerPool) -> None:
    async with pool.interrupt(0, Deadline(300)):
        pass


def expected(tokens: list[int]) -> list[Any]:
    return rows_of(tokens)[:-1, [1, 2]].tolist()


def test_a_response_has_the_routes_of_its_prompt_and_of_all_tokens_but_the_last():
    async def generate(_: FakeServer, body: Body) -> Any:
        return answered(body, [3, 4, 5, 6])

    async def run() -> list[Response]:
        async with (
            serving(FakeServer(generate)) as urls,
            ServerPool(urls, "token", 300) as pool,
        ):
            await opened(pool)
            return await pool.generate([[1, 2]] * 3, SAMPLING)

    for response in asyncio.run(run()):
        assert response.inputs[ROUTES].dtype == np.uint8
        assert response.inputs[ROUTES].tolist() == expected([1, 2, 3, 4, 5, 6])


def test_a_response_that_another_server_goes_on_with_has_routes_of_all_of_its_tokens():
    async def generate(server: FakeServer, body: Body) -> Any:
        if len(body["input_ids"][0]) == 2:
            return answered(body, [3], reason=None)  # and the stream ends
        return answered(body, [4, 5, 6])

    async def run() -> list[Response]:
        async with serving(FakeServer(generate)) as urls, ServerPool(urls, "token", 300) as pool:
            await opened(pool)
            return await pool.generate([[1, 2]], SAMPLING)

    (response,) = asyncio.run(run())
    assert response.tokens.tolist() == [3, 4, 5, 6]
    assert response.inputs[ROUTES].tolist() == expected([1, 2, 3, 4, 5, 6])


def test_samples_that_want_rows_from_other_tokens_on_are_other_requests():
    starts = []

    async def generate(_: FakeServer, body: Body) -> Any:
        starts.append((len(body["rid"]), body.get("routed_experts_start_len")))
        return answered(body, [3, 4, 5, 6])

    async def run() -> list[Response]:
        async with serving(FakeServer(generate)) as urls, ServerPool(urls, "token", 300) as pool:
            await opened(pool)
            asked = [pool.sample([1, 2], SAMPLING, inputs_from=i % 2) for i in range(4)]
            return await asyncio.gather(*asked, pool.sample([1, 2], replace(SAMPLING, columns={})))

    *routed, plain = asyncio.run(run())
    assert sorted(starts, key=str) == [(1, None), (2, 0), (2, 1)]
    assert not plain.inputs
    whole = expected([1, 2, 3, 4, 5, 6])
    assert [response.inputs[ROUTES].tolist() for response in routed] == [whole, whole[1:]] * 2


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (None, "did not return the experts of each token"),
        (rows_of([1, 2, 3]).tobytes(), "18 bytes for 5 tokens, where 3 layers and 2 experts of each take 6 bytes"),
        (np.full((5, 3, 2), 9, np.uint8).tobytes(), "expert 9, where the model has experts 0 to 7"),
        (np.zeros((5, 3, 2), np.uint8).tobytes(), "the same expert twice"),
        (
            rows_of([1, 2, 3, 4, 5]).astype(np.int32).tobytes(),
            "120 bytes for 5 tokens, .* take 6 bytes per token as uint8",
        ),
        (rows_of([1, 2, 3, 4, 5])[:, :2].tobytes(), "20 bytes for 5 tokens"),
        ("?" * 40, r"Invalid base64 encoded string - at `\$\.meta_info\.routed_experts`"),
        ([[1, 2]], "Expected `bytes.*`, got `array`"),
    ],
    ids=["none", "rows", "range", "twice", "type", "layers", "base64", "list"],
)
def test_routes_of_another_form_are_an_error_that_names_the_server_and_the_key(data, problem):
    async def generate(_: FakeServer, body: Body) -> Any:
        (answer,) = answered({**body, "return_routed_experts": False}, [3, 4, 5, 6])
        if data is not None:
            encoded = base64.b64encode(data).decode() if isinstance(data, bytes) else data
            answer["meta_info"]["routed_experts"] = encoded
        return [answer]

    async def run() -> None:
        async with (
            serving(FakeServer(generate)) as urls,
            ServerPool(urls, "token", 300) as pool,
        ):
            await opened(pool)
            await pool.generate([[1, 2]], SAMPLING)

    with pytest.raises(ServerError, match=r"server 0 .*rollout\.router_replay") as caught:
        asyncio.run(run())
    assert re.search(problem, str(caught.value))
    assert str(caught.value).endswith("Set rollout.router_replay=off")


@pytest.mark.parametrize(("number", "said"), [(-1, "expert -1"), (300, "expert 300"), (32767, "expert 32767")])
def test_a_number_that_is_not_an_experts_is_refused_wherever_it_is(number, said):
    shape = RouteShape(layers=1, with_experts=(0,), chosen=2, experts=300)
    rows = np.tile(np.array([[[4, 299]]], np.int16), (5, 1, 1))
    assert shape.read(rows.tobytes(), 5).tolist() == rows.tolist()
    rows[2, 0, 1] = number
    with pytest.raises(ValueError, match=f"^{said}, where the model has experts 0 to 299$"):
        shape.read(rows.tobytes(), 5)


def test_turns_keep_the_rows_that_their_tokens_were_computed_with():
    first, second = [1, 2, 3], [1, 2, 3, 4, 5, 6, 7]
    one = Response(*columns([3]), FinishReason.STOP, inputs={ROUTES: rows_of(first)[:-1, 1:]})
    other = rows_of(second)[2:-1, 1:]
    two = Response(*columns([6, 7]), FinishReason.STOP, inputs={ROUTES: other})
    item = join_parts(Prompt(0, [1, 2]), 0, [prompt_of([1, 2]), one, prompt_of([4, 5]), two], Reward(1.0))
    assert item.columns[ROUTES].tolist() == [*expected(first), *other.tolist(), [[255, 255]] * 2]
    # of one that computed the first turn anew, these rows are not taken
    anew = replace(two, inputs={ROUTES: np.concatenate([np.full((2, 2, 2), 7, np.uint8), other])})
    again = join_parts(Prompt(0, [1, 2]), 0, [prompt_of([1, 2]), one, prompt_of([4, 5]), anew], Reward(1.0))
    assert again.columns[ROUTES].tolist() == item.columns[ROUTES].tolist()


def columns(tokens: list[int]) -> tuple[Any, Any, Any]:
    return np.array(tokens, np.int32), -np.array(tokens, np.float32), np.zeros(len(tokens), np.int32)


def test_what_a_users_process_returns_gets_the_rows_and_lists_of_its_responses():
    response = Response(
        *columns([3, 4]),
        FinishReason.STOP,
        {KEPT: Ragged.from_lists([[3, 9], [4]])},
        {ROUTES: rows_of([1, 2, 3, 4])[:-1, 1:]},
    )
    whole = join_parts(Prompt(0, [1, 2]), 0, [prompt_of([1, 2]), response], Reward(1.0))
    bare = replace(whole, columns={})
    made = Generated(0, np.array([1, 2], np.int32), response)
    claimed, _ = Responses([made], 0).claim(bare)
    assert claimed.columns[ROUTES].tolist() == whole.columns[ROUTES].tolist()
    assert claimed.columns[KEPT].counts.tolist() == whole.columns[KEPT].counts.tolist() == [0, 0, 2, 1]
    cut = replace(bare, **{name: getattr(bare, name)[:3] for name in ("tokens", "logprobs", "versions")})
    claimed, _ = Responses([made], 0).claim(cut)
    assert claimed.columns[ROUTES].tolist() == [*whole.columns[ROUTES][:2].tolist(), [[255, 255]] * 2]
    assert claimed.columns[KEPT].ids.tolist() == [3, 9]


def test_kept_ids_come_piece_by_piece():
    sample = Sample(np.array([1], np.int32), Sampling(max_new_tokens=3, top_k=4))
    for tokens, lists in (([5, 6], [[5, 1], [6]]), ([7], [[2, 7, 3]])):
        raw = np.array([tokens, np.zeros(len(tokens)), np.zeros(len(tokens))], np.int32)
        info = SimpleNamespace(output_token_sampling_mask=lists, output_token_sampling_logprobs=[0.0] * len(tokens))
        sample.extend(Piece(raw, None, info), "server 0", 0, 0)
    assert sample.response.columns[KEPT].ids.tolist() == [5, 1, 6, 2, 7, 3]
    assert sample.response.columns[KEPT].counts.tolist() == [2, 1, 3]


@given(st.lists(st.lists(st.integers(0, 99), max_size=4), max_size=8), st.data())
def test_kept_ids_are_taken_joined_and_cut_as_lists_are(lists, data):
    kept = Ragged.from_lists(lists)
    places = data.draw(st.lists(st.integers(0, max(0, len(lists) - 1)), max_size=9 if lists else 0))
    start = data.draw(st.integers(0, len(lists)))
    assert as_lists(kept[np.array(places, np.int64)]) == [lists[i] for i in places]
    assert as_lists(Ragged.join([kept[start:], kept[:start]])) == lists[start:] + lists[:start]


def as_lists(kept: Ragged) -> list[list[int]]:
    return [kept.ids[a:b].tolist() for a, b in zip(kept.ends, kept.ends[1:], strict=False)]


def trajectories(seed: int, groups: int = 3, n: int = 3) -> list[Trajectory]:
    """Groups of responses to one prompt each, one of which has no routes."""
    rng, made = np.random.default_rng(seed), []
    for group in range(groups):
        prompt = rng.integers(0, 99, rng.integers(1, 6)).tolist()
        for sample in range(n):
            said = rng.integers(0, 99, rng.integers(1, 8)).tolist()
            rows = rows_of([*prompt, *said])[:-1, 1:]
            kept = Ragged.from_lists([[token, token + 1] for token in said])
            inputs = {} if (group, sample) == (0, 1) else {ROUTES: rows}
            response = Response(*columns(said), FinishReason.STOP, {KEPT: kept}, inputs)
            parts = [prompt_of(prompt), response]
            made.append(join_parts(Prompt(group, prompt), group, parts, Reward(float(sample == 0)), sample))
    return made


def test_a_batch_and_its_parts_have_the_rows_of_their_tokens():
    items = trajectories(0)
    experience = join(items, 0)
    assert experience.batch.fields[ROUTES].shape == (len(experience.batch.tokens), 2, 2)
    parts = policy_batches(Algorithm(lambda _: {}, LossSpec(print)), experience, 2)
    by_tokens = {item.tokens.tobytes(): item for item in items}
    for part in parts:
        for start, length in zip(np.cumsum(part.lengths) - part.lengths, part.lengths, strict=True):
            item = by_tokens[part.tokens[start : start + length].tobytes()]
            known = item.columns.get(ROUTES, unknown_expert(np.dtype(np.uint8)))
            assert (part.fields[ROUTES][start : start + length] == known).all()
            assert as_lists(part.fields[KEPT][start : start + length]) == as_lists(item.columns[KEPT])


@settings(max_examples=50)
@given(st.integers(0, 99), st.booleans(), st.sampled_from([(1, 1), (2, 1), (1, 2), (2, 4)]))
def test_every_token_of_a_micro_batch_names_its_place_in_the_batch(seed, shares, sizes):
    dp, cp = sizes
    batch = batch_of(trajectories(seed), 0)
    section = MicroBatchConfig(max_tokens_per_mb=64, share_prompts=shares and cp == 1)
    seen = []
    for dp_rank in range(dp):
        for cp_rank in range(cp):
            count, pack = packs(batch, section, dp=dp, dp_rank=dp_rank, alignment=2 * cp, cp=cp, cp_rank=cp_rank)
            for pack_ in map(pack, range(count)):
                here = pack_.places >= 0
                assert (pack_.tokens[here] == batch.tokens[pack_.places[here]]).all()
                assert (pack_.tokens[~here] == 0).all()
                seen += pack_.places[here].tolist()
                if cp == 1:  # the place that predicts a token is the one before it, or that in the shared prompt
                    assert (batch.tokens[pack_.places[pack_.rows]] == batch.tokens[pack_.targets - 1]).all()
    assert len(seen) == len(set(seen))
    assert section.share_prompts or len(seen) == len(batch.tokens)
