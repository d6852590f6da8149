"""End tokens of the layouts in which tokenizers are published: who names which, and what ends an assistant's turn."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from tokenizers import AddedToken

from areal_like.config.load import load
from areal_like.data.end_tokens import describe_end_tokens
from areal_like.data.tokenizer import Tokenizer, TokenizerError
from areal_like.demo.tokenizers import make_tokenizer
from areal_like.preflight.model import find_model

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if loop.last and m.role == 'assistant' %}<think>\n\n</think>\n\n"
    "{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA_2 = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ bos_token }}[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content }} {{ eos_token }}{% endif %}{% endfor %}"
)
LLAMA_3 = (
    "{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% for m in messages %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{{ m.content | trim }}<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
GLM = (
    "[gMASK]<sop>{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
GPT_OSS = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}"
    "{% if loop.last and not add_generation_prompt %}<|return|>{% else %}<|end|>{% endif %}"
    "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
PHI = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% else %}{{ eos_token }}{% endif %}"
)
VICUNA = (
    "{% for m in messages %}{% if m.role == 'user' %}USER: {{ m.content }} {% else %}ASSISTANT: {{ m.content }}</s>"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)
ALPACA = "{% for m in messages %}### {{ m.role }}:\n{{ m.content }}\n\n{% endfor %}### assistant:\n"


class Layout(NamedTuple):
    """A model's files: end tokens of generation_config.json, config.json and the tokenizer; then what is right."""

    template: str | None
    generation: str | list[str] | None
    config: str | list[str] | None
    own: str | None
    ends: list[str]
    turn_end: str | None
    warned: bool = False


IM_END, TEXT_END = "<|im_end|>", "<|endoftext|>"
LAYOUTS = {
    "qwen": Layout(THINKING, [IM_END, TEXT_END], IM_END, IM_END, [IM_END, TEXT_END], IM_END),
    "qwen base after sft": Layout(CHATML, TEXT_END, TEXT_END, IM_END, [TEXT_END, IM_END], IM_END),
    "smollm2": Layout(CHATML, None, IM_END, IM_END, [IM_END], IM_END),
    "llama 2": Layout(LLAMA_2, "</s>", "</s>", "</s>", ["</s>"], "</s>"),
    "llama 3": Layout(
        LLAMA_3,
        ["<|end_of_text|>", "<|eot_id|>"],
        "<|end_of_text|>",
        "<|eot_id|>",
        ["<|end_of_text|>", "<|eot_id|>"],
        "<|eot_id|>",
    ),
    "llama 3 before its generation config was mended": Layout(
        LLAMA_3, "<|end_of_text|>", "<|end_of_text|>", "<|end_of_text|>", ["<|end_of_text|>"], "<|eot_id|>", warned=True
    ),
    "gemma": Layout(GEMMA, ["<eos>", "<end_of_turn>"], "<eos>", "<eos>", ["<eos>", "<end_of_turn>"], "<end_of_turn>"),
    "gemma base after sft": Layout(
        GEMMA, "<eos>", "<eos>", "<end_of_turn>", ["<eos>", "<end_of_turn>"], "<end_of_turn>"
    ),
    "glm 4": Layout(
        GLM,
        [TEXT_END, "<|user|>", "<|observation|>"],
        [TEXT_END, "<|user|>"],
        TEXT_END,
        [TEXT_END, "<|user|>", "<|observation|>"],
        "<|user|>",
    ),
    "gpt-oss": Layout(
        GPT_OSS,
        ["<|return|>", TEXT_END, "<|call|>"],
        "<|return|>",
        "<|return|>",
        ["<|return|>", TEXT_END, "<|call|>"],
        "<|return|>",
    ),
    "phi": Layout(PHI, [TEXT_END, "<|end|>"], TEXT_END, TEXT_END, [TEXT_END, "<|end|>"], "<|end|>"),
    "phi without a generation config": Layout(PHI, None, TEXT_END, TEXT_END, [TEXT_END], "<|end|>", warned=True),
    "vicuna": Layout(VICUNA, None, None, "</s>", ["</s>"], "</s>"),
    "alpaca": Layout(ALPACA, "<|pad|>", None, "</s>", ["<|pad|>", "</s>"], None),
    "base": Layout(None, TEXT_END, "</s>", "<eos>", [TEXT_END, "</s>", "<eos>"], "<eos>"),
}
SPECIAL = [
    *(IM_END, TEXT_END, "</s>", "<|end_of_text|>", "<|eot_id|>", "<end_of_turn>", "<|user|>", "<|observation|>"),
    *("<|return|>", "<|call|>", "<|end|>", "<|assistant|>", "<|start_header_id|>", "<|end_header_id|>", "<|im_start|>"),
    *("[gMASK]", "<sop>", "<start_of_turn>", "<|start|>", "<|channel|>", "<|message|>", "<|pad|>", "<s>"),
]


