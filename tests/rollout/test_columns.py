"""Tokens and log-probs reach the controller bit for bit, with the version that each token was made by."""

from __future__ import annotations

from base64 import b64decode
from typing import Any
from urllib.request import Request, urlopen

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from limits import HUNG_S
from tolerance import close_to

from areal_like.backends.http import take_events
from areal_like.backends.sglang.answers import part_of
from areal_like.backends.sglang.labels import COLUMNS, LABELS, TokenLabels, WrongLabels, read_columns, token_versions
from areal_like.backends.sglang.patches.columns import with_columns
from areal_like.core.errors import ServerError
from areal_like.core.rollout.http import Unavailable
from areal_like.core.types import Piece

LOGPROBS = st.floats(max_value=0, allow_nan=False, allow_infinity=False, width=32)
TOKENS = st.lists(st.tuples(LOGPROBS, st.integers(0, 2**31 - 1), st.integers(0, 3)), max_size=40)


@given(TOKENS)
def test_tokens_arrive_bit_for_bit(made: list[tuple[float, int, int]]) -> None:
    versions = sorted(version for *_, version in made)
    info = {
        "output_token_logprobs": [[logprob, token, None] for logprob, token, _ in made],
        "output_token_logprobs_length": len(made),
        LABELS: [str(version) for version in versions],
        "finish_reason": {"type": "length"},
    }
    sent = orjson.dumps(with_columns({"output_ids": [1], "meta_info": info, "index": 2}))
    place, piece = part_of(sent, "server 0")
    assert place == 2 and isinstance(piece, Piece), piece
    tokens, logprobs, labels = piece.columns
    assert tokens.tolist() == [token for _, token, _ in made]
    assert logprobs.view(np.float32).tolist() == [logprob for logprob, *_ in made]
    assert labels.tolist() == versions
    assert b"output_token_logprobs_length" in sent and b"output_ids" not in sent


def test_an_event_without_tokens_stays_as_it_is() -> None:
    for event in ({"error": {"message": "no"}}, {"meta_info": {"finish_reason": {"type": "abort"}}}, {}):
        assert with_columns(event) is event


ABORT = {"type": "abort", "message": "too long", "status_code": 400}
SAMPLED = {"output_token_sampling_mask": [None, [3]], "output_token_sampling_logprobs": [None, -1.0]}


@pytest.mark.parametrize("others", [{}, SAMPLED, {"output_token_logprobs": [[-1.0, 7, None]]}], ids=str)
def test_an_aborted_request_keeps_its_reason(others: dict[str, Any]) -> None:
    """With a sampling mask SGLang sends labels without log-probs."""
    info = {"finish_reason": ABORT, LABELS: ["4", "4"], **others}
    place, error = part_of(orjson.dumps(with_columns({"index": 3, "meta_info": info})), "server 0")
    assert place == 3 and isinstance(error, ServerError) and not isinstance(error, Unavailable)
    assert error.fault == "refused" and "too long" in str(error)


def test_labels_without_log_probs_are_runs() -> None:
    """A request that ends without a status, and without a token of its own."""
    info = {"finish_reason": {"type": "abort"}, LABELS: ["4", "4", "5"]}
    sent = with_columns({"index": 0, "meta_info": info})
    assert sent["meta_info"][LABELS] == [("4", 2), ("5", 1)]
    _, error = part_of(orjson.dumps(sent), "server 0")
    assert isinstance(error, ServerError) and "no log-probs" in str(error)


@pytest.mark.parametrize(("runs", "words"), [([("1", 2)], "2 tokens of 3"), ([("2", 1), ("1", 2)], "older")])
def test_labels_that_do_not_fit_are_rejected(runs: list[tuple[str, int]], words: str) -> None:
    with pytest.raises(WrongLabels, match=words):
        token_versions(runs, 3)


@pytest.mark.parametrize("label", ["new", None, str(2**40)])
def test_labels_that_are_no_versions_are_rejected(label: str | None) -> None:
    with pytest.raises(WrongLabels, match="not weight versions"):
        token_versions([(label, 1)], 1)


def test_columns_of_half_a_token_are_rejected() -> None:
    with pytest.raises(ValueError, match="12 bytes"):
        read_columns(bytes(12))


def test_a_real_server_streams_what_its_whole_answers_list(sglang_server: Any) -> None:
    asked = {"input_ids": [5, 6, 7], "return_logprob": True}
    asked |= {"sampling_params": {"max_new_tokens": 9, "temperature": 0, "ignore_eos": True}}

    def ask(stream: bool) -> bytes:
        body = orjson.dumps(asked | {"stream": stream})
        url, headers = f"{sglang_server.url}/generate", sglang_server.headers | {"Content-Type": "application/json"}
        with urlopen(Request(url, body, headers), timeout=HUNG_S) as answer:
            return bytes(answer.read())

    whole = orjson.loads(ask(stream=False))["meta_info"]["output_token_logprobs"]
    events = take_events([], ask(stream=True))
    sent = [read_columns(b64decode(orjson.loads(event)["meta_info"][COLUMNS])) for event in events]
    tokens, logprobs = np.concatenate(sent, axis=1)
    assert len(whole) == 9
    assert tokens.tolist() == [token for _, token, _ in whole]
    assert logprobs.view(np.float32) == close_to([logprob for logprob, *_ in whole])


def test_labels_of_any_part_are_those_of_its_tokens() -> None:
    labels = TokenLabels("0")
    for first, label in ((0, "1"), (3, "2"), (3, "3"), (5, "4")):  # versions 0 and 2 made no token
        labels.begin(first, label)
    whole = ["1"] * 3 + ["3"] * 2 + ["4"] * 4
    for start in range(9):
        for stop in range(start, 10):
            assert labels[start:stop] == whole[start:stop]
