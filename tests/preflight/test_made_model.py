"""The model that a run makes, as the compiler reads it from the YAML, is the one that the run makes."""

from dataclasses import replace

import pytest

from allocation.model_spec import INIT_MODEL, from_config, from_init_model
from areal_like.config.schema import InitModelConfig
from areal_like.demo.init_model import model_config


@pytest.mark.parametrize(
    "section",
    [
        {},
        {"vocab_size": 300, "num_hidden_layers": 5, "tie_word_embeddings": False},
        {"num_experts": 4, "moe_intermediate_size": 64, "num_experts_per_tok": 3},
    ],
    ids=["defaults", "dense", "experts"],
)
def test_the_same_section_is_the_same_model(section):
    read = from_init_model(section, "model")
    made = from_config(model_config(InitModelConfig(**section), "float32"), "model")
    assert read == replace(made, vocab_size=section.get("vocab_size", 0))


def test_defaults_are_the_configurations():
    fields = InitModelConfig.model_fields
    assert {name: fields[name].default for name in INIT_MODEL} == INIT_MODEL
