import hashlib
import itertools
import json
from dataclasses import replace
from unittest import mock

import datasets
import pyarrow
import pytest
from pyarrow import parquet

from areal_like.core.config.schema import ArithmeticConfig, DatasetConfig, ValidDatasetConfig
from areal_like.core.rollout.stream import PromptStream
from areal_like.core.types import Prompt
from areal_like.data.dataset import fingerprints, load_prompts
from areal_like.data.rows import DatasetError
from areal_like.data.tokenizer import Tokenizer, TokenizerError
from areal_like.rewards.gsm8k import verify
from areal_like.rewards.verifiers import REWARDS

BYTES = Tokenizer.make("bytes")
ROWS = [
    {"question": "1 + 1?", "answer": "#### 2", "level": 1},
    {"question": "2 + 2 + 2?", "answer": "#### 6", "level": 2},
]
CHECK = REWARDS["gsm8k"].check


def load(config, tokenizer, **more):
    return load_prompts(config, tokenizer, CHECK, **more)


def write_jsonl(file, rows):
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def write_parquet(file, rows):
    parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    return str(file)


@pytest.mark.parametrize(("write", "name"), [(write_jsonl, "a.jsonl"), (write_parquet, "a.parquet")])
def test_files_become_prompts(write, name, tmp_path):
    prompts = load(DatasetConfig(path=write(tmp_path / name, ROWS)), BYTES)
    assert [BYTES.decode(prompt.tokens) for prompt in prompts] == ["1 + 1?", "2 + 2 + 2?"]
    assert [prompt.sample_id for prompt in prompts] == [0, 1]
    assert prompts[1].answer == ROWS[1]["answer"]


def test_other_field_names(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"problem": "1?", "solution": "1"}])
    (prompt,) = load(DatasetConfig(path=path, prompt_field="problem", answer_field="solution"), BYTES)
    assert BYTES.decode(prompt.tokens) == "1?"


