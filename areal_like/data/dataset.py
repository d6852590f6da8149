"""From dataset rows to tokenised prompts within the length limits of a run."""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from decimal import Decimal
from functools import partial
from numbers import Real
from typing import Any

from areal_like.core.config.schema import DatasetConfig, RunConfig, SourceConfig, TrainDatasetConfig, ValidDatasetConfig
from areal_like.core.types import AnswerCheck, Images, Prompt, value_at
from areal_like.data.conversations import (
    ending_problem,
    find_null,
    find_problem,
    plain_message,
    plain_tools,
    read_prompt,
    without_ending,
)
from areal_like.data.images import ImageError
from areal_like.data.processor import images_of
from areal_like.data.records import read_records
from areal_like.data.row_images import read_images, with_images
from areal_like.data.rows import DatasetError, Record, Records
from areal_like.data.tokenizer import Tokenizer, TokenizerError

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
                _note_mixed_columns(records, note)
            _note_nulls(source, records, note)
            seen = _without_empty_images(source, records.rows)
            rows = range(len(records.rows))
            made = [_prompt(seen, name, tokenizer, records, row, train_on_answers) for row in rows]
            prompts += _limit_length(config, source, records, made, note)
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
    given = read_prompt(value_at(record, source.prompt_field))
    own = [{"role": "user", "content": given}] if isinstance(given, str) else given
    messages = [plain_message(message) for message in own]
    if source.last_assistant == "drop":
        messages = without_ending(messages)
    if source.system_prompt is not None and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": source.system_prompt})
    if source.prompt_suffix:
        is_start = messages[-1]["role"] == "assistant" and len(messages) > 1  # of the response
        at = len(messages) - (2 if is_start else 1)
        messages[at] = _with_text(messages[at], source.prompt_suffix)
    return with_images(messages, images) if images else messages


def tools_of(source: SourceConfig, record: Record) -> list[dict[str, Any]]:
    """Return the tools of a row as JSON schemas: from the tools column if there is one, else `tools`."""
    own = value_at(record, source.tools_field) if source.tools_field else None
    own = json.loads(own) if isinstance(own, str) else own
    return plain_tools(source.tools if own is None else own)


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
) -> Records:
    """Return the rows that are used, each with a prompt, and with an answer if one is needed; raises DatasetError.

    `sees` is whether the model takes images, None if unknown.
    """
    records = read_records(source)
    if isinstance(config, ValidDatasetConfig) and config.max_samples is not None:
        records = records.first(config.max_samples)
    field = source.tools_field
    if field is not None and all(value_at(record, field) is None for record in records.rows):
        empty = f"{source.label} has no row with a value in field {field!r}"
        raise DatasetError("tools_field", empty, "correct the name, or leave it null", code="RUN-DATASET-ROW")
    for row, record in enumerate(records.rows):
        _check_prompt(source, records, row, sees is not False)
        if check_answer is None and not answers_needed:
            continue
        if (answer := _answer(source, record)) is None:
            given = value_at(record, source.answer_field)
            there = f"neither text nor a number{'' if given is None else f' ({type(given).__name__})'}"
            raise _field_error(source, records, row, "answer_field", there, _columns(record))
        fault = ("nothing", "fill it in") if not answer.strip() else check_answer(answer) if check_answer else None
        if fault:
            raise _field_error(source, records, row, "answer_field", fault[0], f"{fault[1]}, or leave that row out")
    return records


