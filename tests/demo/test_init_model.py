import pytest

from areal_like.core.config.schema import InitModelConfig
from areal_like.data.images import as_data_url, decode, draw
from areal_like.data.tokenizer import Tokenizer
from areal_like.demo import arithmetic
from areal_like.demo.init_model import write_init_model

DENSE = InitModelConfig()
SEEING = InitModelConfig(tokenizer="bytes", vision_layers=2)
MOE = InitModelConfig(tokenizer="bytes", vocab_size=300, num_experts=4, tie_word_embeddings=False)


def test_the_arithmetic_tokenizer_knows_every_problem():
    tokenizer = Tokenizer.make("arithmetic")
    assert tokenizer.vocab_size < 60
    for record in arithmetic.generate(500, max_number=999, seed=0, split="train"):
        text = f"{record['question']}{record['answer']}"
        tokens = tokenizer.encode(text)
        assert tokenizer.unk_token_id not in tokens
        assert tokenizer.decode(tokens) == text


def test_arithmetic_answers_are_short():
    tokenizer = Tokenizer.make("arithmetic")
    assert len(tokenizer.encode_response("#### 17")) == 4  # mark, two digits, end


def test_words_outside_the_problems_are_noticed():
    tokenizer = Tokenizer.make("arithmetic")
    assert tokenizer.unk_token_id in tokenizer.encode("Zoe has 3 apples.")


@pytest.mark.parametrize(("shape", "dtype"), [(DENSE, "float32"), (MOE, "bfloat16")], ids=["dense", "moe"])
def test_transformers_loads_the_model_and_its_tokenizer(shape, dtype, tmp_path):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    write_init_model(shape, tmp_path, seed=1, dtype=dtype)
    model, report = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values())  # no key missing, unexpected or of another shape
    assert model.dtype == getattr(torch, dtype)
    assert model.config.rope_parameters["rope_theta"] == 1_000_000.0
    text = "Tom has 12 apples and buys 7 more."
    theirs, ours = AutoTokenizer.from_pretrained(tmp_path), Tokenizer.load(str(tmp_path))
    tokens = ours.encode(text)
    assert theirs(text).input_ids == tokens and theirs.decode(tokens) == text
    assert (theirs.eos_token_id,) == ours.eos_token_ids and theirs.pad_token_id is not None
    logits = model(torch.tensor([tokens])).logits
    assert logits.shape[-1] == (shape.vocab_size or ours.vocab_size) and logits.isfinite().all()
    assert 0.01 < model.get_parameter("model.layers.0.self_attn.q_proj.weight").std() < 0.03


def test_transformers_loads_a_model_that_sees_images_and_expands_prompts_alike(tmp_path):
    import torch
    from transformers import AutoModelForImageTextToText, AutoProcessor

    write_init_model(SEEING, tmp_path, seed=1)
    model, report = AutoModelForImageTextToText.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values())
    images = (draw(64, 64), draw(100, 40))
    content = [{"type": "image_url", "image_url": {"url": as_data_url(image)}} for image in images]
    messages = [{"role": "user", "content": [*content, {"type": "text", "text": "How many?"}]}]
    made, loaded = Tokenizer.make("bytes", images=True), Tokenizer.load(str(tmp_path))
    tokens = made.encode_chat(messages)
    assert tokens == loaded.encode_chat(messages, bos_token="")
    assert made.vocab_size == model.config.text_config.vocab_size
    processor = AutoProcessor.from_pretrained(tmp_path)
    text = made.render_chat(messages)
    given = processor(text=[text], images=[decode(image) for image in images], return_tensors="pt")
    assert given.input_ids[0].tolist() == tokens and tokens.count(model.config.image_token_id) == 4 + 3
    with torch.no_grad():
        seen = model(**given).logits
        blank = model(**{**given, "pixel_values": torch.zeros_like(given["pixel_values"])}).logits
    assert (seen - blank).abs().max() > 1e-3


def test_the_seed_decides_the_weights(tmp_path):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        write_init_model(DENSE, tmp_path / name, seed=seed)
    a, b, c = ((tmp_path / name / "model.safetensors").read_bytes() for name in "abc")
    assert a == b != c
