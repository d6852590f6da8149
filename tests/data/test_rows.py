"""Conversations, other systems' columns, objects of the user's, long prompts, and sets that are mixed."""

import json
from collections import Counter
from itertools import islice

import pyarrow
import pytest
from pyarrow import parquet

from areal_like.core.config.schema import ArithmeticConfig, DatasetConfig, MixtureConfig, TrainDatasetConfig
from areal_like.core.rollout.stream import PromptStream, shares
from areal_like.core.types import Prompt
from areal_like.data.dataset import hinted_tokens, load_prompts
from areal_like.data.rows import DatasetError
from areal_like.data.tokenizer import Tokenizer
from areal_like.rewards.verifiers import REWARDS

BYTES = Tokenizer.make("bytes")
CHECK = REWARDS["gsm8k"].check
MESSAGES = [{"role": "user", "content": "1 + 1?"}]


def text(prompt):
    return BYTES.decode(prompt.tokens)


def rows_file(tmp_path, *rows):
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def test_the_parquet_of_verl_needs_two_keys(tmp_path):
    """verl's documented form (docs/preparation/prepare_data.rst), which siiRL shares."""
    row = {
        "data_source": "openai/gsm8k",
        "prompt": MESSAGES,
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "2"},
        "extra_info": {"split": "train", "index": 0},
    }
    parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / "train.parquet")
    config = DatasetConfig(
        path=str(tmp_path / "train.parquet"), prompt_field="prompt", answer_field="reward_model.ground_truth"
    )
    (prompt,) = load_prompts(config, BYTES, CHECK)
    assert (text(prompt), prompt.answer) == ("user: 1 + 1?\nassistant: ", "2")
    assert prompt.row == row


def test_a_hint_is_a_paragraph_of_the_last_user_message(tmp_path):
    talk = [*MESSAGES, {"role": "assistant", "content": "2"}, {"role": "user", "content": "Sure?"}]
    path = rows_file(tmp_path, {"question": "1?", "answer": "4"}, {"question": talk, "answer": "2"})
    config = DatasetConfig(path=path, prompt_suffix=" Box it.")
    plain, chat = (BYTES.decode(hinted_tokens(config, BYTES, it, "answer")) for it in load_prompts(config, BYTES, None))
    assert plain == "1? Box it.\n\n4"
    assert chat.endswith("user: Sure? Box it.\n\n2\nassistant: ") and "user: 1 + 1?\n" in chat


def test_a_text_becomes_a_conversation_where_something_asks_for_one(tmp_path):
    path = rows_file(tmp_path, {"question": "1?", "own": [{"type": "function"}]}, {"question": "2?", "own": None})
    prompts = load_prompts(
        DatasetConfig(path=path, system_prompt="Be brief.", tools=[{"name": "all"}], tools_field="own"), BYTES, None
    )
    assert text(prompts[0]) == 'tools: [{"type": "function"}]\nsystem: Be brief.\nuser: 1?\nassistant: '
    assert text(prompts[1]).startswith('tools: [{"name": "all"}]\n')


def test_a_suffix_ends_the_prompt_whether_it_is_a_text_or_a_conversation(tmp_path):
    path = rows_file(tmp_path, {"question": "1?"}, {"question": [{"role": "user", "content": "2?"}]})
    plain, talk = load_prompts(DatasetConfig(path=path, prompt_suffix=" Box it."), BYTES, None)
    assert text(plain).startswith("1? Box it.") and text(talk) == "user: 2? Box it.\nassistant: "
    assert talk.messages()[-1]["content"] == "2? Box it." and talk.row["question"][0]["content"] == "2?"


def test_a_rows_own_system_message_stays_and_template_variables_reach_the_template(tmp_path):
    path = rows_file(tmp_path, {"question": [{"role": "system", "content": "Own."}, *MESSAGES]})
    template = "{% for m in messages %}{{ m.content }}|{% endfor %}{{ enable_thinking }}"
    tokenizer = Tokenizer(BYTES.backend, BYTES.eos_token_ids, template)
    config = DatasetConfig(path=path, system_prompt="No.", chat_template_kwargs={"enable_thinking": False})
    assert text(load_prompts(config, tokenizer, None)[0]) == "Own.|1 + 1?|False"


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ([], "no message in field"),
        (["hello"], r"a message without a role \(hello\)"),
        ({"role": "user"}, "neither a text nor a list of messages"),
        ([{"role": "user", "content": 5}], r"a message whose content is neither text nor a list of parts \(5\)"),
        ([{"role": "user", "content": {"type": "text"}}], "a message whose content is neither text nor a list"),
        (
            [{"role": "user", "content": [{"type": "image_url"}]}],
            "a message with image_url, where only text can be trained on",
        ),
    ],
)
def test_what_is_no_conversation_is_told_with_its_row(tmp_path, prompt, words):
    path = rows_file(tmp_path, {"question": "good"}, {"question": prompt})
    with pytest.raises(DatasetError, match=rf"rows\.jsonl, row 2 has {words}"):
        load_prompts(DatasetConfig(path=path), BYTES, None)