def _check_prompt(source: SourceConfig, records: Records, row: int, sees: bool) -> None:
    """Raise DatasetError for a row without a prompt that a response can follow."""
    record = records.rows[row]
    prompt = read_prompt(value_at(record, source.prompt_field))
    if problem := find_problem(prompt, sees):
        remedy = _columns(record) if prompt is None else "correct it, or leave that row out"
        if isinstance(prompt, bytes):
            remedy = "save the column as text, in UTF-8"
        elif isinstance(prompt, str) and prompt.strip():
            remedy = "write the list itself, or its JSON as json.dumps(messages)"
        raise _field_error(source, records, row, "prompt_field", problem, remedy)
    if isinstance(prompt, str):
        return
    messages = [dict(message) for message in prompt]
    if source.last_assistant == "drop":
        if not without_ending(messages):
            there = "messages of the assistant alone"
            raise _field_error(source, records, row, "prompt_field", there, "leave that row out")
    elif fault := ending_problem(messages, source.last_assistant):
        problem = f"has {fault[0]} in field {source.prompt_field!r}"
        raise _row_error(records, row, "last_assistant", problem, fault[1])


def _columns(record: Record) -> str:
    return f"its fields are {', '.join(map(str, record))}"


def _answer(source: SourceConfig, record: Record) -> str | None:
    """Return a row's reference answer if it is text or a number."""
    answer = value_at(record, source.answer_field)
    if isinstance(answer, Decimal):
        return format(answer, "f")
    return str(answer) if isinstance(answer, str | Real) and not isinstance(answer, bool) else None


def _note_mixed_columns(records: Records, note: Note) -> None:
    """Report the first row that lacks a column of the first one."""
    wanted = records.rows[0].keys() if records.rows else set()
    for row, record in enumerate(records.rows):
        if missing := [name for name in wanted if name not in record]:
            note("path", f"{records.place(row)} has no field {missing[0]!r}, which row 1 has")
            return


def _note_nulls(source: SourceConfig, records: Records, note: Note) -> None:
    """Report the first row with a null that its prompt shows: files made from a table have the keys of other rows."""
    for row, record in enumerate(records.rows if records.keeps_nulls else ()):
        prompt = read_prompt(value_at(record, source.prompt_field))
        tools = value_at(record, source.tools_field) if source.tools_field else None
        key = find_null(() if isinstance(prompt, str) else prompt, tools)
        if key is not None:
            note("tools_field" if source.tools_field else "prompt_field", f"{records.place(row)}: {key} is null")
            return


def _prompt(
    source: SourceConfig, name: str, tokenizer: Tokenizer, records: Records, row: int, train_on_answers: bool
) -> Prompt:
    record = records.rows[row]
    answer = _answer(source, record) or ""
    images = _images(source, tokenizer, records, row)
    if images:
        record = {**record, source.image_field or "": list(images)}
    try:
        tokens = _encode(source, tokenizer, record, images)
        answer_tokens = tokenizer.encode_response(answer) if train_on_answers else []
    except (TokenizerError, ValueError, TypeError) as error:  # the last two come from a row's tools
        remedy = "correct the row or the chat template"
        raise _row_error(records, row, "path", f"cannot be tokenised: {error}", remedy) from error
    messages = partial(messages_of, source, record, images)
    images, vision = images_of(messages()), tokenizer.vision
    if vision is not None and not images and tokenizer.backend.token_to_id(vision.token) in tokens:
        problem, remedy = f"has the token {vision.token} and no image", "add the image, and write <image> in its place"
        raise _row_error(records, row, "image_field", problem, remedy, "RUN-DATASET-IMAGES")
    for words, its_tokens in (("words", tokens), ("words in its answer", answer_tokens)):
        if tokenizer.unk_token_id in its_tokens:
            problem, remedy = f"has {words} that the tokenizer does not know", "choose a tokenizer that covers the text"
            raise _row_error(records, row, "path", problem, f"{remedy}, such as `bytes`")
    return Prompt(
        sample_id=row, tokens=tokens, answer=answer, row=record, dataset=name, messages=messages, images=images
    )


def _without_empty_images(source: SourceConfig, records: Sequence[Record]) -> SourceConfig:
    """Return the source without `image_field` if no row has a value there, so that `<image>` is plain text."""
    field = source.image_field
    is_used = field is not None and any(value_at(record, field) not in (None, []) for record in records)
    return source if is_used else source.model_copy(update={"image_field": None})


