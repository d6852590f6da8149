"""The files of a model's tokenizer: its settings, its special tokens and its chat templates."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

CONFIG = "tokenizer_config.json"
TEMPLATE, LEGACY_TEMPLATE, TEMPLATES = "chat_template.jinja", "chat_template.json", "additional_chat_templates"
DEFAULT, WITH_TOOLS = "default", "tool_use"  # names of templates, as in transformers


class TokenizerError(Exception):
    """The tokenizer's files are missing or unusable; the message names them and the fix."""


def download(name: str, others: Sequence[str]) -> Path:
    """Download the tokenizer's files of a model on the hub, and `others`, or find them in the cache."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    configs = [CONFIG, "config.json", "generation_config.json"]
    templates = [TEMPLATE, LEGACY_TEMPLATE, f"{TEMPLATES}/*.jinja"]
    try:
        return Path(snapshot_download(name, allow_patterns=["tokenizer.json", *templates, *configs, *others]))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError) as error:
        reason = str(error).strip().splitlines()[0]
        problem = f"{name} is neither a directory nor a model on the hub or in its cache"
        raise TokenizerError(f"{problem}: {reason}") from error


def load_templates(directory: Path, settings: Mapping[str, Any], *, sees_images: bool) -> dict[str, str]:
    """Return the chat templates by name, empty without one; raises TokenizerError.

    The order follows transformers: `chat_template.jinja` is preferred to `settings` (tokenizer_config.json), and
    `chat_template.json` is the processor's in models that see images.
    """
    legacy = _read_templates(read_json(directory / LEGACY_TEMPLATE).get("chat_template"), directory / LEGACY_TEMPLATE)
    own = _read_templates(settings.get("chat_template"), directory / CONFIG)
    found = (legacy or own) if sees_images else (own or legacy)
    found |= {file.stem: read_text(file) for file in sorted((directory / TEMPLATES).glob("*.jinja"))}
    if (jinja := directory / TEMPLATE).is_file():
        found[DEFAULT] = read_text(jinja)
    if found and DEFAULT not in found:
        names = ", ".join(found)
        raise TokenizerError(
            f"{directory} has several chat templates ({names}), and none is called {DEFAULT}. A run uses {DEFAULT}, and "
            f"{WITH_TOOLS} for prompts with tools. Write the right template to {TEMPLATE}"
        )
    return found


def select_template(templates: Mapping[str, str], tools: bool) -> str:
    """Return the template for a conversation with or without tools, as transformers does."""
    return templates[WITH_TOOLS if tools and WITH_TOOLS in templates else DEFAULT]


def _read_templates(given: Any, file: Path) -> dict[str, str]:
    """Return templates by name from a field that has one, or a list of objects with `name` and `template`."""
    if given is None:
        return {}
    pairs: list[tuple[Any, Any]] = [(DEFAULT, given)]
    if isinstance(given, Mapping):
        pairs = list(given.items())
    elif isinstance(given, list):
        objects = [each if isinstance(each, Mapping) else {} for each in given]
        pairs = [(each.get("name"), each.get("template")) for each in objects]
    if not all(isinstance(name, str) and isinstance(template, str) for name, template in pairs):
        raise TokenizerError(
            f"{file} has a chat_template that is neither a text nor a list of objects with name and template. Write the "
            f"template to {TEMPLATE}"
        )
    return dict(pairs)


def special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the text of each token that the settings name, such as `eos_token`; vision models name more."""
    extra = settings.get("extra_special_tokens")
    named = {**(extra if isinstance(extra, Mapping) else {}), **settings}
    names = (key for key in named if key.endswith("_token") and not key.startswith("add_"))
    return {key: text for key in names if (text := _text(named[key]))}


def read_json(file: Path) -> dict[str, Any]:
    """Return the object in a JSON file, empty for a missing file; raises TokenizerError."""
    if not file.is_file():
        return {}
    try:
        content = json.loads(read_text(file))
    except json.JSONDecodeError as error:
        raise TokenizerError(f"{file} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise TokenizerError(f"{file} is not a JSON object")
    return content


def read_text(file: Path) -> str:
    """Return the text of a file; raises TokenizerError."""
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
