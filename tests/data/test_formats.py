"""One conversation in several formats: JSONL, Parquet by pyarrow and by the datasets library, and JSON text."""

from __future__ import annotations

import copy
import json
import tempfile
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyarrow import parquet
from vision_models import picture, write_files

from areal_like.core.config.schema import DatasetConfig
from areal_like.data.dataset import load_prompts
from areal_like.data.images import as_data_url
from areal_like.data.rows import DatasetError
from areal_like.data.tokenizer import Tokenizer

BYTES = Tokenizer.make("bytes")
# Writes everything that a message has, as chat templates do, and tells null from missing
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}[{{ m.role }}]"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}"
    "{% if m.reasoning_content is defined %}({{ m.reasoning_content }}){% endif %}"
    "{% if 'tool_call_id' in m %}#{{ m.tool_call_id }}{% endif %}"
    "{% if m.tool_calls is defined %}{{ m.tool_calls | tojson }}{% endif %}{% endfor %}"
)
PLAIN = Tokenizer(BYTES.backend, BYTES.eos_token_ids, TEMPLATE)


def write_jsonl(rows: list[dict[str, Any]], folder: Path) -> Any:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / "rows.jsonl"


def write_pyarrow(rows: list[dict[str, Any]], folder: Path) -> Any:
    parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "pyarrow.parquet")
    return folder / "pyarrow.parquet"


def write_datasets(rows: list[dict[str, Any]], folder: Path) -> Any:
    datasets.Dataset.from_list(rows).to_parquet(folder / "datasets.parquet")
    return folder / "datasets.parquet"


def write_json_columns(rows: list[dict[str, Any]], folder: Path) -> Any:
    """Write columns of mixed types as the datasets library does: as JSON."""
    mixed = [*rows, {**rows[0], "question": [{"role": "user", "tool_calls": 5}], "tools": [{"function": "text"}]}]
    table = datasets.Dataset.from_list(mixed, on_mixed_types="use_json")
    table.select(range(len(rows))).to_parquet(folder / "json.parquet")
    return folder / "json.parquet"


def write_texts(rows: list[dict[str, Any]], folder: Path) -> Any:
    texts = [{**row, "question": json.dumps(row["question"]), "tools": json.dumps(row.get("tools"))} for row in rows]
    return write_pyarrow(texts, folder)


WRITERS = {
    "pyarrow": write_pyarrow,
    "datasets": write_datasets,
    "json columns": write_json_columns,
    "json text": write_texts,
}


def tokens_of(path: Any, tokenizer: Tokenizer = PLAIN, **keys: Any) -> list[list[int]]:
    config = DatasetConfig(path=str(path), tools_field="tools", max_prompt_length=10**6, **keys)
    return [list(prompt.tokens) for prompt in load_prompts(config, tokenizer, None)]


# A key has one type in all rows, and keys have one order, as in any table: that of the first row, which has all keys.
LEAVES = {
    "text": st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=5),
    "count": st.integers(-5, 5),
    "flag": st.booleans(),
    "words": st.lists(st.text("ab", max_size=2), max_size=2),
    "gaps": st.lists(st.none() | st.integers(0, 3), max_size=3),
}


def objects(depth: int) -> st.SearchStrategy[dict[str, Any]]:
    """Return objects with some of the keys, in one order."""
    optional = dict(LEAVES)
    if depth:
        optional["inner"] = objects(depth - 1)
        optional["several"] = st.lists(objects(depth - 1), max_size=2)
    # an object without any key in any row is a column that Parquet does not have
    return st.fixed_dictionaries({"always": st.just(1)}, optional=optional).map(
        lambda made: {name: made[name] for name in ("always", *optional) if name in made}
    )


