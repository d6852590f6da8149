"""From dataset rows to tokenised prompts within the length limits of a run."""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from numbers import Real
from typing import Any

from areal_like.config.schema import DatasetConfig, RunConfig, SourceConfig, TrainDatasetConfig, ValidDatasetConfig
from areal_like.data.processor import images_of
from areal_like.data.records import DatasetError, Record, folder_of, read_records, value_at
from areal_like.data.row_images import read_images, with_images
from areal_like.data.tokenizer import Tokenizer, TokenizerError
from areal_like.images import ImageError, Images
from areal_like.types import AnswerCheck, Prompt

type Note = Callable[[str, str], None]  # takes a field of the dataset's config and a note about it

MAIN = ""  # the name of the set at `path` in a mixture


def load_prompts(
    config: DatasetConfig,
    tokenizer: Tokenizer | None,
    check_answer: AnswerCheck | None,
    *,
    train_on_answers: bool = False,
    note: Note = lambda field, text: None,
) -> list[Prompt]:
    """Return all prompts of a dataset and of the sets mixed with it, tokenised; raise DatasetError.

    Without a tokenizer the rows are only checked and the result is empty. `check_answer` is the reward's check, None if
    the reward needs no answers. With `train_on_answers` the tokenizer also has to encode the reference answers. `note`
    receives overlong prompts and missing columns.
    """
    prompts = []
    for name, source in _sources(config):
        try:
            sees = None if tokenizer is None else tokenizer.vision is not None
            records = _check_rows(config, source, check_answer, train_on_answers, sees)
            if tokenizer is None:
                continue
            if check_answer is None:  # user code reads the row
                _note_mixed_columns(source, records, note)
            seen = _without_empty_images(source, records)
            made = [_prompt(seen, name, tokenizer, row, it, train_on_answers) for row, it in enumerate(records)]
            prompts += _limit_length(config, source, made, note)
        except DatasetError as error:
            field = (
                f"mixture.{name}.{error.field}" if name and error.field in SourceConfig.model_fields else error.field
            )
            raise DatasetError(field, error.problem, error.remedy, code=error.code) from error
    return prompts


def messages_of(source: SourceConfig, record: Record, images: Images = ()) -> list[dict[str, Any]]:
    """Return a row's conversation: its messages, or its text, with `system_prompt` if it has no system message.

    `images` fill the image placeholders, in OpenAI's format. Raises ImageError if the numbers differ.
    """
    given = value_at(record, source.prompt_field)
    own = [{"role": "user", "content": given}] if isinstance(given, str) else given
    messages = [_message(message) for message in own]
    if source.system_prompt is not None and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": source.system_prompt})
    if source.prompt_suffix and isinstance(messages[-1]["content"], str):
        messages[-1] = {**messages[-1], "content": messages[-1]["content"] + source.prompt_suffix}
    return with_images(messages, images) if images else messages


def tools_of(source: SourceConfig, record: Record) -> list[dict[str, Any]]:
    """Return the tools of a row as JSON schemas: from the tools column if there is one, else `tools`."""
    own = value_at(record, source.tools_field) if source.tools_field else None
    own = json.loads(own) if isinstance(own, str) else own
    return list(source.tools if own is None else own)


def fingerprints(prompts: Sequence[Prompt]) -> tuple[str, str]:
    """Return two digests; the first changes with any prompt, answer or JSON column, and with the order.

    Runs of earlier versions have the second instead, which ignores columns.
    """
    now, earlier = hashlib.sha256(), hashlib.sha256()
    for prompt in prompts:
        known = repr((list(prompt.tokens), prompt.answer)).encode()
        earlier.update(known)
        now.update(known)
        for image in prompt.images:
            now.update(hashlib.sha256(image).digest())
        for name, value in sorted(prompt.row.items(), key=lambda column: str(column[0])):
            with suppress(TypeError, ValueError, RecursionError):  # an object, whose text may differ from run to run
                now.update(json.dumps([str(name), value], sort_keys=True).encode())
    return now.hexdigest(), earlier.hexdigest()


def training_steps(config: RunConfig, n_prompts: int) -> int:
    """Return the steps of a run over `n_prompts` training prompts."""
    steps = config.total_train_epochs * n_prompts // config.train_dataset.batch_size
    return steps if config.total_train_steps is None else min(steps, config.total_train_steps)


def _sources(config: DatasetConfig) -> Iterator[tuple[str, SourceConfig]]:
    yield MAIN, config
    if isinstance(config, TrainDatasetConfig):
        yield from config.mixture.items()


