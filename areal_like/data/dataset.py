"""Datasets in, prompts out; a stream over them whose place can be saved.

A dataset is a JSONL or Parquet file, `owner/name` on the Hugging Face hub, or `arithmetic`.
"""

import hashlib
import itertools
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from areal_like.config.schema import DatasetConfig, RunConfig, ValidDatasetConfig
from areal_like.data.tokenizer import Tokenizer, TokenizerError
from areal_like.demo import arithmetic
from areal_like.types import Prompt

type Record = Mapping[str, Any]
type AnswerCheck = Callable[[str], tuple[str, str] | None]  # what a reference answer lacks and what would do, or None

_HUB_NAME = re.compile(r"\w[\w.-]*/[\w.-]+")


class DatasetError(Exception):
    """A dataset that cannot be used.

    `field` is the field of its config at fault, `problem` names file and row, `remedy` says what would do.
    """

    def __init__(self, field: str, problem: str, remedy: str) -> None:
        super().__init__(f"{problem}; {remedy}")
        self.field, self.problem, self.remedy = field, problem, remedy


def load_prompts(
    config: DatasetConfig, tokenizer: Tokenizer, check_answer: AnswerCheck | None, *, train_on_answers: bool = False
) -> list[Prompt]:
    """All prompts of a dataset, tokenised; raises DatasetError.

    `check_answer` is the reward's, None if that is not known. With `train_on_answers` the tokenizer has to know the
    words of the reference answers too.
    """
    records = read_problems(config, check_answer)
    prompts = [_prompt(config, tokenizer, row, record, train_on_answers) for row, record in enumerate(records)]
    _check_lengths(config, prompts)
    return prompts


def read_problems(config: DatasetConfig, check_answer: AnswerCheck | None) -> Sequence[Record]:
    """The rows of a dataset that a run uses, each with a problem and a sound answer; raises DatasetError."""
    records = read_records(config)
    if isinstance(config, ValidDatasetConfig) and config.max_samples is not None:
        records = records[: config.max_samples]
    for row, record in enumerate(records):
        for field in ("prompt_field", "answer_field"):
            text, there, remedy = record.get(getattr(config, field)), None, "fill it in, or leave that row out"
            if not isinstance(text, str):
                there, remedy = "no text", f"its fields are {', '.join(map(str, record))}"
            elif not text.strip():
                there = "nothing"
            elif field == "answer_field" and check_answer is not None and (fault := check_answer(text)):
                there, remedy = fault[0], f"{fault[1]}, or leave that row out"
            if there:
                raise _row_error(config, row, field, f"has {there} in field {getattr(config, field)!r}", remedy)
    return records


def _row_error(config: DatasetConfig, row: int, field: str, problem: str, remedy: str) -> DatasetError:
    return DatasetError(field, f"{config.path}, row {row + 1} {problem}", remedy)


def read_records(config: DatasetConfig) -> Sequence[Record]:
    """The rows of a dataset, at least one; raises DatasetError."""
    path = config.path
    if path == "arithmetic":
        return _read_arithmetic(config)
    if problem := _path_problem(path):
        remedy = "name a JSONL or Parquet file, or a dataset of the hub as owner/name"
        raise DatasetError("path", f"{path} {problem}", remedy)
    read = {"jsonl": _read_jsonl, "parquet": _read_parquet}.get(path.rpartition(".")[2])
    if not (records := read(path) if read else _read_hub(config)):
        raise DatasetError("path", f"{path} has no rows", "give it at least one problem")
    return records


class PromptStream:
    """Endless passes over the prompts, each in its own seeded order; `stream[place]` is the prompt at a place.

    Order depends on `seed` and the number of the pass alone, so a place is all that a resumed run has to know.
    """

    def __init__(self, prompts: Sequence[Prompt], *, shuffle: bool, seed: int) -> None:
        self._prompts, self._shuffle, self._seed = prompts, shuffle, seed
        self._order_of = lru_cache(maxsize=2)(self._order)  # of the passes that groups are started from

    def __getitem__(self, place: int) -> Prompt:
        epoch, position = divmod(place, len(self._prompts))
        return self._prompts[self._order_of(epoch)[position]]

    def __iter__(self) -> Iterator[Prompt]:
        return map(self.__getitem__, itertools.count())

    def _order(self, epoch: int) -> Sequence[int]:
        if not self._shuffle:
            return range(len(self._prompts))
        return np.random.default_rng([self._seed, epoch]).permutation(len(self._prompts)).tolist()


