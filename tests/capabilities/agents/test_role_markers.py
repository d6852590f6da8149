"""The prompt after an answer has one end of message and every role marker, whichever end token the model generated."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from areal_like.capabilities.agents.conversation import Continuity, TemplateContext, following, opening
from areal_like.data.tokenizer import Tokenizer

SPECIAL = ("<|endoftext|>", "<|user|>", "<|observation|>", "<|system|>", "<|assistant|>", "<|im_start|>", "<|im_end|>")

# GLM-4 has no token at the end of a message: a marker starts the next one, and generation stops at the marker
GLM4 = (
    "{% for m in messages %}{% if m.role == 'tool' %}"
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|observation|>{% endif %}\n{{ m.content }}"
    "{% else %}<|{{ m.role }}|>\n{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
QWEN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# an end of message and a marker, both of which end the generation
BOTH = (
    "{% for m in messages %}<|{{ 'observation' if m.role == 'tool' else m.role }}|>{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
# the end token after assistants only, as Mistral; the template rejects a conversation without a last question
STRICT = (
    "{% if not add_generation_prompt %}{{ raise_exception('no question') }}{% endif %}"
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% if m.role == 'assistant' %}<|im_end|>{% endif %}{% endfor %}"
)


def tokenizer(template: str, ends: tuple[str, ...]) -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({word: i for i, word in enumerate([*SPECIAL, *alphabet])}, merges=[]))
    backend.add_special_tokens(list(SPECIAL))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(backend, [backend.token_to_id(end) for end in ends], template)


NEXT: dict[str, list[dict[str, Any]]] = {
    "user": [{"role": "user", "content": "b"}],
    "tool": [{"role": "tool", "content": "b"}],
    "tools": [{"role": "tool", "content": "b"}, {"role": "tool", "content": "c"}],
    "tool and user": [{"role": "tool", "content": "b"}, {"role": "user", "content": "c"}],
    "system": [{"role": "system", "content": "b"}, {"role": "user", "content": "c"}],
    "empty system": [{"role": "system", "content": ""}, {"role": "user", "content": "c"}],
    "empty user": [{"role": "user", "content": ""}],
    "empty tool": [{"role": "tool", "content": ""}, {"role": "user", "content": "c"}],
}
MARKERS = {"user": "<|user|>", "tool": "<|observation|>", "system": "<|system|>"}


def continued(template: str, ends: tuple[str, ...], end: str, after: str) -> tuple[str, str, Continuity]:
    """The text behind a generated `a` and an end token, that of the template, and how the prompts compare."""
    own, first = tokenizer(template, ends), [{"role": "user", "content": "q"}]
    messages = [*first, {"role": "assistant", "content": "a"}, *NEXT[after]]
    earlier = [*opening(own, first, TemplateContext()), *own.encode_text("a" + end)]
    new, continuity = following(own, earlier, messages, 1, TemplateContext())
    before = own.decode(opening(own, first, TemplateContext()), special=True) + "a"
    prompt = own.decode([*earlier, *new], special=True)
    assert prompt.startswith(before)
    return prompt[len(before) :], own.render_chat(messages).removeprefix(before), continuity


@pytest.mark.parametrize("after", NEXT)
@pytest.mark.parametrize("end", ["", "<|endoftext|>", "<|user|>", "<|observation|>"])
def test_markers_that_are_end_tokens_are_never_dropped_and_never_twice(end, after):
    ends = ("<|endoftext|>", "<|user|>", "<|observation|>")
    found, rendered, continuity = continued(GLM4, ends, end, after)
    is_marker = end in ("", MARKERS[NEXT[after][0]["role"]])
    assert found == (rendered if is_marker else end + rendered)
    assert continuity is (Continuity.EXACT if is_marker else Continuity.REWRITTEN)


@pytest.mark.parametrize(
    ("end", "after"), itertools.product(["", "<|im_end|>", "<|endoftext|>"], ["user", "tools", "empty user", "system"])
)
def test_an_end_of_message_is_replaced_by_the_generated_one(end, after):
    found, rendered, continuity = continued(QWEN, ("<|im_end|>", "<|endoftext|>"), end, after)
    assert found == (end or "<|im_end|>") + rendered.removeprefix("<|im_end|>")
    assert (continuity is Continuity.EXACT) is (end != "<|endoftext|>")


@pytest.mark.parametrize(
    ("end", "after", "wanted"),
    [
        ("<|im_end|>", "user", "<|im_end|>\n<|user|>b<|im_end|>\n<|assistant|>"),
        ("<|endoftext|>", "user", "<|endoftext|>\n<|user|>b<|im_end|>\n<|assistant|>"),
        ("<|user|>", "user", "<|user|>b<|im_end|>\n<|assistant|>"),
        ("<|user|>", "tool", "<|user|>\n<|observation|>b<|im_end|>\n<|assistant|>"),
        ("<|observation|>", "tool", "<|observation|>b<|im_end|>\n<|assistant|>"),
        ("<|user|>", "empty system", "<|user|>\n<|system|><|im_end|>\n<|user|>c<|im_end|>\n<|assistant|>"),
    ],
)
def test_a_template_may_have_an_end_of_message_and_a_marker(end, after, wanted):
    ends = ("<|im_end|>", "<|endoftext|>", "<|user|>", "<|observation|>")
    assert continued(BOTH, ends, end, after)[0] == wanted


def test_a_template_that_rejects_a_last_answer_is_continued_with_its_own_end():
    assert continued(STRICT, ("<|im_end|>", "<|endoftext|>"), "<|im_end|>", "user")[0] == "<|im_end|>[user]b"
    assert continued(STRICT, ("<|im_end|>", "<|endoftext|>"), "<|endoftext|>", "user")[0] == (
        "<|endoftext|><|im_end|>[user]b"
    )