ORDER = ("type", "properties", "required", "default")
SCHEMAS = st.fixed_dictionaries(
    {"type": st.just("object"), "properties": objects(1)},
    optional={"required": st.just(["a"]), "default": LEAVES["text"]},
).map(lambda made: {name: made[name] for name in ORDER if name in made})
TOOLS = st.builds(
    lambda name, schema: {"type": "function", "function": {"name": name, "parameters": schema}},
    st.sampled_from(["find", "add"]),
    SCHEMAS,
)
CALLS = st.builds(
    lambda name, arguments: {"type": "function", "function": {"name": name, "arguments": arguments}},
    st.sampled_from(["find", "add"]),
    objects(3),
)
TURNS = st.one_of(
    st.fixed_dictionaries(
        {"role": st.just("assistant"), "content": LEAVES["text"], "tool_calls": st.lists(CALLS, min_size=1, max_size=2)}
    ),
    st.fixed_dictionaries({"role": st.just("assistant"), "tool_calls": st.lists(CALLS, min_size=1, max_size=1)}),
    st.fixed_dictionaries(
        {"role": st.just("assistant"), "content": LEAVES["text"], "reasoning_content": LEAVES["text"]}
    ),
    st.fixed_dictionaries({"role": st.just("tool"), "content": LEAVES["text"], "tool_call_id": st.just("1")}),
    st.fixed_dictionaries({"role": st.just("user"), "content": LEAVES["text"]}),
)


def every_key(depth: int) -> dict[str, Any]:
    """Return an object of `objects` with all keys."""
    made: dict[str, Any] = {"always": 1, "text": "é", "count": 2, "flag": True, "words": ["a"], "gaps": [None, 1]}
    inner = every_key(depth - 1) if depth else {}
    return {**made, "inner": inner, "several": [inner]} if depth else made


SCHEMA = {"type": "object", "properties": every_key(1), "required": ["a"], "default": ""}
CALL = {"type": "function", "function": {"name": "find", "arguments": every_key(3)}}
FULL = {
    "question": [
        {"role": "assistant", "content": "", "tool_calls": [CALL], "reasoning_content": "?", "tool_call_id": "1"},
        {"role": "user", "content": "So?"},
    ],
    "answer": "4",
    "tools": [{"type": "function", "function": {"name": "find", "parameters": SCHEMA}}],
}


@st.composite
def rows(draw: Any) -> dict[str, Any]:
    system = draw(st.lists(st.just({"role": "system", "content": "Be brief."}), max_size=1))
    turns = draw(st.lists(TURNS, max_size=4))
    last = {"role": "user", "content": "So?"}
    made = {"question": [*system, *turns, last], "answer": "4"}
    tools = draw(st.none() | st.lists(TOOLS, min_size=1, max_size=2))
    return made if tools is None else {**made, "tools": tools}


@settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(rows(), min_size=1, max_size=4))
def test_every_format_of_a_conversation_has_the_same_tokens(made):
    made = [FULL, *({**row, "tools": row.get("tools")} for row in made)]
    with tempfile.TemporaryDirectory() as folder:
        wanted = tokens_of(write_jsonl(made, Path(folder)))
        for name, write in WRITERS.items():
            assert tokens_of(write(copy.deepcopy(made), Path(folder))) == wanted, name


CALC = {"x": {"type": "string"}}
FIND = {"query": {"type": "string"}, "limit": {"type": "integer", "default": 3}}


def tool_row(name: str, arguments: dict[str, Any], properties: dict[str, Any]) -> dict[str, Any]:
    call = {"id": "1", "type": "function", "function": {"name": name, "arguments": arguments}}
    talk = [
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "4", "tool_call_id": "1"},
        {"role": "user", "content": "So?"},
    ]
    schema = {"type": "object", "properties": properties, "required": [next(iter(properties))]}
    tool = {"type": "function", "function": {"name": name, "description": "d", "parameters": schema}}
    return {"question": talk, "tools": [tool], "answer": "4"}


TOOL_ROWS = [tool_row("calc", {"x": "2+2"}, CALC), tool_row("find", {"query": "a", "limit": 3}, FIND)]