def _check_rows(
    config: DatasetConfig,
    source: SourceConfig,
    check_answer: AnswerCheck | None,
    answers_needed: bool,
    sees: bool | None,
) -> Sequence[Record]:
    """Return the rows that are used, each with a prompt, and with an answer if one is needed; raises DatasetError.

    `sees` is whether the model takes images, None if unknown.
    """
    records = read_records(source)
    if isinstance(config, ValidDatasetConfig) and config.max_samples is not None:
        records = records[: config.max_samples]
    field = source.tools_field
    if field is not None and all(value_at(record, field) is None for record in records):
        empty = f"{source.path} has no row with a value in field {field!r}"
        raise DatasetError("tools_field", empty, "correct the name, or leave it null", code="RUN-DATASET-TOOLS")
    for row, record in enumerate(records):
        columns = f"its fields are {', '.join(map(str, record))}"
        prompt = value_at(record, source.prompt_field)
        if problem := _prompt_problem(prompt, sees is not False):
            remedy = columns if prompt is None else "correct it, or leave that row out"
            raise _field_error(source, row, "prompt_field", problem, remedy)
        if check_answer is None and not answers_needed:
            continue
        if (answer := _answer(source, record)) is None:
            raise _field_error(source, row, "answer_field", "neither text nor a number", columns)
        fault = ("nothing", "fill it in") if not answer.strip() else check_answer(answer) if check_answer else None
        if fault:
            raise _field_error(source, row, "answer_field", fault[0], f"{fault[1]}, or leave that row out")
    return records


def _answer(source: SourceConfig, record: Record) -> str | None:
    """Return a row's reference answer if it is text or a number."""
    answer = value_at(record, source.answer_field)
    return str(answer) if isinstance(answer, str | Real) and not isinstance(answer, bool) else None


def _note_mixed_columns(source: SourceConfig, records: Sequence[Record], note: Note) -> None:
    """Report the first row that lacks a column of the first one."""
    wanted = records[0].keys() if records else set()
    for row, record in enumerate(records):
        if missing := [name for name in wanted if name not in record]:
            note("path", f"{source.path}, row {row + 1} has no field {missing[0]!r}, which row 1 has")
            return


def _prompt_problem(prompt: Any, sees: bool) -> str | None:
    """Return why a value is neither text nor a conversation that can be trained on."""
    if isinstance(prompt, str):
        return None if prompt.strip() else "nothing"
    if isinstance(prompt, Mapping) or not hasattr(prompt, "__iter__"):
        return "neither a text nor a list of messages"
    messages = list(prompt)
    if not messages:
        return "no message"
    for message in messages:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            return f"a message without a role ({str(message)[:60]})"
        content = message.get("content")
        if content is None or isinstance(content, str):
            continue
        if isinstance(content, Mapping) or not hasattr(content, "__iter__"):
            return f"a message whose content is neither text nor a list of parts ({str(content)[:60]})"
        kinds = {part.get("type") if isinstance(part, Mapping) else type(part).__name__ for part in content}
        if other := kinds - ({"text", "image", "image_url"} if sees else {"text"}):
            allowed = "text and images" if sees else "text"
            return f"a message with {', '.join(map(str, other))}, where only {allowed} can be trained on,"
    return None


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message without the keys that only other messages of a Parquet file have."""
    return {key: value for key, value in message.items() if value is not None or key == "content"}


def _prompt(
    source: SourceConfig, name: str, tokenizer: Tokenizer, row: int, record: Record, train_on_answers: bool
) -> Prompt:
    answer = _answer(source, record) or ""
    images = _images(source, tokenizer, row, record)
    if images:
        record = {**record, source.image_field or "": list(images)}
    try:
        tokens = _encode(source, tokenizer, record, images)
        answer_tokens = tokenizer.encode_response(answer) if train_on_answers else []
    except (TokenizerError, ValueError, TypeError) as error:  # the last two come from a row's tools
        remedy = "correct the row or the chat template"
        raise _row_error("RUN-DATASET-TOKENS", source, row, "path", f"cannot be tokenised: {error}", remedy) from error
    messages = partial(messages_of, source, record, images)
    images, vision = images_of(messages()), tokenizer.vision
    if vision is not None and not images and tokenizer.backend.token_to_id(vision.token) in tokens:
        problem, remedy = f"has the token {vision.token} and no image", "add the image, and write <image> in its place"
        raise _row_error("RUN-DATASET-IMAGES", source, row, "image_field", problem, remedy)
    for words, its_tokens in (("words", tokens), ("words in its answer", answer_tokens)):
        if tokenizer.unk_token_id in its_tokens:
            problem, remedy = f"has {words} that the tokenizer does not know", "choose a tokenizer that covers the text"
            raise _row_error("RUN-DATASET-WORDS", source, row, "path", problem, f"{remedy}, such as `bytes`")
    return Prompt(
        sample_id=row, tokens=tokens, answer=answer, row=record, dataset=name, messages=messages, images=images
    )


def _without_empty_images(source: SourceConfig, records: Sequence[Record]) -> SourceConfig:
    """Return the source without `image_field` if no row has a value there, so that `<image>` is plain text."""
    field = source.image_field
    is_used = field is not None and any(value_at(record, field) not in (None, []) for record in records)
    return source if is_used else source.model_copy(update={"image_field": None})


def _images(source: SourceConfig, tokenizer: Tokenizer, row: int, record: Record) -> Images:
    """Return the images of a row's column; raise DatasetError if they do not match its text."""
    if (field := source.image_field) is None:
        return ()
    try:
        images = read_images(value_at(record, field), folder_of(source.path))
        if tokenizer.vision is not None:
            with_images(messages_of(source, record), images)
            for image in images:
                tokenizer.vision.sizes.tokens(image)
    except ImageError as error:
        problem, _, remedy = str(error).rpartition(". ")
        problem, remedy = f"has unusable images in field {field!r}: {problem}", remedy[:1].lower() + remedy[1:]
        raise _row_error("RUN-DATASET-IMAGES", source, row, "image_field", problem, remedy) from error
    if images and tokenizer.vision is None:
        problem = f"has images in field {field!r}, and the model takes text only"
        remedy = "choose a model that sees images, or write image_field=null"
        raise _row_error("RUN-DATASET-IMAGES-MODEL", source, row, "image_field", problem, remedy)
    return images