def write(layout: Layout, directory: Path, **settings: Any) -> Path:
    """Write the tokenizer of a layout, and the files that name its end tokens."""
    directory.mkdir(exist_ok=True)
    backend = make_tokenizer("bytes")
    backend.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    backend.add_tokens([AddedToken("<think>", special=False), AddedToken("</think>", special=False)])
    backend.add_tokens([AddedToken("\n\n", special=False)])  # runs of blanks, as GPT-NeoX and Phi have them
    backend.save(str(directory / "tokenizer.json"))

    def ids(texts: str | list[str]) -> Any:
        return backend.token_to_id(texts) if isinstance(texts, str) else [backend.token_to_id(text) for text in texts]

    named = {"eos_token": layout.own, "chat_template": layout.template, "bos_token": "<s>", **settings}
    (directory / "tokenizer_config.json").write_text(json.dumps(named))
    for name, texts in (("generation_config.json", layout.generation), ("config.json", layout.config)):
        (directory / name).write_text(json.dumps({} if texts is None else {"eos_token_id": ids(texts)}))
    return directory


def texts_of(tokenizer: Tokenizer, tokens: Any) -> list[str | None]:
    return [tokenizer.backend.id_to_token(token) for token in tokens]


@pytest.mark.parametrize("name", LAYOUTS)
def test_end_tokens_are_those_of_all_files_and_supervised_answers_end_as_the_template_does(tmp_path, name):
    layout = LAYOUTS[name]
    tokenizer = Tokenizer.load(str(write(layout, tmp_path)))
    assert texts_of(tokenizer, tokenizer.eos_token_ids) == layout.ends
    assert texts_of(tokenizer, [tokenizer.turn_end] if tokenizer.turn_end else []) == (
        [layout.turn_end] if layout.turn_end else []
    )
    response = tokenizer.encode_response("42")
    assert texts_of(tokenizer, response[-1:]) == [layout.turn_end or layout.own]
    assert tokenizer.decode(response) == "42"
    if layout.template in (CHATML, LLAMA_3, GEMMA, PHI, VICUNA):  # which render an answer as it is generated
        turn = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "42"}]
        whole = tokenizer.encode_text(tokenizer.render_chat(turn, add_generation_prompt=False))
        prompt = tokenizer.encode_chat(turn[:1])
        spaced = layout.template == VICUNA
        assert whole[: len(prompt) + len(response) + spaced] == [
            *prompt,
            *(tokenizer.encode_text(" ") if spaced else []),
            *response,
        ]


def find(tmp_path: Path, *overrides: str) -> Any:
    file = tmp_path / "run.yaml"
    file.write_text("experiment_name: e\ntrial_name: t\n")
    example = Path(__file__).parents[2] / "examples/math/gsm8k_grpo_cpu.yaml"
    loaded = load(example, [f"tokenizer_path={tmp_path}", "actor.init_model.vocab_size=2000", *overrides])
    return find_model(loaded.config)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_template_that_ends_turns_with_another_token_is_a_warning_whose_fix_helps(tmp_path, name):
    layout = LAYOUTS[name]
    write(layout, tmp_path)
    _, tokenizer, findings = find(tmp_path)
    codes = [each.code for each in findings]
    assert codes == (["RUN-TOKENIZER"] if layout.warned else [])
    if not layout.warned:
        return
    assert findings[0].severity.name == "WARNING" and "gconfig.stop_token_ids=" in findings[0].help
    _, tokenizer, findings = find(tmp_path, f"gconfig.stop_token_ids=[{tokenizer.turn_end}]")
    assert findings == [] and tokenizer.turn_end in tokenizer.eos_token_ids