def test_a_template_that_refuses_names_the_row(tmp_path):
    path = rows_file(tmp_path, {"question": "good"}, {"question": [{"role": "tool", "content": "5"}]})
    template = "{% if messages[0].role != 'user' %}{{ raise_exception('begin with user') }}{% endif %}x"
    with pytest.raises(DatasetError, match=r"row 2 cannot be tokenised: .*begin with user"):
        load_prompts(DatasetConfig(path=path), Tokenizer(BYTES.backend, BYTES.eos_token_ids, template), None)


def test_answers_are_optional_where_no_verifier_reads_them(tmp_path):
    config = DatasetConfig(path=rows_file(tmp_path, {"question": "1?", "level": 3}))
    (prompt,) = load_prompts(config, BYTES, None)
    assert (prompt.answer, prompt.row["level"]) == ("", 3)
    for more in ({"check_answer": CHECK}, {"check_answer": None, "train_on_answers": True}):
        with pytest.raises(DatasetError, match="row 1 has neither text nor a number in field 'answer'"):
            load_prompts(config, BYTES, **more)


def test_an_answer_may_be_a_number(tmp_path):
    config = DatasetConfig(
        path=rows_file(tmp_path, {"question": "1?", "answer": 42}, {"question": "2?", "answer": 1.5})
    )
    assert [(p.answer, p.row["answer"]) for p in load_prompts(config, BYTES, CHECK)] == [("42", 42), ("1.5", 1.5)]


def test_a_column_of_tools_that_no_row_has_is_refused(tmp_path):
    config = DatasetConfig(path=rows_file(tmp_path, {"question": "1?", "tools": []}), tools_field="tool")
    with pytest.raises(DatasetError, match=r"rows\.jsonl has no row with a value in field 'tool'") as error:
        load_prompts(config, BYTES, None)
    assert error.value.field == "tools_field"


def test_long_prompts_are_refused_dropped_or_keep_their_end(tmp_path):
    path = rows_file(tmp_path, {"question": "123456789"}, {"question": "1?"})
    told = []

    def load(how):
        config = DatasetConfig(path=path, max_prompt_length=5, overlong_prompts=how)
        return [
            (prompt.sample_id, text(prompt))
            for prompt in load_prompts(config, BYTES, None, note=lambda *of: told.append(of))
        ]

    with pytest.raises(DatasetError, match=r"row 1 has 9 tokens.*overlong_prompts to drop or truncate"):
        load("refuse")
    assert load("drop") == [(1, "1?")]
    assert load("truncate") == [(0, "56789"), (1, "1?")]
    assert [field for field, _ in told] == ["overlong_prompts"] * 2
    assert all("1 of 2 rows are too long" in words for _, words in told)


def test_where_all_are_too_long_dropping_refuses_too(tmp_path):
    config = DatasetConfig(path=rows_file(tmp_path, {"question": "123"}), max_prompt_length=2, overlong_prompts="drop")
    with pytest.raises(DatasetError, match="has 3 tokens"):
        load_prompts(config, BYTES, None)


def test_a_row_that_lacks_a_column_is_told_where_own_code_reads_it(tmp_path):
    told = []
    config = DatasetConfig(path=rows_file(tmp_path, {"question": "1?", "level": 1}, {"question": "2?"}))
    assert len(load_prompts(config, BYTES, None, note=lambda *of: told.append(of))) == 2
    ((field, words),) = told
    assert field == "path" and words.endswith("rows.jsonl, row 2 has no field 'level', which row 1 has")


SQUARES = """
class Squares:
    def __len__(self):
        return 3

    def __getitem__(self, index):
        return {"question": f"{index} squared?", "square": index**2}

rows = Squares()
"""


def object_in(tmp_path, code):
    file = tmp_path / "my_data.py"
    file.write_text(code)
    return DatasetConfig(path=f"{file}:rows")