@pytest.mark.parametrize("name", WRITERS)
def test_tools_and_calls_have_no_keys_of_other_rows(tmp_path, name):
    path = WRITERS[name](TOOL_ROWS, tmp_path)
    assert tokens_of(path) == tokens_of(write_jsonl(TOOL_ROWS, tmp_path))
    assert "null" not in PLAIN.decode(tokens_of(path)[0])
    config = DatasetConfig(path=str(path), tools_field="tools")
    if name in ("pyarrow", "datasets"):  # agents and rewards read the same rows
        assert [prompt.row for prompt in load_prompts(config, PLAIN, None)] == TOOL_ROWS


def test_objects_and_hub_datasets_of_the_datasets_library_have_no_keys_of_other_rows(tmp_path, monkeypatch):
    wanted = tokens_of(write_jsonl(TOOL_ROWS, tmp_path))
    (tmp_path / "my_rows.py").write_text(
        f"import json, datasets\nrows = datasets.Dataset.from_list({TOOL_ROWS!r})\n"
        f"mixed = datasets.Dataset.from_list({TOOL_ROWS!r} + [{{'tools': 'x'}}], on_mixed_types='use_json')"
        ".select(range(2))\n"
    )
    assert tokens_of(f"{tmp_path}/my_rows.py:rows") == wanted
    assert tokens_of(f"{tmp_path}/my_rows.py:mixed") == wanted
    monkeypatch.setattr(datasets, "load_dataset", lambda *names, split: datasets.Dataset.from_list(TOOL_ROWS))
    assert tokens_of("owner/tools") == wanted


def test_the_same_images_and_messages_in_every_format(tmp_path):
    tokenizer = Tokenizer.load(str(write_files("qwen2_5_vl", tmp_path / "model")))
    image = picture(60, 40)
    (tmp_path / "one.png").write_bytes(image)
    parts = [{"type": "text", "text": "What is "}, {"type": "image"}, {"type": "text", "text": "?"}]
    url = {"type": "image_url", "image_url": {"url": as_data_url(image)}}
    talks = [
        [{"role": "system", "content": [{"type": "text", "text": "Brief."}]}, {"role": "user", "content": parts}],
        [{"role": "user", "content": [url, {"type": "text", "text": "?"}]}],
        [{"role": "user", "content": [{"type": "text", "text": "No picture."}]}],
    ]
    made = [{"question": talk, "images": ["one.png"] if talk is talks[0] else [], "tools": None} for talk in talks]
    made[0]["tools"] = [{"type": "function", "function": {"name": "add"}}]
    wanted = tokens_of(write_jsonl(made, tmp_path), tokenizer)
    for write in WRITERS.values():
        assert tokens_of(write(copy.deepcopy(made), tmp_path), tokenizer) == wanted
    binary = copy.deepcopy(made)
    for row in binary:
        row["images"] = [{"bytes": image, "path": None} for _ in row["images"]]
    assert tokens_of(write_pyarrow(binary, tmp_path), tokenizer) == wanted
    assert tokens_of(write_datasets(binary, tmp_path), tokenizer) == wanted


def test_maps_are_objects(tmp_path):
    arguments = pyarrow.map_(pyarrow.string(), pyarrow.string())
    function = pyarrow.struct({"name": pyarrow.string(), "arguments": arguments})
    call = pyarrow.struct({"function": function})
    message = pyarrow.struct({"role": pyarrow.string(), "content": pyarrow.string(), "tool_calls": pyarrow.list_(call)})
    talk = [{"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": {"a": "1", "b": "2"}}}]}]
    talk.append({"role": "user", "content": "So?"})
    as_map = copy.deepcopy(talk)
    as_map[0]["tool_calls"][0]["function"]["arguments"] = [("a", "1"), ("b", "2")]
    table = pyarrow.table({"question": pyarrow.array([as_map], pyarrow.list_(message)), "tools": [[json.dumps(TOOL)]]})
    parquet.write_table(table, tmp_path / "maps.parquet")
    assert tokens_of(tmp_path / "maps.parquet") == tokens_of(
        write_jsonl([{"question": talk, "tools": [TOOL]}], tmp_path)
    )


TOOL = {"type": "function", "function": {"name": "add", "parameters": {"properties": {"a": {"default": None}}}}}


