"""Routes of turns: only new rows are requested, and each token keeps the row that it was computed with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import openai
import pytest
from scripted import Model, says, session
from test_sessions import ask, talk

from areal_like.algorithms.batch import batch_of
from areal_like.capabilities.agents.provenance import Generated, Responses
from areal_like.capabilities.agents.session import Session
from areal_like.config.schema import MicroBatchConfig
from areal_like.rollout.pool import Response, Sampling
from areal_like.routes import ROUTES, RouteShape, known_routes
from areal_like.trainer.packing import packs
from areal_like.types import Prompt, Reward, Trajectory

SHAPE = RouteShape(layers=1, with_experts=(0,), chosen=2, experts=200)
UNKNOWN = 255
HELLO = {"role": "user", "content": "x"}


class Routed:
    """Answers as `model` does; each row has the number of the request that it was computed for, and its place."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.starts: list[int] = []
        self.made: list[Generated] = []

    async def sample(self, tokens: Sequence[int], sampling: Sampling, *, inputs_from: int, **_: Any) -> Response:
        response = await self.model.sample(tokens, sampling)
        places = np.arange(inputs_from, len(tokens) + len(response.tokens) - 1)
        rows = np.stack([np.full(len(places), len(self.starts)), places], axis=1)[:, None].astype(np.uint8)
        response.inputs = {ROUTES: rows}
        self.starts.append(inputs_from)
        self.made.append(Generated(0, np.array(tokens, np.int32), response))
        return response


def recorded(answers: str) -> tuple[Session, Routed]:
    own, model = session("plain", says(*answers))
    routed = Routed(model)
    own.sample, own.sampling = routed.sample, replace(own.sampling, routes=SHAPE)
    return own, routed


def trajectories(own: Session) -> list[Trajectory]:
    return own.trajectories(Prompt(0, []), 0, Reward(1.0))


def requests(item: Trajectory) -> list[int]:
    """The request that each token's row is of; asserts that each row is in its place."""
    routes = item.columns[ROUTES]
    known = known_routes(routes)
    assert known.tolist() == [True] * (len(known) - 1) + [False]
    assert routes[:-1, 0, 1].tolist() == list(range(len(known) - 1))
    return routes[:-1, 0, 0].tolist()


async def branch(client: openai.AsyncOpenAI) -> None:
    """Two answers to one question, a third turn after each, and another agent."""
    first: list[Any] = [HELLO]
    first.append(await ask(client, first))
    for question in "yz":
        second = [*first, {"role": "user", "content": question}]
        second.append(await ask(client, second))
        await ask(client, [*second, HELLO])
    await ask(client, [{"role": "system", "content": "another agent"}, HELLO])


def test_turns_that_branch_and_several_agents_have_the_rows_that_their_tokens_were_computed_with():
    own, routed = recorded("abthab")
    talk(own, branch)
    lengths = [len(turn.tokens) for turn in own.turns]
    assert routed.starts == [0, lengths[0] - 1, lengths[1] - 1, lengths[0] - 1, lengths[3] - 1, 0]
    assert [len(turn.response.inputs[ROUTES]) for turn in own.turns] == [
        length - 1 - start for length, start in zip(lengths, routed.starts, strict=True)
    ]
    one, other, agent = trajectories(own)
    first, turns = [0] * (lengths[0] - 1), np.diff(lengths)
    assert requests(one) == first + [1] * turns[0] + [2] * turns[1]
    assert requests(other) == first + [3] * (lengths[3] - lengths[0]) + [4] * turns[3]
    assert requests(agent) == [5] * (lengths[5] - 1)
    assert not other.generated[: lengths[0]].any()  # trained in the first one


def test_a_users_process_gets_the_rows_of_all_turns_that_lead_to_a_branch():
    own, routed = recorded("abthab")
    talk(own, branch)
    responses = Responses(routed.made, 0)
    for item in trajectories(own):
        found, _ = responses.claim(replace(item, columns={}))
        assert found.columns[ROUTES].tolist() == item.columns[ROUTES].tolist()


def test_rows_of_turns_that_another_session_had_are_unknown():
    own, routed = recorded("abthab")
    talk(own, branch)
    _, item, _ = trajectories(own)
    strangers = [replace(each, session=number < 3) for number, each in enumerate(routed.made)]
    found, _ = Responses(strangers, 0).claim(replace(item, columns={}))
    shared = len(own.turns[0].tokens) - 1
    routes = found.columns[ROUTES]
    assert (routes[:shared] == UNKNOWN).all() and (routes[shared:-1] != UNKNOWN).all()


@pytest.mark.parametrize("from_user", [False, True])
def test_a_turn_after_one_that_a_stop_text_cut_asks_from_the_cut_on(from_user):
    own, model = session("plain", lambda n: says("th|ab|1" if n == 0 else "1")(0))
    routed = Routed(model)
    own.sample, own.sampling = routed.sample, replace(own.sampling, routes=SHAPE)

    async def converse(client: openai.AsyncOpenAI) -> None:
        first: list[Any] = [HELLO]
        first.append(await ask(client, first, stop=["ab"]))
        for question in "yz":
            await ask(client, [*first, {"role": "user", "content": question}])

    talk(own, converse)
    cut = len(own.turns[0].tokens)
    assert len(own.turns[0].response.tokens) < len(model.answered[0].tokens)
    assert routed.starts == [0, cut - 1, cut - 1]
    items, responses = trajectories(own), Responses(routed.made, 0)
    for number, item in enumerate(items):
        given = responses.claim(replace(item, columns={}))[0] if from_user else item
        assert requests(given) == [0] * (cut - 1) + [number + 1] * (len(item.tokens) - cut)


def test_a_tree_of_turns_has_one_row_for_each_token_of_a_micro_batch():
    """Branches share a prefix in the trainer."""
    own, _ = recorded("abthab")
    talk(own, branch)
    batch = batch_of(trajectories(own), 0)
    count, pack = packs(
        batch, MicroBatchConfig(max_tokens_per_mb=256, share_prompts=True), dp=1, dp_rank=0, alignment=2
    )
    for made in map(pack, range(count)):
        here = made.places[made.places >= 0]
        rows, tokens = batch.fields[ROUTES][here], batch.tokens[here]
        assert (tokens == made.tokens[made.places >= 0]).all()
        positions = here - np.repeat(np.cumsum(batch.lengths) - batch.lengths, batch.lengths)[here]
        known = known_routes(rows)
        assert (rows[known][:, 0, 1] == positions[known]).all()
        assert len(here) < len(batch.tokens)