def test_check_prints_each_end_token_with_its_sources(tmp_path):
    write(LAYOUTS["qwen base after sft"], tmp_path)
    _, tokenizer, _ = find(tmp_path, "gconfig.stop_token_ids=[5]")
    text_end, turn_end = tokenizer.eos_token_ids[:2]
    assert describe_end_tokens(tokenizer.backend, tokenizer.end_tokens) == (
        f"{TEXT_END} ({text_end}; generation_config.json, config.json), {IM_END} ({turn_end}; tokenizer_config.json), "
        f"{tokenizer.backend.id_to_token(5)} (5; gconfig.stop_token_ids)"
    )


def test_a_template_that_rejects_answers_ends_no_turn(tmp_path):
    template = "{% for m in messages %}{{ raise_exception('no') if m.role != 'user' }}{{ m.content }}{% endfor %}"
    tokenizer = Tokenizer.load(str(write(LAYOUTS["alpaca"]._replace(template=template), tmp_path)))
    assert tokenizer.turn_end is None
    assert texts_of(tokenizer, tokenizer.encode_response("4")[-1:]) == ["</s>"]


def test_files_that_name_no_end_token_are_refused(tmp_path):
    layout = Layout(CHATML, [], None, None, [], None)
    with pytest.raises(TokenizerError, match="does not define an end token"):
        Tokenizer.load(str(write(layout, tmp_path)))


TOOL = {"type": "function", "function": {"name": "add"}}


def prompts(tokenizer: Tokenizer) -> tuple[str, str]:
    asked = [{"role": "user", "content": "?"}]
    plain, tools = tokenizer.encode_chat(asked), tokenizer.encode_chat(asked, [TOOL])
    return tokenizer.decode(plain, special=True), tokenizer.decode(tools, special=True)


@pytest.mark.parametrize(
    ("files", "wanted"),
    [
        ({"chat_template.json": "json"}, ("json", "json")),
        ({"chat_template.json": "json", "tokenizer_config.json": "config"}, ("config", "config")),
        ({"chat_template.jinja": "jinja", "chat_template.json": "json"}, ("jinja", "jinja")),
        ({"chat_template.jinja": "jinja", "tokenizer_config.json": "config"}, ("jinja", "jinja")),
        ({"tokenizer_config.json": {"default": "d", "rag": "r"}}, ("d", "d")),
        ({"tokenizer_config.json": {"default": "d", "tool_use": "t"}}, ("d", "t")),
        ({"chat_template.json": {"rag": "r", "default": "d"}}, ("d", "d")),
        ({"chat_template.jinja": "jinja", "additional_chat_templates/tool_use.jinja": "t"}, ("jinja", "t")),
    ],
)
def test_the_template_is_the_one_that_transformers_takes(tmp_path, files, wanted):
    write(LAYOUTS["alpaca"]._replace(template=None), tmp_path)
    for name, content in files.items():
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        if name.endswith("jinja"):
            file.write_text(content)
            continue
        if isinstance(content, dict):
            content = [{"name": each, "template": template} for each, template in content.items()]
        had = json.loads(file.read_text()) if file.is_file() else {}
        file.write_text(json.dumps({**had, "chat_template": content}))
    assert prompts(Tokenizer.load(str(tmp_path))) == wanted
    if "chat_template.json" not in files:  # transformers reads it for processors alone
        from transformers import AutoTokenizer

        (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
        (tmp_path / "tokenizer_config.json").write_text(
            json.dumps(
                {**json.loads((tmp_path / "tokenizer_config.json").read_text()), "tokenizer_class": "TokenizersBackend"}
            )
        )
        theirs = AutoTokenizer.from_pretrained(tmp_path)
        asked = [{"role": "user", "content": "?"}]
        assert wanted == tuple(theirs.apply_chat_template(asked, tools, tokenize=False) for tools in (None, [TOOL]))


def test_several_templates_without_a_default_are_refused(tmp_path):
    templates = [{"name": "rag", "template": "r"}, {"name": "tool_use", "template": "t"}]
    with pytest.raises(TokenizerError, match=r"none is called default.*chat_template\.jinja"):
        Tokenizer.load(str(write(LAYOUTS["alpaca"], tmp_path, chat_template=templates)))
