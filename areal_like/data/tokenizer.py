"""Encoding and decoding with a model's `tokenizer.json`: without torch, and ready in 0.2 s.

transformers renders chat templates. Its module for that takes a second to import, without torch, and only models
with a template import it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import tokenizers
from jinja2 import TemplateError, TemplateSyntaxError

from areal_like.core.types import Images
from areal_like.data.end_tokens import EndTokens, find_end_tokens
from areal_like.data.images import ImageError
from areal_like.data.prefill import WHY_NOT, split_prefill
from areal_like.data.processor import (
    PROCESSOR_FILES,
    ProcessorError,
    VisionProcessor,
    for_template,
    grid_processor,
    images_of,
    load_processor,
)
from areal_like.data.tokenizer_files import (
    CONFIG,
    DEFAULT,
    TokenizerError,
    download,
    load_templates,
    read_json,
    read_text,
    select_template,
    special_tokens,
)
from areal_like.demo.image_processor import PROCESSOR
from areal_like.demo.tokenizers import EOS, make_tokenizer

_MARK = "\ue000answer\ue001"  # of Unicode's private use area

# A template is a program: it raises its own errors, or any error of a Python expression.
_TEMPLATE_FAILURES = (TemplateError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError)

# The template for models without one: the start token, the tools as JSON, and a line `role: content` for each message.
# An assistant turn ends with the end token, as generated; its tool calls have Qwen's format (SGLang's tool parser
# `qwen25`).
PLAIN_TEMPLATE = (
    "{{ bos_token }}{% if tools %}tools: {{ tools | tojson }}\n{% endif %}"
    "{% for message in messages %}{{ message.role }}: "
    "{% if message.content is string %}{{ message.content }}"
    "{% else %}{% for part in message.content or [] %}{% if part.type == 'image' and image_mark %}{{ image_mark }}"
    "{% elif part.type != 'text' %}{{ raise_exception('it takes text only, not ' ~ part.type) }}"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}"
    "{% for call in message.tool_calls or [] %}<tool_call>\n"
    '{"name": {{ call.function.name | tojson }}, "arguments": {% if call.function.arguments is string %}'
    "{{ call.function.arguments }}{% else %}{{ call.function.arguments | tojson }}{% endif %}}\n</tool_call>{% endfor %}"
    "{% if message.role == 'assistant' %}{{ eos_token }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


class Tokenizer:
    """A fast tokenizer with the model's end tokens and, where it has one, its chat template.

    `end_tokens` are ids, or ids with the files that name them. `chat_template` is the template, or several by name.
    `special` are the tokens that a template may name, such as `bos_token`. `directory` has the tokenizer's files, None
    for a generated tokenizer. `vision` is the model's image processor; None for a text-only model.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        end_tokens: Sequence[int] | EndTokens,
        chat_template: str | Mapping[str, str] | None = None,
        special: Mapping[str, str] | None = None,
        directory: Path | None = None,
        vision: VisionProcessor | None = None,
    ) -> None:
        self.backend = backend
        self.directory = directory
        self.vision = vision
        named = end_tokens if isinstance(end_tokens, Mapping) else dict.fromkeys(end_tokens, ())
        self.end_tokens = {token: list(sources) for token, sources in named.items()}
        self.vocab_size = backend.get_vocab_size()
        self.unk_token_id = backend.token_to_id(getattr(backend.model, "unk_token", None) or "")
        self._special_tokens = dict(special or {})
        self._templates = {DEFAULT: chat_template} if isinstance(chat_template, str) else dict(chat_template or {})

    @classmethod
    def make(cls, kind: Literal["arithmetic", "bytes"], *, images: bool = False) -> Tokenizer:
        """Return the tokenizer of a model that `areal_like/demo/init_model.py` makes, with `images` of a Qwen3-VL."""
        backend = make_tokenizer(kind, images=images)
        vision = grid_processor(PROCESSOR, {}, "actor.init_model", {}) if images else None
        return cls(backend, {backend.token_to_id(EOS): ["actor.init_model"]}, special={"eos_token": EOS}, vision=vision)

    @classmethod
    def load(cls, path: str) -> Tokenizer:
        """Read a directory, or a model on the Hugging Face hub; raises TokenizerError."""
        directory = Path(path)
        if not directory.is_dir():
            directory = download(path, PROCESSOR_FILES)
        file = directory / "tokenizer.json"
        if not file.is_file():
            raise TokenizerError(f"{path} has no tokenizer.json; save the model's fast tokenizer there")
        with _LibraryErrors(f"{file} does not describe a tokenizer"):
            backend = tokenizers.Tokenizer.from_str(read_text(file))
        backend.no_truncation()  # the file keeps truncation and padding settings from training
        backend.no_padding()
        settings = read_json(directory / CONFIG)
        special = special_tokens(settings)
        ends = find_end_tokens(directory, backend, special)
        if not ends:
            raise TokenizerError(f"{path} does not define an end token; set eos_token in tokenizer_config.json")
        try:
            vision = load_processor(directory, special)
        except ProcessorError as error:
            raise TokenizerError(str(error)) from error
        templates = load_templates(directory, settings, sees_images=vision is not None)
        return cls(backend, ends, templates, special, directory.absolute(), vision)

    @property
    def has_chat_template(self) -> bool:
        """Whether the tokenizer's files have a chat template."""
        return bool(self._templates)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The tokens that end a response."""
        return tuple(self.end_tokens)

    def add_end_tokens(self, tokens: Sequence[int], source: str) -> None:
        """End responses with further tokens, which `source` names."""
        for token in tokens:
            self.end_tokens.setdefault(token, []).append(source)

    @cached_property
    def turn_end(self) -> int | None:
        """The token that the chat template writes after an assistant's turn; None without such a token.

        In families without one, such as GLM-4, it is the end token that starts the next message.
        """
        if not self._templates:  # PLAIN_TEMPLATE, without transformers, which renders templates
            end = self.backend.token_to_id(str(self._special_tokens.get("eos_token")))
            return end if end in self.backend.get_added_tokens_decoder() else None
        turn = [{"role": "user", "content": "1 + 1 = ?"}, {"role": "assistant", "content": _MARK}]
        if (end := self._token_after_mark(turn)) is not None:
            return end
        start = self._token_after_mark([*turn, turn[0]])
        return start if start in self.end_tokens else None

    def _token_after_mark(self, messages: Sequence[Mapping[str, Any]]) -> int | None:
        """Return the token of the vocabulary's extension that the template writes next to the mark; None for text."""
        try:
            text = self.render_chat(messages, add_generation_prompt=False)
        except TokenizerError:  # of a template that takes no such conversation
            return None
        added = self.backend.get_added_tokens_decoder()
        for token in self.encode_text(text.partition(_MARK)[2]):
            if self.decode([token], special=True).strip():
                return token if token in added else None
        return None

    def encode(self, text: str) -> list[int]:
        """Return token ids of a plain text, with the special tokens that the tokenizer adds to any text."""
        return self._encode(text, add_special_tokens=True)

    def encode_prompt(self, text: str) -> list[int]:
        """Return token ids of a problem: a user turn of the chat template if there is one, else plain text."""
        if not self.has_chat_template:
            return self.encode(text)
        return self.encode_chat([{"role": "user", "content": text}])

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[dict[str, Any]] | None = None, **arguments: Any
    ) -> list[int]:
        """Return token ids of a conversation, including the start of the assistant's next turn; see `render_chat`.

        A last message of the assistant is part of this start: a response continues it. Images of the messages
        (`processor.images_of`) have as many tokens as their parts.
        """
        start: str | None = ""
        if arguments.get("add_generation_prompt", True):
            messages, start = split_prefill(messages)
        if start is None:
            raise TokenizerError(f"the conversation has a last message of the assistant {WHY_NOT}. Leave it out")
        return self.encode_rendered(self.render_chat(messages, tools, **arguments) + start, messages)

    def encode_rendered(self, text: str, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Return token ids of rendered messages with their images; raises TokenizerError."""
        try:
            return self.encode_text(self._expand(text, images_of(messages)))
        except ImageError as error:
            raise TokenizerError(str(error)) from error

    def _expand(self, text: str, images: Images) -> str:
        if not images:
            return text
        if self.vision is None:
            raise TokenizerError(
                "the model takes text only, and the messages have images. Use a model that sees images"
            )
        return self.vision.expand(text, images)

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[dict[str, Any]] | None = None, **arguments: Any
    ) -> str:
        """Return the text of a conversation, the start of the assistant's next turn included.

        `tools` are JSON schemas; `arguments` are variables of the template, such as `enable_thinking`. A tokenizer
        without a template uses PLAIN_TEMPLATE. Raises TokenizerError if the template rejects the messages.
        """
        from transformers.utils.chat_template_utils import render_jinja_template

        template = select_template(self._templates, bool(tools)) if self._templates else PLAIN_TEMPLATE
        mark = self.vision.mark if self.vision else None
        variables = {"add_generation_prompt": True, "image_mark": mark, **self._special_tokens, **arguments}
        try:
            (text,), _ = render_jinja_template([for_template(messages)], tools, chat_template=template, **variables)
        except TemplateSyntaxError as error:
            raise TokenizerError(f"the chat template is not Jinja: {error}") from error
        except _TEMPLATE_FAILURES as error:
            raise TokenizerError(f"the chat template rejects the conversation: {error}") from error
        return str(text)

    def encode_text(self, text: str) -> list[int]:
        """Return token ids of a text that contains its special tokens, such as a rendered template."""
        return self._encode(text, add_special_tokens=False)

    def encode_response(self, text: str) -> list[int]:
        """Return token ids of a reference answer as the model should give it.

        It ends as the chat template ends an assistant's turn, else with the tokenizer's own end token.
        """
        end = self.turn_end
        if end is None:
            own = self.backend.token_to_id(self._special_tokens.get("eos_token", ""))
            end = own if own in self.end_tokens else self.eos_token_ids[0]
        return [*self._encode(text, add_special_tokens=False), end]

    def decode(self, tokens: Sequence[int], *, special: bool = False) -> str:
        """Return the text of token ids, without special tokens unless `special` is set."""
        return self.backend.decode(list(tokens), skip_special_tokens=not special)

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        with _LibraryErrors("the text cannot be tokenised"):
            return self.backend.encode(text, add_special_tokens=add_special_tokens).ids


class _LibraryErrors(AbstractContextManager[None]):
    """Raises TokenizerError for an error of the `tokenizers` library, whose class is Exception itself."""

    def __init__(self, message: str) -> None:
        self._message = message

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if kind is Exception:
            raise TokenizerError(f"{self._message}: {error}") from error
