"""Tiny models in Hugging Face form, and the processes that train them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import trainer_jobs
from trainer_ranks import Ranks
from transformers import (
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

_SHAPE = {
    "vocab_size": trainer_jobs.VOCABULARY,  # odd, so that tensor parallelism has to pad it
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
    "initializer_range": 0.08,
}


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Directories of a dense model with tied embeddings, one without, a mixture of experts, and one with windows.

    The upper layers of the last see 4 tokens; it has biases, and 6 heads for 3 key heads.
    """
    folder = tmp_path_factory.mktemp("models")
    torch.manual_seed(0)
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
    heads = {"num_attention_heads": 6, "num_key_value_heads": 3}
    window = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 2}
    made = {
        "tied": Qwen3ForCausalLM(Qwen3Config(**_SHAPE, tie_word_embeddings=True)),
        "untied": Qwen3ForCausalLM(Qwen3Config(**_SHAPE, tie_word_embeddings=False)),
        "moe": Qwen3MoeForCausalLM(Qwen3MoeConfig(**_SHAPE, **experts, tie_word_embeddings=False)),
        "sliding": Qwen2ForCausalLM(Qwen2Config(**{**_SHAPE, **heads}, **window)),
    }
    for name, model in made.items():
        with torch.no_grad():
            for parameter_name, parameter in model.named_parameters():
                if "norm" in parameter_name:  # all ones would hide a norm that is left out
                    parameter.uniform_(0.5, 1.5)
                if parameter_name.endswith("bias"):
                    parameter.uniform_(-1, 1)
        model.save_pretrained(folder / name)
        (folder / name / "tokenizer.json").write_text("{}")
    return {name: folder / name for name in made}


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Rank processes, as many as a test asks for."""
    pool = Ranks()
    yield pool
    pool.close()