def test_nulls_of_the_author_stay_in_json_and_are_reported_where_they_may_be_another_rows(tmp_path):
    row = tool_row("calc", {"x": None}, CALC)
    row["question"][0] |= {"tool_calls": None, "name": None}  # of OpenAI's format: missing keys
    row["tools"][0]["function"]["strict"] = None
    noted: list[tuple[str, str]] = []
    config = DatasetConfig(path=str(write_jsonl([TOOL_ROWS[1], row], tmp_path)), tools_field="tools")
    second = load_prompts(config, PLAIN, None, note=lambda *note: noted.append(note))[1]
    text = PLAIN.decode(second.tokens)
    assert '"arguments": {"x": null}' in text and text.count("null") == 1
    ((field, words),) = noted
    assert field == "tools_field" and "row 2" in words
    assert tokens_of(write_texts([TOOL_ROWS[1], row], tmp_path))[1] == list(second.tokens)
    noted.clear()
    tools = DatasetConfig(path=str(write_jsonl([{"question": "1?", "tools": [TOOL]}], tmp_path)), tools_field="tools")
    (prompt,) = load_prompts(tools, PLAIN, None, note=lambda *note: noted.append(note))
    assert '"default": null' in PLAIN.decode(prompt.tokens) and noted == []


def test_arguments_as_text_are_objects_unless_they_are_not_json(tmp_path):
    asked = tool_row("calc", {"x": "2+2"}, CALC)
    text = copy.deepcopy(asked)
    text["question"][1]["tool_calls"][0]["function"]["arguments"] = '{"x": "2+2"}'
    broken = copy.deepcopy(asked)
    broken["question"][1]["tool_calls"][0]["function"]["arguments"] = '{"x": '
    first, second, third = tokens_of(write_jsonl([asked, text, broken], tmp_path))
    assert first == second != third and r"{\"x\": " in PLAIN.decode(third)


def test_a_message_without_content_is_empty(tmp_path):
    ask = {"role": "user", "content": "?"}
    row = tool_row("calc", {"x": "1"}, CALC)
    made = []
    for content in ({"content": ""}, {"content": None}, {}):
        answer = {"role": "assistant", "tool_calls": row["question"][1]["tool_calls"], **content}
        made.append({**row, "question": [answer, ask]})
    first, *others = tokens_of(write_jsonl(made, tmp_path))
    assert others == [first, first] and "None" not in PLAIN.decode(first)


@pytest.mark.parametrize(
    ("tools", "words"), [("{", "Expecting"), ([5], "a tool is int"), ("[[1]]", "a tool is list"), (7, "not iterable")]
)
def test_tools_that_are_not_schemas_are_refused(tmp_path, tools, words):
    with pytest.raises(DatasetError, match=rf"row 1 cannot be tokenised: .*{words}"):
        tokens_of(write_jsonl([{"question": "1?", "tools": tools}], tmp_path))


TALK = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2?"}]
LATER = [*TALK, {"role": "assistant", "content": "4"}, {"role": "user", "content": "Sure?"}]


@pytest.mark.parametrize("talk", [TALK, LATER])
@pytest.mark.parametrize("indent", [None, 2])
def test_a_prompt_that_is_json_text_of_messages_is_a_conversation(tmp_path, talk, indent):
    rows = [{"question": talk}, {"question": json.dumps(talk, indent=indent)}]
    path = write_jsonl([{**row, "tools": []} for row in rows], tmp_path)
    first, second = load_prompts(DatasetConfig(path=str(path), prompt_suffix="!"), PLAIN, None)
    assert first.tokens == second.tokens and first.messages() == second.messages()


@pytest.mark.parametrize(
    "text",
    [
        str(TALK),  # as Python prints it
        "[{'role': 'user', 'content': '1?'}\n {'role': 'user', 'content': '2?'}]",  # as NumPy does
        json.dumps(TALK)[:-9],
        json.dumps({"messages": TALK}),
        json.dumps(TALK[1]),
        json.dumps(json.dumps(TALK)),
        json.dumps([TALK]),
    ],
)
def test_text_that_looks_like_messages_and_is_not_a_list_of_them_is_refused(tmp_path, text):
    with pytest.raises(DatasetError) as caught:
        load_prompts(DatasetConfig(path=str(write_jsonl([{"question": text}], tmp_path))), PLAIN, None)
    assert caught.value.code == "RUN-DATASET-ROW" and "json.dumps" in caught.value.remedy