def hinted_tokens(config: DatasetConfig, tokenizer: Tokenizer, prompt: Prompt, field: str) -> list[int]:
    """Return a prompt's tokens with the text of a column as one more paragraph of its last user message."""
    source = next(source for name, source in _sources(config) if name == prompt.dataset)
    return _encode(source, tokenizer, prompt.row, prompt.images, f"\n\n{value_at(prompt.row, field)}")


def _encode(
    source: SourceConfig, tokenizer: Tokenizer, record: Record, images: Images = (), hint: str = ""
) -> list[int]:
    """Encode a row; without a chat template plain text stays plain, unless a key requires a conversation."""
    given, tools = value_at(record, source.prompt_field), tools_of(source, record)
    plain = isinstance(given, str) and source.system_prompt is None and not images
    if plain and not tools and not source.chat_template_kwargs:
        return tokenizer.encode_prompt(given + source.prompt_suffix + hint)
    messages = messages_of(source, record, images)
    if hint:
        messages = _with_hint(messages, hint)
    return tokenizer.encode_chat(messages, tools or None, **source.chat_template_kwargs)


def _with_hint(messages: Sequence[dict[str, Any]], hint: str) -> list[dict[str, Any]]:
    """Return the messages with a text appended to the last user message."""
    places = [place for place, message in enumerate(messages) if message["role"] == "user"]
    if not places:
        return [*messages, {"role": "user", "content": hint.strip()}]
    last = messages[places[-1]]
    text = last["content"] or ""
    content = text + hint if isinstance(text, str) else [*text, {"type": "text", "text": hint}]
    return [*messages[: places[-1]], {**last, "content": content}, *messages[places[-1] + 1 :]]


def _limit_length(config: DatasetConfig, source: SourceConfig, prompts: list[Prompt], note: Note) -> list[Prompt]:
    """Apply `overlong_prompts`; raise DatasetError if it rejects a prompt or drops all."""
    most = config.max_prompt_length
    too_long = [prompt for prompt in prompts if len(prompt.tokens) > most]
    if not too_long:
        return prompts
    share = f"{len(too_long)} of {len(prompts)} rows are too long"
    if config.overlong_prompts == "truncate" and not any(prompt.images for prompt in too_long):
        note("overlong_prompts", f"{source.path}: {share} and are cut to their last {most} tokens (max_prompt_length)")
        return [replace(prompt, tokens=prompt.tokens[-most:]) for prompt in prompts]
    if config.overlong_prompts == "drop" and len(too_long) < len(prompts):
        note(
            "overlong_prompts",
            f"{source.path}: {share} and are dropped; they have more than {most} tokens (max_prompt_length)",
        )
        return [prompt for prompt in prompts if len(prompt.tokens) <= most]
    first, longest = too_long[0], max(len(prompt.tokens) for prompt in too_long)
    problem = f"has {len(first.tokens)} tokens, more than {most} ({share})"
    remedy = f"set max_prompt_length to {longest}, or overlong_prompts to drop or truncate"
    raise _row_error("RUN-DATASET-LENGTH", source, first.sample_id, "max_prompt_length", problem, remedy)


def _field_error(source: SourceConfig, row: int, field: str, there: str, remedy: str) -> DatasetError:
    code = "RUN-DATASET-PROMPT" if field == "prompt_field" else "RUN-DATASET-ANSWER"
    return _row_error(code, source, row, field, f"has {there} in field {getattr(source, field)!r}", remedy)


def _row_error(code: str, source: SourceConfig, row: int, field: str, problem: str, remedy: str) -> DatasetError:
    return DatasetError(field, f"{source.path}, row {row + 1} {problem}", remedy, code=code)
