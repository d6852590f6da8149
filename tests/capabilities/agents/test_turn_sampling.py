"""A turn's own temperature, top_p and top_k reach the servers, and the trainer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import openai
import pytest
import torch
from scripted import Model, says, session
from test_sessions import ask, talk

from areal_like.algorithms.batch import batch_of
from areal_like.capabilities.agents.provenance import Generated, Responses
from areal_like.capabilities.agents.session import Limits, Session
from areal_like.columns import Ragged
from areal_like.rollout.pool import Response, Sampling
from areal_like.sampling_masks import KEPT
from areal_like.trainer.device_batch import to_device
from areal_like.trainer.packing import pack
from areal_like.types import TEMPERATURES, Prompt, Reward, Trajectory

USER = {"role": "user", "content": "x"}


class Cutting:
    """Answers as `model` does, with the sampled id and its successor as kept ids where sampling is cut."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.samplings: list[Sampling] = []

    async def sample(self, tokens: Any, sampling: Sampling, **named: Any) -> Response:
        self.samplings.append(sampling)
        response = await self.model.sample(tokens, sampling, **named)
        if sampling.is_cut:
            response.columns = {KEPT: Ragged.from_lists([[token, token + 1] for token in response.tokens.tolist()])}
        return response


def two_turns(*fields: dict[str, Any], **changes: Any) -> tuple[Session, Cutting]:
    """A conversation whose turns ask for these fields."""
    recorded, model = session("plain", says(*"abth"), **changes)
    cutting = Cutting(model)
    recorded.sample = cutting.sample

    async def converse(client: openai.AsyncOpenAI) -> None:
        messages: list[Any] = [USER]
        for each in fields:
            answer = await ask(client, messages, **each)
            messages += [answer, USER]

    talk(recorded, converse)
    return recorded, cutting


def trajectory(recorded: Session) -> Trajectory:
    (item,) = recorded.trajectories(Prompt(0, []), 0, Reward(1.0))
    return item


def test_every_turn_is_sampled_and_trained_with_its_own_settings():
    recorded, cutting = two_turns({"temperature": 0.3}, {"top_p": 0.9}, {"extra_body": {"top_k": 5}}, {})
    asked = [(it.temperature, it.top_p, it.top_k) for it in cutting.samplings]
    assert asked == [(0.3, 1.0, -1), (0.7, 0.9, 1024), (0.7, 1.0, 5), (0.7, 1.0, -1)]
    item = trajectory(recorded)
    turns = np.split(np.flatnonzero(item.generated), np.flatnonzero(np.diff(np.flatnonzero(item.generated)) > 1) + 1)
    assert [set(np.round(item.columns[TEMPERATURES][turn], 3)) for turn in turns] == [{np.float32(0.3)}, {0}, {0}, {0}]
    assert [set(item.columns[KEPT].counts[turn]) for turn in turns] == [{0}, {2}, {2}, {0}]
    assert not item.columns[TEMPERATURES][~item.generated].any()

    batch = batch_of([item], 0)
    made = to_device(pack(batch.tokens, batch.lengths, (0,), 1), batch, item.generated, torch.device("cpu"))
    expected = [0.3] * len(turns[0]) + [0.7] * sum(map(len, turns[1:]))
    assert made.head(0.7)["temperature"].tolist() == pytest.approx(expected)


def test_a_users_process_gets_them_back_by_provenance():
    recorded, _ = two_turns({"temperature": 0.3}, {"top_p": 0.9})
    item = trajectory(recorded)
    made = [Generated(0, turn.tokens[: -len(turn.response.tokens)], turn.response) for turn in recorded.turns]
    claimed, _ = Responses(made, 0).claim(replace(item, columns={}))
    assert claimed.columns[TEMPERATURES].tolist() == item.columns[TEMPERATURES].tolist()
    assert claimed.columns[KEPT].counts.tolist() == item.columns[KEPT].counts.tolist()


def test_a_run_whose_requests_have_no_settings_of_their_own_has_no_field_for_them():
    recorded, _ = two_turns({"temperature": 0.7, "top_p": 1}, {})
    assert not trajectory(recorded).columns
    assert TEMPERATURES not in batch_of([trajectory(recorded)], 0).fields


def test_evaluations_keep_their_settings():
    _, cutting = two_turns({"temperature": 0.3, "top_p": 0.5}, trained=False)
    assert cutting.samplings == [replace(cutting.samplings[0], temperature=0.7, top_p=1.0, top_k=-1)]


def test_a_teacher_knows_the_runs_settings_only():
    for fields, words in (
        ({"temperature": 0.3}, "0.3 differs from gconfig.temperature=0.7"),
        ({"top_p": 0.5}, "the teacher scores"),
    ):
        with pytest.raises(openai.BadRequestError, match=words):
            two_turns(fields, limits=Limits(9, 10**6, own_sampling=False))