@pytest.mark.parametrize(
    "text",
    [
        json.dumps(TALK) + "\nIs this request valid?",
        "Is this valid? " + json.dumps(TALK),
        '[{"role": "admin", "name": "A"}]',
        "[1, 2, 3]",
        "{x | x > 2} and [0, 1]",
        "[asy] draw((0,0)); [/asy]",
    ],
)
def test_text_about_json_stays_text(tmp_path, text):
    (prompt,) = load_prompts(DatasetConfig(path=str(write_jsonl([{"question": text}], tmp_path))), PLAIN, None)
    assert PLAIN.decode(prompt.tokens) == f"[user]{text}"


SOLVED = [*TALK, {"role": "assistant", "content": "It is 4."}]
STARTED = [*TALK, {"role": "assistant", "content": [{"type": "text", "text": "It is"}]}]
CHAT = Tokenizer(
    BYTES.backend,
    BYTES.eos_token_ids,
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}"
    "{% if add_generation_prompt %}<assistant><think>{% endif %}",
)


def prompts(folder: Path, talk: Any, tokenizer: Tokenizer = CHAT, **keys: Any) -> list[Any]:
    path = write_jsonl([{"question": talk}], folder)
    return load_prompts(DatasetConfig(path=str(path), **keys), tokenizer, None)


@pytest.mark.parametrize("tokenizer", [CHAT, None])
@pytest.mark.parametrize("talk", [SOLVED, STARTED, json.dumps(SOLVED)])
def test_a_last_message_of_the_assistant_is_refused_without_a_key(tmp_path, talk, tokenizer):
    with pytest.raises(DatasetError) as caught:
        prompts(tmp_path, talk, tokenizer)
    assert (caught.value.code, caught.value.field) == ("RUN-DATASET-ROW", "last_assistant")
    assert "last_assistant=drop" in caught.value.remedy and "last_assistant=continue" in caught.value.remedy


def test_a_last_message_of_the_assistant_is_dropped_or_continued(tmp_path):
    start = "<system>Be brief.</><user>2+2?!</><assistant><think>"
    more = {"prompt_suffix": "!", "tools": [{"type": "function"}]}
    (dropped,) = prompts(tmp_path, [*SOLVED, {"role": "assistant", "content": "!"}], last_assistant="drop", **more)
    assert CHAT.decode(dropped.tokens) == start and dropped.messages()[-1]["role"] == "user"
    (continued,) = prompts(tmp_path, STARTED, last_assistant="continue", **more)
    assert CHAT.decode(continued.tokens) == start + "It is"
    (plain,) = prompts(tmp_path, STARTED, BYTES, last_assistant="continue")
    assert BYTES.decode(plain.tokens) == "system: Be brief.\nuser: 2+2?\nassistant: It is"
    for how in ("continue", "drop"):  # nothing else changes
        (prompt,) = prompts(tmp_path, TALK, last_assistant=how)
        assert CHAT.decode(prompt.tokens) == "<system>Be brief.</><user>2+2?</><assistant><think>"


@pytest.mark.parametrize(
    ("last", "how"),
    [
        ({"content": "", "tool_calls": [{"function": {"name": "add", "arguments": {}}}]}, "continue"),
        ({"content": "4", "reasoning_content": "2+2"}, "continue"),
        (None, "drop"),
    ],
)
def test_what_cannot_be_continued_or_dropped_is_refused(tmp_path, last, how):
    talk = [{"role": "assistant", "content": "Hi"}] if last is None else [*TALK, {"role": "assistant", **last}]
    with pytest.raises(DatasetError) as caught:
        prompts(tmp_path, talk, last_assistant=how)
    assert caught.value.code in ("RUN-DATASET-ROW", "RUN-DATASET-ROW") and caught.value.remedy
