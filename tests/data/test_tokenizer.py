import json
import subprocess
import sys

import pytest

from areal_like.core.config.schema import InitModelConfig
from areal_like.data.tokenizer import Tokenizer, TokenizerError
from areal_like.demo.init_model import write_init_model

TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture
def model(tmp_path):
    write_init_model(InitModelConfig(tokenizer="bytes", num_hidden_layers=1), tmp_path, seed=0)
    return tmp_path


def edit(file, **changes):
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_a_plain_prompt_is_the_text_itself(model):
    tokenizer = Tokenizer.load(str(model))
    assert tokenizer.directory == model
    assert tokenizer.decode(tokenizer.encode_prompt("1 + 1 = é?")) == "1 + 1 = é?"


def test_a_response_ends_with_the_end_token(model):
    tokenizer = Tokenizer.load(str(model))
    tokens = tokenizer.encode_response("#### 2")
    assert tokens[-1] == tokenizer.eos_token_ids[0] and tokenizer.decode(tokens) == "#### 2"


def test_a_file_that_cuts_and_pads_texts_does_neither(model):
    backend = Tokenizer.load(str(model)).backend
    backend.enable_truncation(5)
    backend.enable_padding(length=8)
    backend.save(str(model / "tokenizer.json"))
    tokenizer = Tokenizer.load(str(model))
    assert [len(tokenizer.encode("x" * size)) for size in (1, 100)] == [1, 100]


def test_the_chat_template_gives_what_transformers_gives(model):
    edit(model / "tokenizer_config.json", chat_template=TEMPLATE)
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(model)
    messages = [
        {"role": "user", "content": "1 + 1?"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "é"},
    ]
    wanted = theirs.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
    ours = Tokenizer.load(str(model))
    assert ours.encode_chat(messages) == wanted
    assert ours.encode_prompt("é") == theirs.apply_chat_template(
        [{"role": "user", "content": "é"}], add_generation_prompt=True, tokenize=True, return_dict=False
    )


QUESTION = {"role": "user", "content": "Tom has 3 apples and buys 4 more. How many apples does Tom have now?"}


def test_a_model_without_a_template_has_plain_conversations():
    tokenizer = Tokenizer.make("bytes")
    call = {"function": {"name": "add", "arguments": {"a": 1}}}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "1 + 0?"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "1"},
    ]
    text = tokenizer.backend.decode(tokenizer.encode_chat(messages, [{"type": "function"}]), skip_special_tokens=False)
    assert text.splitlines() == [
        'tools: [{"type": "function"}]',
        "system: Be brief.",
        "user: 1 + 0?",
        "assistant: <tool_call>",
        '{"name": "add", "arguments": {"a": 1}}',
        "</tool_call><eos>",
        "tool: 1",
        "assistant: ",
    ]
    with pytest.raises(TokenizerError, match="text only, not image"):
        tokenizer.encode_chat([{"role": "user", "content": [{"type": "image_url"}]}])


def test_the_demo_knows_the_words_of_a_plain_conversation_and_turns_continue_it():
    tokenizer = Tokenizer.make("arithmetic")
    first, response = tokenizer.encode_chat([QUESTION]), tokenizer.encode_response("#### 7")
    second = tokenizer.encode_chat([QUESTION, {"role": "assistant", "content": "#### 7"}, QUESTION])
    assert second[: len(first) + len(response)] == [*first, *response]
    assert tokenizer.unk_token_id not in second


TOOLS = [{"type": "function", "function": {"name": "add", "description": "<sum> & é", "parameters": {"b": 1, "a": 2}}}]


@pytest.mark.parametrize(
    "template",
    [
        "{{ strftime_now('%Y') }}{{ messages[0].content }}",
        "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% break %}{% endfor %}",
        "{% if tools %}{{ tools | tojson(indent=2) }}{% endif %}{{ messages[0].content }}",
        "{{ tools | tojson(separators=(',', ':'), sort_keys=True) }}",
        "{{ 'thinks' if enable_thinking else 'answers' }}{{ documents is none }}{{ add_generation_prompt }}",
        "{{ bos_token }}{{ unk_token }}{{ image_token }}{{ pad_token }}",
    ],
)
def test_templates_have_what_transformers_gives_them(model, template):
    edit(model / "tokenizer_config.json", chat_template=template, image_token="<image>", add_bos_token=True)
    from transformers import AutoTokenizer

    theirs, ours = AutoTokenizer.from_pretrained(model), Tokenizer.load(str(model))
    messages = [{"role": "user", "content": "1 + 1?"}]
    for arguments in ({}, {"tools": TOOLS, "enable_thinking": True}):
        wanted = theirs.apply_chat_template(messages, add_generation_prompt=True, tokenize=False, **arguments)
        assert ours.decode(ours.encode_chat(messages, **arguments)) == ours.decode(ours.encode(wanted))
        assert ours.encode_chat(messages, **arguments) == ours.encode(wanted)


