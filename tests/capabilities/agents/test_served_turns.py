"""An agent's turns through the pool and a server's answers: routes and kept ids."""

from __future__ import annotations

import asyncio
import base64
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import openai
import pytest
from aiohttp import web
from fake_server import Body, FakeServer, event, open_pool, output
from scripted import says, tokenizer
from test_sessions import ask

from areal_like.capabilities.agents.openai_api import OpenSessions
from areal_like.capabilities.agents.playing import Clients
from areal_like.capabilities.agents.session import Limits, Session
from areal_like.capabilities.router_replay.columns import ROUTES, RouteShape, known_routes
from areal_like.core.columns import Ragged
from areal_like.core.rollout.http import Deadline
from areal_like.core.rollout.pool import Sampling
from areal_like.core.sampling_masks import KEPT
from areal_like.core.types import TEMPERATURES, Prompt, Reward, Trajectory

pytestmark = pytest.mark.covers("router replay", "sampling masks", "agents")

OWN = tokenizer("plain")
SHAPE = RouteShape(layers=2, with_experts=(1,), chosen=2, experts=200)
SAMPLING = Sampling(max_new_tokens=4, columns={ROUTES: SHAPE})
HELLO = {"role": "user", "content": "x"}


@dataclass
class Replies:
    """Answers requests one after the other; a row has the number of its request and its place.

    The kept ids of a token are itself and the request's `top_k` - 1 next ones, its log-prob among them -top_k / 100.
    """

    texts: str
    number: int = 0

    async def __call__(self, _: FakeServer, body: Body) -> Any:
        answers = []
        for place, prompt in enumerate(body["input_ids"]):
            said = says(*self.texts)(self.number)
            answer = output(said, version=0)
            meta = answer["meta_info"]
            if body.get("return_routed_experts"):
                rows = route_rows(self.number, body["routed_experts_start_len"], len(prompt) + len(said) - 1)
                meta["routed_experts"] = base64.b64encode(rows.tobytes()).decode()
            if body.get("return_sampling_mask"):
                top_k = body["sampling_params"][place]["top_k"]
                meta["output_token_sampling_mask"] = kept_ids(said, top_k)
                meta["output_token_sampling_logprobs"] = [-top_k / 100] * len(said)
            answers.append(answer)
            self.number += 1
        return answers


def route_rows(number: int, start: int, end: int) -> np.ndarray:
    places = np.arange(start, end)
    of_layer = np.stack([np.full(len(places), number), places + 20], axis=1)
    return np.stack([np.zeros_like(of_layer), of_layer], axis=1).astype(np.uint8)


def kept_ids(said: list[int], top_k: int) -> list[list[int]]:
    return [[token + more for more in range(min(top_k, 3))] for token in said]


async def converse(client: openai.AsyncOpenAI) -> None:
    """A turn, two that go on from it with settings of their own, a third one after the second, and another agent."""
    first: list[Any] = [HELLO]
    first.append(await ask(client, first, temperature=0.3))
    await ask(client, [*first, {"role": "user", "content": "y"}], top_p=0.9)
    second = [*first, {"role": "user", "content": "z"}]
    second.append(await ask(client, second, extra_body={"top_k": 5}, temperature=0.5))
    await ask(client, [*second, HELLO])
    await ask(client, [{"role": "system", "content": "another agent"}, HELLO], extra_body={"top_k": 2})


def played() -> tuple[list[Trajectory], Session, list[Body]]:
    """The trajectories of an agent, its turns, and what the server was asked."""

    async def run() -> tuple[list[Trajectory], Session, list[Body]]:
        server = FakeServer(Replies("abtha"))
        async with open_pool(server) as pool:
            sampling = Sampling(1000, 0.7, stop_token_ids=OWN.eos_token_ids, columns={ROUTES: SHAPE})
            recorded, sessions = Session(OWN, pool.sample, sampling, Limits(99, 10**6)), OpenSessions()
            with sessions.open(recorded) as key:
                await converse(Clients(sessions.answer).with_key(key))
        return recorded.trajectories(Prompt(0, []), 0, Reward(1.0)), recorded, server.bodies("/generate")

    return asyncio.run(run())