def test_an_object_with_rows_is_a_dataset(tmp_path):
    prompts = load_prompts(object_in(tmp_path, SQUARES), BYTES, None)
    assert [prompt.row["square"] for prompt in prompts] == [0, 1, 4]


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ("iter([{'question': '1?'}])", "row 1 cannot be read: TypeError: object of type 'list_iterator' has no len"),
        ("['text']", "row 1 is str, not a dict of columns"),
        (
            "[{'problem': '1?'}]",
            "row 1 has neither a text nor a list of messages in field 'question'; its fields are problem",
        ),
    ],
)
def test_an_object_without_rows_is_told(tmp_path, rows, words):
    with pytest.raises(DatasetError, match=words):
        load_prompts(object_in(tmp_path, f"rows = {rows}"), BYTES, None)


def test_without_a_tokenizer_rows_are_checked_alone(tmp_path):
    good, bad = ({"question": "1?"}, {"question": " "})
    assert load_prompts(DatasetConfig(path=rows_file(tmp_path, good)), None, None) == []
    with pytest.raises(DatasetError, match="row 2 has nothing in field 'question'"):
        load_prompts(DatasetConfig(path=rows_file(tmp_path, good, bad)), None, None)


def test_a_reference_names_an_object_or_a_function_that_gives_it(tmp_path):
    file = tmp_path / "my_data.py"
    file.write_text("rows = [{'question': '1?'}]\ndef made():\n    return rows * 2\ndef broken():\n    return 1 / 0\n")
    assert len(load_prompts(DatasetConfig(path=f"{file}:rows"), BYTES, None)) == 1
    assert len(load_prompts(DatasetConfig(path=f"{file}:made"), BYTES, None)) == 2
    with pytest.raises(DatasetError, match="line 5: ZeroDivisionError"):
        load_prompts(DatasetConfig(path=f"{file}:broken"), BYTES, None)
    with pytest.raises(DatasetError, match="has no 'other'; it has rows"):
        load_prompts(DatasetConfig(path=f"{file}:other"), BYTES, None)


def mixture(tmp_path, **more):
    further = {"sums": MixtureConfig(path="arithmetic", weight=3.0, arithmetic=ArithmeticConfig(size=10))}
    return TrainDatasetConfig(path=rows_file(tmp_path, *({"question": f"{n}?"} for n in range(30))), mixture=further)


def test_mixed_sets_are_drawn_by_weight_and_places_stay_places(tmp_path):
    config = mixture(tmp_path)
    prompts = load_prompts(config, BYTES, None)
    assert Counter(prompt.dataset for prompt in prompts) == {"": 30, "sums": 10}
    for shuffle in (True, False):
        stream = PromptStream(prompts, shuffle=shuffle, seed=1, weights=config.weights)
        drawn = list(islice(stream, 120))
        assert Counter(prompt.dataset for prompt in drawn) == {"": 30, "sums": 90}
        assert set(Counter(id(prompt) for prompt in drawn).values()) == {1, 9}  # each in whole passes of its own set
        assert [id(stream[place]) for place in (119, 7, 60)] == [id(drawn[place]) for place in (119, 7, 60)]
        first = Counter(prompt.dataset for prompt in drawn[:20])
        assert 9 <= first["sums"] < 20  # no set comes first as a whole
    again = PromptStream(prompts, shuffle=True, seed=2, weights=config.weights)
    assert [id(p) for p in islice(again, 40)] != [id(p) for p in drawn[:40]]


def test_a_fault_in_a_mixed_set_is_under_its_own_key(tmp_path):
    further = {"other": MixtureConfig(path=str(tmp_path / "missing.jsonl"))}
    config = TrainDatasetConfig(path="arithmetic", arithmetic=ArithmeticConfig(size=3), mixture=further)
    with pytest.raises(DatasetError) as caught:
        load_prompts(config, BYTES, None)
    assert caught.value.field == "mixture.other.path"


@pytest.mark.parametrize(
    ("weights", "places", "wanted"),
    [([1, 1], 4, [2, 2]), ([2, 1], 4, [3, 1]), ([1, 1000], 10, [1, 9]), ([1, 1, 1], 7, [3, 2, 2])],
)
def test_shares_add_up_and_no_set_has_none(weights, places, wanted):
    assert shares(weights, places) == wanted
    assert sum(shares(weights, places)) == places and Prompt(0, []).dataset == ""
