"""Encoding and decoding with a model's `tokenizer.json`: without torch, and ready in 0.2 s.

transformers renders chat templates. Its module for that takes a second to import, without torch, and only models
with a template import it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import tokenizers
from jinja2 import TemplateError, TemplateSyntaxError

from areal_like.data.processor import (
    PROCESSOR_FILES,
    ProcessorError,
    VisionProcessor,
    for_template,
    grid_processor,
    images_of,
    load_processor,
)
from areal_like.demo.image_processor import PROCESSOR
from areal_like.demo.tokenizers import EOS, make_tokenizer
from areal_like.images import ImageError, Images

# A template is a program: it raises its own errors, or those of any Python expression.
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


class TokenizerError(Exception):
    """The tokenizer's files are missing or unusable; the message names them and the fix."""


class Tokenizer:
    """A fast tokenizer with the model's end tokens and, where it has one, its chat template.

    `special_tokens` are the tokens that a template may name, such as `bos_token`. `directory` has the tokenizer's
    files, None for a generated tokenizer. `vision` is the model's image processor; None for a text-only model.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        eos_token_ids: Sequence[int],
        chat_template: str | None = None,
        special_tokens: Mapping[str, str] | None = None,
        directory: Path | None = None,
        vision: VisionProcessor | None = None,
    ) -> None:
        self.backend = backend
        self.directory = directory
        self.vision = vision
        self.eos_token_ids = tuple(eos_token_ids)
        self.vocab_size = backend.get_vocab_size()
        self.unk_token_id = backend.token_to_id(getattr(backend.model, "unk_token", None) or "")
        self._special_tokens = dict(special_tokens or {})
        self._template = chat_template

    @classmethod
    def make(cls, kind: Literal["arithmetic", "bytes"], *, images: bool = False) -> Tokenizer:
        """Return the tokenizer of a model that `areal_like/demo/init_model.py` makes, with `images` of a Qwen3-VL."""
        backend = make_tokenizer(kind, images=images)
        vision = grid_processor(PROCESSOR, {}, "actor.init_model", {}) if images else None
        return cls(backend, [backend.token_to_id(EOS)], special_tokens={"eos_token": EOS}, vision=vision)

    @classmethod
    def load(cls, path: str) -> Tokenizer:
        """Read a directory, or a model on the Hugging Face hub; raises TokenizerError."""
        directory = Path(path)
        if not directory.is_dir():
            directory = _download(path)
        file = directory / "tokenizer.json"
        if not file.is_file():
            raise TokenizerError(f"{path} has no tokenizer.json; save the model's fast tokenizer there")
        with _LibraryErrors(f"{file} does not describe a tokenizer"):
            backend = tokenizers.Tokenizer.from_str(_read_text(file))
        backend.no_truncation()  # the file keeps truncation and padding settings from training
        backend.no_padding()
        settings = _read_json(directory / "tokenizer_config.json")
        special = _special_tokens(settings)
        template = settings.get("chat_template")
        if (jinja := directory / "chat_template.jinja").is_file():
            template = _read_text(jinja)
        if not isinstance(template, str | None):
            raise TokenizerError(f"{path} has several chat templates; write one to chat_template.jinja")
        eos = _eos_token_ids(directory, backend, special)
        if not eos:
            raise TokenizerError(f"{path} does not define an end token; set eos_token in tokenizer_config.json")
        try:
            vision = load_processor(directory, special)
        except ProcessorError as error:
            raise TokenizerError(str(error)) from error
        return cls(backend, eos, template, special, directory.absolute(), vision)

    @property
    def has_chat_template(self) -> bool:
        """Whether the tokenizer's files have a chat template."""
        return self._template is not None

    def encode(self, text: str) -> list[int]:
        """Return token ids of a plain text, with the special tokens that the tokenizer adds to any text."""
        return self._encode(text, add_special_tokens=True)

    def encode_prompt(self, text: str) -> list[int]:
        """Return token ids of a problem: a user turn of the chat template if there is one, else plain text."""
        if self._template is None:
            return self.encode(text)
        return self.encode_chat([{"role": "user", "content": text}])

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[dict[str, Any]] | None = None, **arguments: Any
    ) -> list[int]:
        """Return token ids of a conversation, including the start of the assistant's next turn; see `render_chat`.

        Images of the messages (`processor.images_of`) have as many tokens as their parts.
        """
        return self.encode_rendered(self.render_chat(messages, tools, **arguments), messages)

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

        template = PLAIN_TEMPLATE if self._template is None else self._template
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
        """Return token ids of a reference answer as the model should give it, end token included."""
        return [*self._encode(text, add_special_tokens=False), self.eos_token_ids[0]]

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


def _download(name: str) -> Path:
    """Download the tokenizer's files of a model on the hub, or find them in the cache."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    configs = ["tokenizer_config.json", "config.json", "generation_config.json"]
    try:
        return Path(
            snapshot_download(
                name, allow_patterns=["tokenizer.json", "chat_template.jinja", *configs, *PROCESSOR_FILES]
            )
        )
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError) as error:
        reason = str(error).strip().splitlines()[0]
        problem = f"{name} is neither a directory nor a model on the hub or in its cache"
        raise TokenizerError(f"{problem}: {reason}") from error


def _eos_token_ids(directory: Path, backend: tokenizers.Tokenizer, special: Mapping[str, str]) -> tuple[int, ...]:
    """Return the end tokens in generation's order of precedence; raise TokenizerError for an unknown token."""
    known = set(backend.get_vocab().values())
    for file in (directory / "generation_config.json", directory / "config.json"):
        ids = _read_json(file).get("eos_token_id")
        if ids == []:
            raise TokenizerError(f"{file} does not define an end token; set eos_token_id in it, or remove that key")
        for token in ids if isinstance(ids, list) else () if ids is None else (ids,):
            if type(token) is not int or token not in known:
                raise TokenizerError(f"{file} has an eos_token_id that tokenizer.json does not contain: {token!r}")
        if ids is not None:
            return tuple(ids) if isinstance(ids, list) else (ids,)
    token = backend.token_to_id(special.get("eos_token", ""))
    return () if token is None else (token,)


def _special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the text of each token that the settings name, such as `eos_token`; vision models name more."""
    extra = settings.get("extra_special_tokens")
    named = {**(extra if isinstance(extra, Mapping) else {}), **settings}
    names = (key for key in named if key.endswith("_token") and not key.startswith("add_"))
    return {key: text for key in names if (text := _text(named[key]))}


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        content = json.loads(_read_text(file))
    except json.JSONDecodeError as error:
        raise TokenizerError(f"{file} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise TokenizerError(f"{file} is not a JSON object")
    return content


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TokenizerError(f"{file} cannot be read: {error}") from error


def _text(token: Any) -> str | None:
    """Return the text of a special token, which is written as text or as a mapping that holds it."""
    text = token.get("content") if isinstance(token, Mapping) else token
    if not isinstance(text, str | None):
        raise TokenizerError(f"tokenizer_config.json has a special token that is not text: {text!r}")
    return text