def test_turns_of_an_agent_have_their_rows_ids_and_temperatures():
    items, recorded, bodies = played()
    lengths = [len(turn.tokens) for turn in recorded.turns]
    starts = [0, lengths[0] - 1, lengths[0] - 1, lengths[2] - 1, 0]
    assert [body["routed_experts_start_len"] for body in bodies] == starts
    asked = [(it["temperature"], it["top_p"], it.get("top_k")) for body in bodies for it in body["sampling_params"]]
    assert asked == [(0.3, 1, None), (0.7, 0.9, 1024), (0.5, 1, 5), (0.7, 1, None), (0.7, 1, 2)]
    assert [body.get("return_sampling_mask", False) for body in bodies] == [False, True, True, False, True]

    paths, top_ks, own = [[0, 1], [0, 2, 3], [4]], [None, 1024, 5, None, 2], [0.3, 0, 0.5, 0, 0]
    trained: set[int] = set()
    for item, path in zip(items, paths, strict=True):
        assert known_routes(item.columns[ROUTES]).tolist() == [True] * (len(item.tokens) - 1) + [False]
        end = 0
        for number in path:
            turn = recorded.turns[number]
            begin, said = lengths[number] - len(turn.response.tokens), turn.response.tokens.tolist()
            rows = route_rows(number, max(end - 1, 0), lengths[number] - 1)[:, 1:]
            assert item.columns[ROUTES][max(end - 1, 0) : lengths[number] - 1].tolist() == rows.tolist()
            part, here = slice(begin, lengths[number]), number not in trained
            top_k = top_ks[number] if here else None
            assert as_lists(item, begin, lengths[number]) == (kept_ids(said, top_k) if top_k else [[]] * len(said))
            expected = (
                ([-top_k / 100] * len(said) if top_k else [-float(it) for it in said]) if here else [0] * len(said)
            )
            assert item.logprobs[part].tolist() == pytest.approx(expected)
            temperatures = item.columns.get(TEMPERATURES, np.zeros(len(item.tokens)))
            assert temperatures[part].tolist() == pytest.approx([own[number] * here] * len(said))
            end = lengths[number]
            trained.add(number)


def as_lists(item: Trajectory, start: int, end: int) -> list[list[int]]:
    kept = item.columns.get(KEPT, Ragged.none(len(item.tokens)))[start:end]
    return [ids.tolist() for ids in np.split(kept.ids, kept.ends[1:-1])]


def test_a_request_that_an_update_interrupts_has_the_rows_and_ids_of_one_answer():
    """Weights change in place between two pieces of an answer: it is one request, and its rows come with its end."""
    said, rows = [3, 4, 5, 6], route_rows(1, 0, 5)
    rows[3:, 1, 0] = 2  # of the passes after the update

    async def generate(server: FakeServer, body: Body) -> Any:
        async def answer(request: web.Request) -> web.StreamResponse:
            response = web.StreamResponse()
            await response.prepare(request)
            for tokens, version, reason in ((said[:2], 0, None), (said[2:], 1, "length")):
                while server.version != str(version) or server.is_paused:
                    await asyncio.sleep(0.01)
                piece = output(tokens, version, reason)
                piece["meta_info"]["output_token_sampling_mask"] = [[token, 9 + version] for token in tokens]
                piece["meta_info"]["output_token_sampling_logprobs"] = [-0.5 - version] * len(tokens)
                if reason:
                    piece["meta_info"]["routed_experts"] = base64.b64encode(rows.tobytes()).decode()
                await response.write(event(0, piece))
            return response

        return answer

    async def run() -> Any:
        server = FakeServer(generate)
        async with open_pool(server) as pool:
            asking = asyncio.create_task(pool.sample([1, 2], replace(SAMPLING, top_k=4, top_p=0.9)))
            while not pool.tokens_generated:
                await asyncio.sleep(0.01)
            async with pool.interrupt(1, Deadline(300)) as (member,):
                await member.load("", 1, 300)
            return await asking, server.bodies("/generate")

    response, bodies = asyncio.run(run())
    assert len(bodies) == 1
    assert response.versions.tolist() == [0, 0, 1, 1]
    assert response.inputs[ROUTES].tolist() == rows[:, 1:].tolist()
    assert response.columns[KEPT].ids.tolist() == [3, 9, 4, 9, 5, 10, 6, 10]
    assert response.logprobs.tolist() == [-0.5, -0.5, -1.5, -1.5]