def fingerprint(prompts: Sequence[Prompt]) -> str:
    """A text that is another one where any prompt, its answer or the order is."""
    digest = hashlib.sha256()
    for prompt in prompts:
        digest.update(repr((list(prompt.tokens), prompt.answer)).encode())
    return digest.hexdigest()


def training_steps(config: RunConfig, n_prompts: int) -> int:
    """Steps of a run over `n_prompts` training prompts."""
    steps = config.total_train_epochs * n_prompts // config.train_dataset.batch_size
    return steps if config.total_train_steps is None else min(steps, config.total_train_steps)


def _path_problem(path: str) -> str | None:
    """Why a path is neither a file that can be read nor a name on the hub.

    The datasets library would take other names for a folder or for one of its builders, and read what lies there.
    """
    readable = path.endswith((".jsonl", ".parquet"))
    if os.path.isfile(path):
        return None if readable else "is neither JSONL nor Parquet"
    if os.path.exists(path):
        return "is not a file"
    return None if _HUB_NAME.fullmatch(path) and not readable else "does not exist"


def _read_arithmetic(config: DatasetConfig) -> list[dict[str, str]]:
    if config.split not in arithmetic.SPLITS:
        raise DatasetError("split", f"arithmetic has no split {config.split}", "write train or test")
    settings = config.arithmetic
    return arithmetic.generate(settings.size, settings.max_number, settings.seed, config.split)


def _read_jsonl(path: str) -> list[Record]:
    records: list[Record] = []
    try:
        lines = Path(path).read_bytes().splitlines()
    except OSError as error:
        raise DatasetError("path", f"{path} cannot be read: {error}", "make it readable") from error
    for number, line in enumerate(lines, 1):
        try:
            records += [json.loads(line)] if line.strip() else []
        except ValueError as error:  # not JSON, or not UTF-8
            problem = f"{path}, line {number} is not JSON: {error}"
            raise DatasetError("path", problem, "write one object per line") from error
        if records and not isinstance(records[-1], dict):
            raise DatasetError("path", f"{path}, line {number} is not an object", "write one object per line")
    return records


def _read_parquet(path: str) -> list[Record]:
    import pyarrow
    from pyarrow import parquet

    try:
        return parquet.read_table(path).to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise DatasetError("path", f"{path} cannot be read as Parquet: {error}", "write it again") from error


def _read_hub(config: DatasetConfig) -> Sequence[Record]:
    import datasets
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        return datasets.load_dataset(config.path, config.name, split=config.split).to_list()
    except (datasets.exceptions.DatasetsError, HFValidationError, HfHubHTTPError, OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0].rstrip(".")
        problem = f"is no .jsonl or .parquet file, and no dataset that the hub or its cache gives: {reason}"
        raise DatasetError(
            "path", f"{config.path} {problem}", "check the name, `name` and `split`, or prepare a Parquet file"
        ) from error


def _prompt(config: DatasetConfig, tokenizer: Tokenizer, row: int, record: Record, train_on_answers: bool) -> Prompt:
    answer = record[config.answer_field]
    try:
        tokens = tokenizer.encode_prompt(record[config.prompt_field])
        answer_tokens = tokenizer.encode_response(answer) if train_on_answers else []
    except TokenizerError as error:
        remedy = "correct the row or the chat template"
        raise _row_error(config, row, "path", f"cannot be tokenised: {error}", remedy) from error
    for words, its_tokens in (("words", tokens), ("words in its answer", answer_tokens)):
        if tokenizer.unk_token_id in its_tokens:
            problem, remedy = f"has {words} that the tokenizer does not know", "choose a tokenizer that covers the text"
            raise _row_error(config, row, "path", problem, f"{remedy}, such as `bytes`")
    return Prompt(sample_id=row, tokens=tokens, answer=answer, row=record)


def _check_lengths(config: DatasetConfig, prompts: Sequence[Prompt]) -> None:
    too_long = [prompt for prompt in prompts if len(prompt.tokens) > config.max_prompt_length]
    if not too_long:
        return
    first, longest = too_long[0], max(len(prompt.tokens) for prompt in too_long)
    share = f"{len(too_long)} of {len(prompts)} rows are too long"
    problem = f"has {len(first.tokens)} tokens, more than {config.max_prompt_length} ({share})"
    remedy = f"set max_prompt_length to {longest} or leave those rows out"
    raise _row_error(config, first.sample_id, "max_prompt_length", problem, remedy)