def test_chat_templates_need_no_torch(model):
    (model / "chat_template.jinja").write_text(TEMPLATE)
    code = (
        "import sys; from areal_like.data.tokenizer import Tokenizer; tokenizer = Tokenizer.load(sys.argv[1]);"
        "assert 'transformers' not in sys.modules; assert tokenizer.encode_prompt('1 + 1?');"
        "assert not {'torch', 'transformers.models'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, str(model)], check=True)


def test_a_directory_without_a_tokenizer_is_refused(tmp_path):
    with pytest.raises(TokenizerError, match="no tokenizer"):
        Tokenizer.load(str(tmp_path))


def test_a_template_that_refuses_is_a_tokenizer_error(model):
    edit(model / "tokenizer_config.json", chat_template="{{ raise_exception('no') }}")
    with pytest.raises(TokenizerError, match="no"):
        Tokenizer.load(str(model)).encode_prompt("x")


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("tokenizer.json", '{"version": "1.0", "model": {"typ', "does not describe a tokenizer: EOF"),
        ("tokenizer.json", "{}", "does not describe a tokenizer"),
        ("tokenizer.json", "[]", "does not describe a tokenizer"),
        ("tokenizer_config.json", "[]", "not a JSON object"),
        ("tokenizer.json", '{"model": {"type": "Neural"}}', "does not describe a tokenizer"),
        ("tokenizer_config.json", "{", "not JSON"),
        ("generation_config.json", "{", "not JSON"),
        *(
            (
                file,
                f'{{"eos_token_id": {value}}}',
                rf"{file} has an eos_token_id that tokenizer.json does not contain: {words}",
            )
            for file in ("generation_config.json", "config.json")
            for value, words in [
                ('"</s>"', "'</s>'"),
                ("99999", "99999"),
                ("[5, -1]", "-1"),
                ("true", "True"),
                ("2.5", "2.5"),
            ]
        ),
        ("tokenizer_config.json", '{"eos_token": 5}', "special token that is not text: 5"),
        ("tokenizer_config.json", '{"chat_template": [{"name": "a", "template": "b"}]}', "several chat templates"),
    ],
)
def test_a_torn_file_is_a_tokenizer_error(model, file, content, words):
    (model / file).write_text(content)
    with pytest.raises(TokenizerError, match=words):
        Tokenizer.load(str(model))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": {"type": "WordLevel", "vocab": [1]}}, "expected a map"),
        ({"model": {"type": "BPE", "vocab": {"a": 0}, "merges": [["x", "y"]]}}, "Token `x` out of vocabulary"),
        ({"pre_tokenizer": {"type": "Foo"}}, "did not match any variant"),
        ({"added_tokens": [{"id": "x"}]}, "expected u32"),
        ({"model": {"type": "Unigram", "vocab": [], "unk_id": 7}}, "EmptyVocabulary"),
    ],
)
def test_a_file_that_the_library_refuses_is_a_tokenizer_error(model, changes, words):
    edit(model / "tokenizer.json", **changes)
    with pytest.raises(TokenizerError, match=r"tokenizer\.json does not describe a tokenizer: .*" + words):
        Tokenizer.load(str(model))


def test_a_text_that_the_library_refuses_is_a_tokenizer_error(model):
    edit(model / "tokenizer.json", model={"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "u"})
    tokenizer = Tokenizer.load(str(model))
    for encode in (tokenizer.encode, tokenizer.encode_prompt, tokenizer.encode_response):
        with pytest.raises(TokenizerError, match=r"cannot be tokenised: .*Missing \[UNK\]"):
            encode("b")


def test_a_file_that_is_not_text_is_a_tokenizer_error(model):
    (model / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(TokenizerError, match=r"chat_template.jinja cannot be read"):
        Tokenizer.load(str(model))


def test_a_template_that_is_not_jinja_is_a_tokenizer_error(model):
    (model / "chat_template.jinja").write_text("{% if %}")
    with pytest.raises(TokenizerError, match="not Jinja"):
        Tokenizer.load(str(model)).encode_prompt("x")


@pytest.mark.parametrize("template", ["{{ messages + 1 }}", "{{ 1 / 0 }}", "{{ nothing.at.all }}"])
def test_a_template_that_fails_is_a_tokenizer_error(model, template):
    (model / "chat_template.jinja").write_text(template)
    with pytest.raises(TokenizerError, match="chat template rejects"):
        Tokenizer.load(str(model)).encode_prompt("x")