def _images(source: SourceConfig, tokenizer: Tokenizer, records: Records, row: int) -> Images:
    """Return the images of a row's column; raise DatasetError if they do not match its text."""
    if (field := source.image_field) is None:
        return ()
    record = records.rows[row]
    try:
        images = read_images(value_at(record, field), records.folder(row))
        if tokenizer.vision is not None:
            with_images(messages_of(source, record), images)
            for image in images:
                tokenizer.vision.sizes.tokens(image)
    except ImageError as error:
        problem, _, remedy = str(error).rpartition(". ")
        problem, remedy = f"has unusable images in field {field!r}: {problem}", remedy[:1].lower() + remedy[1:]
        raise _row_error(records, row, "image_field", problem, remedy, "RUN-DATASET-IMAGES") from error
    if images and tokenizer.vision is None:
        problem = f"has images in field {field!r}, and the model takes text only"
        remedy = "choose a model that sees images, or write image_field=null"
        raise _row_error(records, row, "image_field", problem, remedy, "RUN-DATASET-IMAGES")
    return images


def hinted_tokens(config: DatasetConfig, tokenizer: Tokenizer, prompt: Prompt, field: str) -> list[int]:
    """Return a prompt's tokens with the text of a column as one more paragraph of its last user message."""
    source = next(source for name, source in _sources(config) if name == prompt.dataset)
    return _encode(source, tokenizer, prompt.row, prompt.images, f"\n\n{value_at(prompt.row, field)}")


def _encode(
    source: SourceConfig, tokenizer: Tokenizer, record: Record, images: Images = (), hint: str = ""
) -> list[int]:
    """Encode a row; without a chat template plain text stays plain, unless a key requires a conversation."""
    given, tools = read_prompt(value_at(record, source.prompt_field)), tools_of(source, record)
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
    at = places[-1]
    return [*messages[:at], _with_text(messages[at], hint), *messages[at + 1 :]]


def _with_text(message: dict[str, Any], text: str) -> dict[str, Any]:
    """Return a message with a text at its end."""
    content = message["content"]
    added = content + text if isinstance(content, str) else [*content, {"type": "text", "text": text}]
    return {**message, "content": added}


def _limit_length(
    config: DatasetConfig, source: SourceConfig, records: Records, prompts: list[Prompt], note: Note
) -> list[Prompt]:
    """Apply `overlong_prompts`; raise DatasetError if it rejects a prompt or drops all."""
    most = config.max_prompt_length
    too_long = [prompt for prompt in prompts if len(prompt.tokens) > most]
    if not too_long:
        return prompts
    share = f"{len(too_long)} of {len(prompts)} rows are too long"
    if config.overlong_prompts == "truncate" and not any(prompt.images for prompt in too_long):
        note("overlong_prompts", f"{source.label}: {share} and are cut to their last {most} tokens (max_prompt_length)")
        return [replace(prompt, tokens=prompt.tokens[-most:]) for prompt in prompts]
    if config.overlong_prompts == "drop" and len(too_long) < len(prompts):
        note(
            "overlong_prompts",
            f"{source.label}: {share} and are dropped; they have more than {most} tokens (max_prompt_length)",
        )
        return [prompt for prompt in prompts if len(prompt.tokens) <= most]
    first, longest = too_long[0], max(len(prompt.tokens) for prompt in too_long)
    problem = f"has {len(first.tokens)} tokens, more than {most} ({share})"
    remedy = f"set max_prompt_length to {longest}, or overlong_prompts to drop or truncate"
    raise _row_error(records, first.sample_id, "max_prompt_length", problem, remedy, "RUN-DATASET-LENGTH")


def _field_error(source: SourceConfig, records: Records, row: int, field: str, there: str, remedy: str) -> DatasetError:
    return _row_error(records, row, field, f"has {there} in field {getattr(source, field)!r}", remedy)


def _row_error(
    records: Records, row: int, field: str, problem: str, remedy: str, code: str = "RUN-DATASET-ROW"
) -> DatasetError:
    return DatasetError(field, f"{records.place(row)} {problem}", remedy, code=code)
