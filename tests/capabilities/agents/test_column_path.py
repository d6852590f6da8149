"""Columns declared here alone pass from a server's answers to the device: nothing else names them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from fake_server import Body, FakeServer, open_pool, output
from scripted import says, tokenizer
from test_sessions import ask

from areal_like.capabilities.agents.openai_api import OpenSessions
from areal_like.capabilities.agents.playing import Clients
from areal_like.capabilities.agents.provenance import Generated, Responses
from areal_like.capabilities.agents.session import Limits, Session
from areal_like.core.algorithms.batch import join, policy_batches
from areal_like.core.algorithms.types import Algorithm
from areal_like.core.columns import COLUMNS, SERVED, Column, declare
from areal_like.core.config.schema import MicroBatchConfig
from areal_like.core.errors import ServerError
from areal_like.core.rollout.pool import Sampling
from areal_like.core.trainer.device_batch import DeviceBatch, to_device
from areal_like.core.trainer.packing import MicroBatch, packs
from areal_like.core.types import Batch, LossSpec, Prompt, Reward, Trajectory

OWN = tokenizer("plain")
HELLO = {"role": "user", "content": "x"}


def sent(name: str, kind: Any) -> dict[str, Any]:
    """Arguments of a column that servers return as one field."""
    request = {f"return_{name}": True}
    return {"sent": {name: kind}, "request": lambda _, known: request | {"known": known}, "fix": f"Set {name}=off"}


def read_depths(piece: Any, count: int, _: Any) -> np.ndarray:
    return np.array(piece.info.depths[-count:], np.int16)


LISTS = list[list[int] | None] | None
TOYS = [
    Column("surprises", **sent("surprises", list[float] | None)),
    Column("pairs", width=(2,), use="host", **sent("pairs", LISTS)),
    Column("others", np.int32, ragged=True, fill=-7, use="label", **sent("others", LISTS)),
    Column("depths", None, None, fill=-1, use="input", reader=read_depths, **sent("depths", LISTS)),
]


@pytest.fixture(autouse=True)
def declared() -> Iterator[None]:
    for column in TOYS:
        declare(column)
    yield
    for column in TOYS:
        del COLUMNS[column.name], SERVED[column.name]


def others_of(token: int) -> list[int]:
    return [token + more for more in range(token % 3)]


def depth(place: int) -> list[int]:
    return [place, 3 * place]


class Server:
    """Says its texts one after the other, in two pieces; columns of inputs come with the second one."""

    def __init__(self, texts: Sequence[str], **changes: Any) -> None:
        self.texts, self.changes, self.number = texts, changes, 0

    async def __call__(self, _: FakeServer, body: Body) -> Any:
        answers = []
        for index, prompt in enumerate(body["input_ids"]):
            said = says(*self.texts)(self.number)
            self.number += 1
            for part, reason in ((said[:1], None), (said[1:], "stop")):
                answer = {"index": index} | output(part, reason=reason)
                meta = answer["meta_info"]
                meta["surprises"] = [token / 2 for token in part]
                meta["pairs"] = [[token, -token] for token in part]
                meta["others"] = [others_of(token) for token in part]
                if reason:
                    meta["depths"] = [depth(place) for place in range(body["known"], len(prompt) + len(said) - 1)]
                meta |= self.changes
                answers.append(answer)
        return answers


async def converse(client: Any) -> None:
    """A turn, which a stop text cuts, two that continue it, and another agent."""
    first: list[Any] = [HELLO]
    first.append(await ask(client, first, stop=["ab"]))
    for question in "yz":
        second = [*first, {"role": "user", "content": question}]
        second.append(await ask(client, second))
        await ask(client, [*second, HELLO])
    await ask(client, [{"role": "system", "content": "another agent"}, HELLO])


def played(server: Server) -> tuple[Session, list[Body]]:
    async def run() -> tuple[Session, list[Body]]:
        fake = FakeServer(server)
        async with open_pool(fake) as pool:
            session = Session(OWN, pool.sample, Sampling(1000, 0.7), Limits(99, 10**6))
            sessions = OpenSessions()
            with sessions.open(session) as key:
                await converse(Clients(sessions.answer).with_key(key))
        return session, fake.bodies("/generate")

    return asyncio.run(run())


def check(item: Trajectory | Batch, columns: Any, generated: np.ndarray, places: np.ndarray, last: np.ndarray) -> None:
    """Assert that tokens have their own values: `places` in their sequence, the `last` of which no pass computed."""
    tokens = item.tokens
    assert columns["surprises"].tolist() == np.where(generated, tokens / 2, 0).tolist()
    assert columns["pairs"].tolist() == (np.stack([tokens, -tokens], 1) * generated[:, None]).tolist()
    lists = [others_of(token) if made else [] for token, made in zip(tokens.tolist(), generated, strict=True)]
    found = columns["others"]
    assert [found[np.array([i])].ids.tolist() for i in range(len(found))] == lists
    assert columns["depths"].dtype == np.int16
    assert columns["depths"].tolist() == [
        [-1, -1] if end else depth(place) for place, end in zip(places.tolist(), last, strict=True)
    ]


def check_item(item: Trajectory) -> None:
    n = len(item.tokens)
    check(item, item.columns, item.generated, np.arange(n), np.arange(n) == n - 1)


def check_device(made: DeviceBatch, pack: MicroBatch, batch: Batch, wanted: np.ndarray) -> None:
    targets = pack.targets[wanted[pack.targets]]
    assert made.fields["surprises"].tolist() == (batch.tokens[targets] / 2).tolist()
    assert "pairs" not in made.fields
    rows = made.of_tokens(made.of_labels["others"]).tolist()
    assert [[each for each in row if each != -7] for row in rows] == [others_of(it) for it in batch.tokens[targets]]
    here = pack.places >= 0
    assert made.inputs["depths"].numpy()[here].tolist() == batch.fields["depths"][pack.places[here]].tolist()
    assert (made.inputs["depths"].numpy()[~here] == -1).all()


@pytest.mark.parametrize("minibatches", [1, 2])
@pytest.mark.parametrize("shares", [True, False])
@pytest.mark.parametrize("from_user", [True, False])
def test_a_column_reaches_the_device_with_its_token(minibatches, shares, from_user):
    session, bodies = played(Server(["hab", "th", "ab", "1", "t", "ha"]))
    assert all(body["return_surprises"] and body["return_depths"] for body in bodies)
    items = session.trajectories(Prompt(0, []), 0, Reward(1.0))
    assert len(items) == 3 and len(session.turns[0].response.tokens) < len(says("th|ab|1")(0))
    assert not items[1].generated[: len(session.turns[0].tokens)].any(), "trained in the first one"
    if from_user:  # whose process never had the columns
        made = [Generated(0, turn.tokens[: -len(turn.response.tokens)], turn.response) for turn in session.turns]
        responses = Responses(made, 0)
        items = [responses.claim(replace(item, columns={}))[0] for item in items]
    for item in items:
        check_item(item)

    experience = join(items, 0)
    assert experience is not None
    batches = policy_batches(Algorithm(lambda _: {}, LossSpec(print)), experience, minibatches)
    assert len(batches) == minibatches
    for batch in batches:
        starts = np.repeat(np.cumsum(batch.lengths) - batch.lengths, batch.lengths)
        last = np.isin(np.arange(len(batch.tokens)), np.cumsum(batch.lengths) - 1)
        wanted = batch.fields["loss_mask"] > 0
        check(batch, batch.fields, wanted, np.arange(len(batch.tokens)) - starts, last)
        assert "depths" not in batch.drop("input").fields
        section = MicroBatchConfig(max_tokens_per_mb=256, share_prompts=shares)
        count, pack = packs(batch, section, dp=1, dp_rank=0, alignment=4)
        seen = 0
        for each in map(pack, range(count)):
            made = to_device(each, batch, wanted, torch.device("cpu"))
            check_device(made, each, batch, wanted)
            seen += len(made.fields["surprises"])
        assert seen == wanted.sum()


def test_tokens_with_other_inputs_are_not_shared():
    lengths, tokens = np.array([4, 4], np.int32), np.array([5, 6, 7, 8] * 2, np.int32)
    mask = np.array([0, 0, 1, 1] * 2, np.float32)
    depths = np.array([[0, 1], [0, 1], [0, 1], [0, 1], [0, 1], [0, 2], [0, 1], [0, 1]], np.int16)
    batch = Batch(lengths, tokens, {"loss_mask": mask, "depths": depths})
    section, sizes = MicroBatchConfig(max_tokens_per_mb=64, share_prompts=True), []
    for each in (batch, batch.drop("input")):
        _, pack = packs(each, section, dp=1, dp_rank=0, alignment=1)
        sizes.append(len(pack(0).tokens))
    assert sizes == [8, 4]


@pytest.mark.parametrize(
    "changes",
    [{"surprises": None}, {"surprises": [1.0, 2.0, 3.0, 4.0]}, {"pairs": [[1, 2, 3]]}, {"others": "no list"}],
    ids=str,
)
def test_unusable_values_are_an_error_with_the_columns_fix(changes):
    (name,) = changes

    async def run() -> None:
        async with open_pool(FakeServer(Server(["th"], **changes))) as pool:
            await pool.sample([1, 2], Sampling(1000))

    with pytest.raises(ServerError, match=f"^server 0 .*Set {name}=off$"):
        asyncio.run(run())


def test_a_process_that_lacks_a_declaration_says_so():
    fields = {"unheard": np.zeros((2, 3), np.uint8)}
    batch = Batch(np.array([2], np.int32), np.zeros(2, np.int32), fields)
    _, pack = packs(batch.with_field("unheard", None), MicroBatchConfig(), dp=1, dp_rank=0, alignment=1)
    with pytest.raises(ValueError, match="no column unheard is declared"):
        to_device(pack(0), batch, np.ones(2, bool), torch.device("cpu"))
