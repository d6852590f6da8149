"""Vision towers against those that transformers builds without memory, and what those keep for the backward pass."""

from dataclasses import replace

import pytest

import allocation
from allocation.memory.fsdp import trainer
from allocation.memory.megatron import phases_of_stage
from allocation.memory.servers import server_weights
from allocation.model_spec import ModelError, from_config
from allocation.parameters import total_parameters
from allocation.settings import BatchSpec, MemorySettings, Workload
from allocation.vision import read_tower

TEXT = {
    "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 96, "vocab_size": 200, "head_dim": 16, "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip
SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64, "depth": 3}
TOWERS = {
    "qwen2_5_vl": [SMALL | {"fullatt_block_indexes": [1]}, {}, {"hidden_size": 1280, "out_hidden_size": 64}],
    "qwen3_vl": [SMALL | {"num_position_embeddings": 64, "deepstack_visual_indexes": [0, 2]}, {}],
    "qwen3_vl_moe": [SMALL | {"num_position_embeddings": 64, "deepstack_visual_indexes": [0, 2]}],
    "qwen3_5": [SMALL | {"num_position_embeddings": 64}, {}],
    "gemma3": [
        {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "image_size": 56, "patch_size": 14,
         "num_attention_heads": 2, "vision_use_head": False},
        {"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "patch_size": 14, "image_size": 896},
        {},
    ],
}  # fmt: skip
EACH = [(family, vision) for family, visions in TOWERS.items() for vision in visions]


def config_of(family, vision):
    text = {"model_type": {"gemma3": "gemma3_text"}.get(family, f"{family}_text"), **TEXT}
    if family == "qwen2_5_vl":
        del text["head_dim"]
    if family == "qwen3_5":
        text |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
    if family == "qwen3_vl_moe":
        text |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    tied = family == "gemma3"
    ids = {} if tied else {"image_token_id": 5, "video_token_id": 6}
    return {"model_type": family, "text_config": text, "vision_config": vision, "tie_word_embeddings": tied, **ids}


def built(config, **arguments):
    from transformers import AutoConfig, AutoModelForImageTextToText

    return AutoModelForImageTextToText.from_config(AutoConfig.for_model(**config), **arguments)


@pytest.mark.parametrize(("family", "vision"), EACH)
def test_parameters_are_those_of_transformers(family, vision):
    import torch

    config = config_of(family, vision)
    with torch.device("meta"):
        model = built(config)
    language = sum(parameter.numel() for parameter in model.model.language_model.parameters())
    head = 0 if config["tie_word_embeddings"] else model.lm_head.weight.numel()
    total = sum(parameter.numel() for parameter in model.parameters())
    spec = from_config(config)
    assert spec.tower.parameters == total - language - head
    assert total_parameters(spec) == total


def test_a_published_qwen2_5_vl_has_the_fields_of_its_text_beside_the_vision_config():
    nested = config_of("qwen2_5_vl", TOWERS["qwen2_5_vl"][0])
    flat = {**nested.pop("text_config"), **nested}
    spec = from_config(flat)
    assert spec == from_config(config_of("qwen2_5_vl", TOWERS["qwen2_5_vl"][0]))
    assert total_parameters(spec) == sum(parameter.numel() for parameter in built(flat).parameters())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "qwen3_5"])