def test_max_samples_takes_the_first(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", ROWS)
    assert [p.sample_id for p in load(ValidDatasetConfig(path=path, max_samples=1), BYTES)] == [0]


def test_arithmetic_needs_no_file():
    config = DatasetConfig(path="arithmetic", split="test", arithmetic=ArithmeticConfig(size=5))
    assert len(load(config, Tokenizer.make("arithmetic"))) == 5


@pytest.mark.parametrize(
    ("content", "field", "words"),
    [
        ("", "path", ["no rows"]),
        ('{"question": "1"', "path", ["line 1", "not JSON"]),
        ('{"question": "1", "answer": "1"}\n[3]\n', "path", ["line 2", "not an object"]),
        ('{"question": "1", "answer": "1"}\n{"question": "1"}\n', "answer_field", ["row 2", "'answer'", "question"]),
        ('{"question": 3, "answer": "1"}\n', "prompt_field", ["row 1", "'question'"]),
        ('{"question": " ", "answer": "1"}\n', "prompt_field", ["row 1", "nothing in field 'question'"]),
        ('{"question": "1", "answer": ""}\n', "answer_field", ["row 1", "nothing in field 'answer'"]),
        (
            '{"question": "1", "answer": "1"}\n{"question": "1", "answer": "x^2 +"}\n',
            "answer_field",
            ["row 2", "as a whole"],
        ),
        ('{"question": "1", "answer": "It is 2.\\n####"}\n', "answer_field", ["row 1", "no final answer", "'answer'"]),
        (
            '{"question": "1", "answer": "2"}\n{"question": "1", "answer": "He buys 3 pens and has 5 dollars left."}\n',
            "answer_field",
            ["row 2", "several numbers", "'answer'"],
        ),
        ('{"question": "12345678", "answer": "1"}\n', "max_prompt_length", ["row 1", "8 tokens", "more than 5"]),
    ],
)
def test_a_fault_names_file_row_and_remedy(content, field, words, tmp_path):
    file = tmp_path / "faulty.jsonl"
    file.write_text(content)
    with pytest.raises(DatasetError) as caught:
        load(DatasetConfig(path=str(file), max_prompt_length=5), BYTES)
    assert caught.value.field == field and caught.value.remedy
    assert all(word in str(caught.value) for word in ["faulty.jsonl", *words])


@pytest.mark.parametrize("name", ["missing.jsonl", "missing.parquet"])
def test_a_missing_file_is_named(name, tmp_path):
    with pytest.raises(DatasetError, match="does not exist"):
        load(DatasetConfig(path=str(tmp_path / name)), BYTES)


@pytest.mark.parametrize("name", ["csv", "json", "text", "gsm8k", "./owner/name", "owner/name/more"])
def test_only_owner_and_name_are_asked_of_the_hub(name, tmp_path, monkeypatch):
    """A plain name would be one of the datasets library's builders, and read the working directory."""
    monkeypatch.chdir(tmp_path)
    for suffix in ("csv", "json", "txt"):
        (tmp_path / f"train.{suffix}").write_text('{"question": "1?", "answer": "1"}')
    with pytest.raises(DatasetError, match=f"{name} does not exist") as caught:
        load(DatasetConfig(path=name), BYTES)
    assert "owner/name" in caught.value.remedy


def test_a_folder_is_not_taken_for_a_dataset_of_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data/mine").mkdir(parents=True)
    write_jsonl(tmp_path / "data/mine/train.jsonl", ROWS)
    monkeypatch.setattr(datasets, "load_dataset", None)
    assert len(load(DatasetConfig(path="data/mine"), BYTES)) == 2


def test_a_file_of_another_kind_is_refused(tmp_path):
    (tmp_path / "a.csv").write_text("question,answer\n1?,1\n")
    with pytest.raises(DatasetError, match=r"a\.csv is not a JSONL, JSON or Parquet file"):
        load(DatasetConfig(path=str(tmp_path / "a.csv")), BYTES)


def test_a_dataset_of_the_hub(monkeypatch):
    asked = []

    def load_dataset(*names, split):
        asked.append((*names, split))
        return datasets.Dataset.from_list(ROWS)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    config = ValidDatasetConfig(path="openai/gsm8k", name="main")
    assert len(load(config, BYTES)) == 2 and asked == [("openai/gsm8k", "main", "test")]


def test_a_file_that_breaks_off_while_it_is_read_is_refused(tmp_path):
    file = tmp_path / "a.jsonl"
    file.symlink_to("/proc/self/mem")  # opens, but its first byte is not mapped
    with pytest.raises(DatasetError, match=r"a\.jsonl cannot be read"):
        load(DatasetConfig(path=str(file)), BYTES)


def test_what_is_not_parquet_is_refused(tmp_path):
    (tmp_path / "a.parquet").write_text("not parquet")
    with pytest.raises(DatasetError, match="cannot be read as Parquet"):
        load(DatasetConfig(path=str(tmp_path / "a.parquet")), BYTES)


def test_words_unknown_to_the_tokenizer_are_refused(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"question": "Zoe has 3 zebras.", "answer": "#### 3"}])
    with pytest.raises(DatasetError, match="tokenizer does not know"):
        load(DatasetConfig(path=path), Tokenizer.make("arithmetic"))


@pytest.mark.parametrize(
    "answer", ["It is 2.\n#### 2", r"#### \frac{1}{2}", r"#### \text{Monday}", "#### (A)", r"so \boxed{x^2}", "2"]
)
def test_final_answers_that_a_verifier_can_use(answer, tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"question": "1?", "answer": answer}])
    (prompt,) = load(DatasetConfig(path=path), BYTES)
    assert verify(answer, prompt.answer) == 1.0


def test_which_answers_are_sound_is_the_rewards_own_question(tmp_path):
    rows = [{"question": "Say hello.", "answer": answer} for answer in ("hello", "good morning")]
    config = DatasetConfig(path=write_jsonl(tmp_path / "a.jsonl", rows))
    assert [prompt.answer for prompt in load_prompts(config, BYTES, lambda answer: None)] == ["hello", "good morning"]
    assert len(load_prompts(config, BYTES, None)) == 2
    with pytest.raises(DatasetError, match=r"row 2 has two words in field 'answer'; write one, or leave that row out"):
        load_prompts(config, BYTES, lambda answer: ("two words", "write one") if " " in answer else None)


