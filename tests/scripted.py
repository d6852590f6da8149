"""A model that answers what a test tells it to, and tokenizers whose chat templates are hard to get right."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from areal_like.capabilities.agents.openai_api import OpenSessions
from areal_like.capabilities.agents.replies import Reply
from areal_like.capabilities.agents.session import Limits, Session
from areal_like.core.rollout.pool import Response, Sampling
from areal_like.core.types import FinishReason
from areal_like.data.tokenizer import Tokenizer

END = "<|end|>"
SPECIAL = (END, "<|turn|>", "<eos>")

TEMPLATES = {
    # as Qwen3: thinking of earlier turns is left out, content is trimmed, a newline follows the end token
    "strips_thinking": (
        "{% if tools %}<|turn|>system\n{{ tools | tojson }}<|end|>\n{% endif %}{% for m in messages %}<|turn|>{{ m.role }}\n"
        "{% if m.role == 'assistant' and '</think>' in m.content %}{{ m.content.split('</think>')[-1].lstrip() }}"
        "{% else %}{{ m.content | trim }}{% endif %}"
        "{% for c in m.tool_calls or [] %}<call>{{ c.function.name }} {{ c.function.arguments | tojson }}</call>{% endfor %}"
        "<|end|>\n{% endfor %}{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
    ),
    # round-trips
    "plain": (
        "{% for m in messages %}<|turn|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
    ),
    # nothing between the turns, and thinking opened by the prompt
    "tight": (
        "{% for m in messages %}<|turn|>{{ m.role }}:{{ m.content }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|turn|>assistant:<think>{% endif %}"
    ),
    # as Llama 2: a blank before the end token
    "blank_before_end": (
        "{% for m in messages %}{% if m.role == 'assistant' %} {{ m.content | trim }} <|end|>{% else %}"
        "[{{ m.role }}] {{ m.content }} [/]{% endif %}{% endfor %}"
    ),
    # never ends an assistant's turn
    "no_end": (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    ),
    # says something about the whole conversation first
    "counts": (
        "{{ messages | length }} messages\n{% for m in messages %}<|turn|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
    ),
}


def tokenizer(template: str) -> Tokenizer:
    """Bytes, and a token each for `ab`, `th` and ` 1`, so that one text can be several sequences of tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("a", "b"), ("t", "h"), ("Ġ", "1")]
    words = [*SPECIAL, *alphabet, *("".join(pair) for pair in merges)]
    backend = tokenizers.Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, merges=merges))
    backend.add_special_tokens(list(SPECIAL))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    ends = [backend.token_to_id(END), backend.token_to_id("<eos>")]
    return Tokenizer(backend, ends, TEMPLATES[template], {"eos_token": END})


class Model:
    """Answers prompts, and remembers what it was asked and what it answered, token for token.

    `says(n)` is the tokens of answer number n, with or without an end token. The log-prob of the i-th token of answer
    n is -(n + i / 100), and its version is n.
    """

    def __init__(self, says: Callable[[int], Sequence[int]]) -> None:
        self.says = says
        self.asked: list[list[int]] = []
        self.answered: list[Response] = []
        self.aside: Counter[str] = Counter()  # tokens of responses that no trajectory has

    def set_aside(self, reason: str, tokens: int) -> None:
        self.aside[reason] += tokens

    def end_session(self, session: object) -> None: ...

    async def sample(self, tokens: Sequence[int], sampling: Sampling, **_: object) -> Response:
        n = len(self.asked)
        self.asked.append(list(tokens))
        said = np.array(self.says(n)[: sampling.max_new_tokens], np.int32)
        ended = len(said) and said[-1] in sampling.stop_token_ids
        response = Response(
            said,
            np.array([-(n + i / 100) for i in range(len(said))], np.float32),
            np.full(len(said), n, np.int32),
            FinishReason.STOP if ended else FinishReason.LENGTH,
        )
        self.answered.append(response)
        return response


def says(*texts: str, template: str = "plain") -> Callable[[int], list[int]]:
    """Answers of these texts; `ab` is said as two tokens."""
    own = tokenizer(template)
    one_each = {text: [token for letter in text.split("|") for token in own.encode_text(letter)] for text in texts}
    return lambda n: [*one_each[texts[n]], own.eos_token_ids[0]]


def session(template: str, says: Callable[[int], Sequence[int]], **changes: Any) -> tuple[Session, Model]:
    """A session whose answers are told, and the model that gives them."""
    own, model = tokenizer(template), Model(says)
    settings = {"limits": Limits(99, 10**6), "sampling": Sampling(1000, 0.7, stop_token_ids=own.eos_token_ids)}
    return Session(own, model.sample, **(settings | changes)), model


async def answer(session: Session, method: str, path: str, body: bytes) -> Reply:
    """Answer one HTTP request of a session once the answer is complete, even for a stream."""
    sessions = OpenSessions()
    with sessions.open(session) as key:
        return await sessions.answer(method, path, {"x-api-key": key}, body)