def test_activations_are_what_autograd_keeps_of_the_tower(family, dtype):
    import torch

    config = config_of(family, TOWERS[family][0] | {"hidden_size": 64, "intermediate_size": 128, "depth": 6})
    tower = built(config, dtype=getattr(torch, dtype), attn_implementation="sdpa").model.visual
    grid = torch.tensor([[1, 16, 24]])
    pixels = torch.randn(16 * 24, read_tower(config).pixels, dtype=tower.dtype)
    weights, kept = {parameter.untyped_storage().data_ptr() for parameter in tower.parameters()}, {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage  # which stays alive, so that no other takes its address
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        tower(pixels, grid)
    found = sum(storage.nbytes() for storage in kept.values())
    expected = read_tower(config).activations(16 * 24 // 4, tower.dtype.itemsize)
    assert found == pytest.approx(expected, rel=0.1)


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"depth": "many"}, "vision_config.depth must be a whole number below 10,000,000, not 'many'"),
        ({"hidden_size": None}, "vision_config.hidden_size"),
        ({"patch_size": -1}, "vision_config.patch_size"),
        ({"deepstack_visual_indexes": 3}, "vision_config.deepstack_visual_indexes must be a list, not 3"),
        ([], "vision_config must be an object"),
    ],
)
def test_a_tower_with_odd_fields_is_refused(wrong, field):
    with pytest.raises(ModelError, match=field):
        from_config({**config_of("qwen3_vl", {}), "vision_config": wrong})


@pytest.mark.parametrize("frozen", [False, True])
def test_an_fsdp_trainer_has_the_tower_and_what_it_keeps_of_the_images(frozen):
    spec = from_config(config_of("qwen3_vl", TOWERS["qwen3_vl"][0]))
    layout = allocation.check("fsdp:d2").plan.engines[0].sizes
    batch = BatchSpec(8, max_length=64, max_tokens_per_mb=1024, image_share=0.5)
    of_text = Workload(replace(spec, tower=None), batch=batch)
    whole = Workload(spec, batch=batch, memory=MemorySettings(tower_trained=not frozen))

    def bytes_of(work, phase):
        return {item.name: item.bytes for item in trainer("actor", layout, work).phase(phase).items}

    text, seeing = bytes_of(of_text, "forward and backward"), bytes_of(whole, "forward and backward")
    own = -(-spec.tower.parameters // 2)
    assert seeing["Adam's moments"] - text["Adam's moments"] == pytest.approx(0 if frozen else 8 * own, abs=16)
    weights = [sum(size for name, size in items.items() if name.startswith("weights")) for items in (seeing, text)]
    assert weights[0] - weights[1] == pytest.approx(4 * own, abs=16)
    assert seeing["activations of images"] == spec.tower.activations(512, 2, trained=not frozen) > 0
    assert "activations of images" not in text


@pytest.mark.parametrize("frozen", [False, True])
def test_the_first_stage_of_a_megatron_trainer_has_the_tower_on_every_tensor_parallel_rank(frozen):
    spec = from_config(config_of("qwen3_vl", TOWERS["qwen3_vl"][0]))
    layout = allocation.check("megatron:t2p2").plan.engines[0].sizes
    batch = BatchSpec(64, max_length=64, max_tokens_per_mb=1024, image_share=0.5)
    memory = MemorySettings(tower_trained=not frozen)

    def bytes_of(model, stage):
        work, chunks = Workload(model, batch=batch, memory=memory), [[range(2)], [range(2, 3)]]
        (phase,) = (
            each
            for each in phases_of_stage(layout, work, chunks[stage], stage, trains=True)
            if each.name == "forward and backward"
        )
        return {item.name: item.bytes for item in phase.items}

    of_text = replace(spec, tower=None)
    assert bytes_of(spec, 1) == bytes_of(of_text, 1)
    text, seeing, own = bytes_of(of_text, 0), bytes_of(spec, 0), spec.tower.parameters
    assert seeing["weights"] - text["weights"] == 2 * own
    for name, each in (("gradients (float32)", 4), ("main weights (float32)", 4), ("Adam's moments", 8)):
        assert seeing[name] - text[name] == (0 if frozen else each * own)
    in_flight = 1 if frozen else 2
    assert seeing["activations of images"] == in_flight * spec.tower.activations(512, 2, trained=not frozen)


def test_a_server_has_the_tower_on_each_gpu():
    spec = from_config(config_of("qwen3_vl", TOWERS["qwen3_vl"][0]))
    (engine,) = allocation.check("sglang:t2").plan.engines
    assert server_weights(spec, engine.sizes) - server_weights(replace(spec, tower=None), engine.sizes) == (
        -(-spec.tower.parameters // 2)
    )