def test_answers_that_are_trained_on_have_known_words_too(tmp_path):
    rows = [{"question": "Tom has 3 apples.", "answer": answer} for answer in ("#### 3", "Zebras! #### 3")]
    config = DatasetConfig(path=write_jsonl(tmp_path / "a.jsonl", rows))
    tokenizer = Tokenizer.make("arithmetic")
    assert len(load(config, tokenizer)) == 2
    with pytest.raises(DatasetError, match="row 2 has words in its answer that the tokenizer does not know"):
        load(config, tokenizer, train_on_answers=True)


def test_an_answer_that_is_trained_on_can_be_tokenised(tmp_path, monkeypatch):
    config = DatasetConfig(path=write_jsonl(tmp_path / "a.jsonl", ROWS))
    tokenizer = Tokenizer.make("bytes")
    monkeypatch.setattr(tokenizer, "encode_response", mock.Mock(side_effect=TokenizerError("no word 6")))
    with pytest.raises(DatasetError, match="row 1 cannot be tokenised: no word 6"):
        load(config, tokenizer, train_on_answers=True)


def test_an_unknown_split_of_arithmetic_is_refused():
    with pytest.raises(DatasetError, match="no split dev"):
        load(DatasetConfig(path="arithmetic", split="dev"), Tokenizer.make("arithmetic"))


PROMPTS = [Prompt(i, [i]) for i in range(7)]


def ids(stream, count):
    return [prompt.sample_id for prompt in itertools.islice(stream, count)]


def test_every_pass_gives_each_prompt_once_in_another_order():
    stream = PromptStream(PROMPTS, shuffle=True, seed=1)
    first, second = ids(stream, 14)[:7], ids(stream, 14)[7:]
    assert sorted(first) == sorted(second) == list(range(7))
    assert first != second
    assert ids(PromptStream(PROMPTS, shuffle=True, seed=1), 7) == first


def test_without_shuffling_the_order_is_the_datasets():
    assert ids(PromptStream(PROMPTS, shuffle=False, seed=1), 9) == [0, 1, 2, 3, 4, 5, 6, 0, 1]


def test_a_place_gives_the_prompt_that_was_there_whatever_was_asked_before():
    stream, again = (PromptStream(PROMPTS, shuffle=True, seed=1) for _ in range(2))
    in_order = ids(stream, 30)
    assert [again[place].sample_id for place in reversed(range(30))] == in_order[::-1]


def test_other_prompts_have_another_fingerprint():
    changed = [*PROMPTS[:-1], replace(PROMPTS[-1], answer="another")]
    rows = [replace(prompt, row={"tests": "assert f(1) == 1", "level": 1}) for prompt in PROMPTS]
    other_rows = [*rows[:-1], replace(rows[-1], row={**rows[-1].row, "tests": "assert f(1) == 2"})]
    different = (PROMPTS, PROMPTS[:3], PROMPTS[::-1], changed, rows, other_rows)
    assert len({fingerprints(prompts)[0] for prompts in different}) == len(different)
    assert fingerprints(rows) == fingerprints([replace(each, row=dict(reversed(each.row.items()))) for each in rows])


def test_columns_that_json_does_not_have_do_not_change_a_fingerprint():
    """Their text may have an address in it, which is another one in every process."""
    first, second = ([Prompt(0, [1], row={"q": "x", 3: [object()], "f": lambda: 1})] for _ in range(2))
    assert fingerprints(first) == fingerprints(second)


def test_a_fingerprint_of_earlier_versions_is_still_known():
    with_row = [replace(prompt, row={"level": 1}) for prompt in PROMPTS[:2]]
    assert fingerprints(with_row)[1] == hashlib.sha256(b"([0], '')([1], '')").hexdigest()
