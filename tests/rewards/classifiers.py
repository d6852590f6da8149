"""Tiny sequence classifiers in Hugging Face form, and transformers' opinion of texts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from areal_like.core.config.schema import InitModelConfig
from areal_like.demo.init_model import write_init_model


def classifier(directory: Path, family: str = "Qwen3", labels: int = 1) -> Path:
    """A random classifier with a tokenizer of bytes, padding token included."""
    import torch
    import transformers

    write_init_model(
        InitModelConfig(tokenizer="bytes", hidden_size=64, num_hidden_layers=1), directory, seed=0, dtype="float32"
    )
    (directory / "model.safetensors").unlink()
    vocabulary = transformers.AutoConfig.from_pretrained(directory).vocab_size
    torch.manual_seed(3)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    more = {"num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256, "pad_token_id": 0}
    config = getattr(transformers, f"{family}Config")(vocab_size=vocabulary, num_labels=labels, **sizes, **more)
    model = getattr(transformers, f"{family}ForSequenceClassification")(config)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(0, 0.12)  # far enough from 0 to tell texts apart
    model.save_pretrained(directory)
    return directory


def scores(directory: Path, conversations: Sequence[Sequence[dict[str, Any]]]) -> list[float]:
    """What transformers gives, each text alone, in the template that lies beside the model."""
    import torch
    from transformers import AutoModelForSequenceClassification

    from areal_like.data.tokenizer import Tokenizer

    own = Tokenizer.load(str(directory))
    model = AutoModelForSequenceClassification.from_pretrained(directory, dtype=torch.float32)
    texts = [own.encode_chat(conversation, add_generation_prompt=False) for conversation in conversations]
    with torch.no_grad():
        return [model(torch.tensor([text])).logits.item() for text in texts]
