"""Keys of verl's trainers for supervised fine-tuning that its RL trainer does not have, and their defaults.

`fsdp_sft_trainer` takes a prompt and a response per row; `sft_trainer` replaced it and takes messages.
"""

import re
from collections.abc import Mapping
from typing import Any

from areal_like.interop.keys import shared
from areal_like.interop.keys.entries import Table, changes, drop, rename, together

SFT: Table = {
    "data.messages_key": together("train_dataset.prompt_field"),
    "data.ignore_input_ids_mismatch": drop("the workflow tokenizes the messages"),
    "data.num_workers": shared.SPEED,
    "data.response_key": together("train_dataset.answer_field"),
    "data.prompt_dict_keys": together("train_dataset.prompt_field"),
    "data.response_dict_keys": together("train_dataset.answer_field"),
    "data.multiturn": together("train_dataset.prompt_field"),
    "data.max_length": together("gconfig.max_new_tokens"),
    "data.micro_batch_size": drop(shared.PACKED),
    "data.micro_batch_size_per_gpu": drop(shared.PACKED),
    "data.use_dynamic_bsz": drop(shared.PACKED),
    "data.max_token_len_per_gpu": rename("actor.mb_spec.max_tokens_per_mb"),
    "data.pad_mode": drop("sequences are always packed"),
    "data.balance_dp_token": shared.SPEED,
    "model.partial_pretrain": rename("actor.path"),
    "model.path": rename("actor.path"),
    "model.lora_rank": together("actor.use_lora and actor.lora_rank"),
    "model.lora_alpha": together("actor.lora_alpha"),
    "model.target_modules": together("actor.target_modules"),
    "model.strategy": shared.LAYOUT,
    "model.mtp": changes("set actor.megatron.train_mtp_layers to train these layers", False),
    "model": shared.SPEED,
    "checkpoint": drop("checkpoints are written to cluster.fileroot"),
    **shared.optimizer("optim", "actor.optimizer"),
    "optim.lr_scheduler": rename("actor.optimizer.lr_scheduler_type"),
    "optim.init_lr_ratio": changes("warm-up starts at 0", 0, 0.0),
    "optim": changes(
        "the optimizer's settings are lr, betas, weight decay, warm-up and schedule",
        *("fsdp", "megatron", "automodel", "veomni", "torchtitan"),
    ),
    "engine": shared.LAYOUT,
    "ulysses_sequence_parallel_size": shared.LAYOUT,
    "use_remove_padding": drop("sequences are always packed"),
}
_OF_PAIRS: dict[str, Any] = {  # of `fsdp_sft_trainer`
    "data.train_batch_size": 256,
    "data.prompt_key": "question",
    "data.response_key": "answer",
    "data.multiturn.messages_key": "messages",
    "data.max_length": 1024,
    "data.truncation": "error",
    "model.lora_alpha": 16,
    "model.target_modules": "all-linear",
    "optim.lr": 1e-5,
    "optim.betas": [0.9, 0.95],
    "optim.weight_decay": 0.01,
    "optim.lr_warmup_steps_ratio": 0.1,
    "optim.clip_grad": 1.0,
    "optim.lr_scheduler": "cosine",
    "trainer.total_epochs": 4,
}
_OF_MESSAGES: dict[str, Any] = {  # of `sft_trainer`
    "data.train_batch_size": 256,
    "data.messages_key": "messages",
    "data.max_length": 1024,
    "data.truncation": "error",
    "model.lora_alpha": 16,
    "model.target_modules": "all-linear",
    "optim.lr": 1e-3,
    "optim.betas": [0.9, 0.999],
    "optim.weight_decay": 0.01,
    "optim.lr_warmup_steps_ratio": 0.0,
    "optim.clip_grad": 1.0,
    "optim.lr_scheduler_type": "constant",
    "trainer.total_epochs": 4,
}
_OF_AUTOMODEL = {"optim.lr": 1e-5, "optim.lr_scheduler_type": "cosine", "optim.min_lr_ratio": 0.01}


def defaults_of(text: str) -> Mapping[str, Any]:
    """Return the defaults of the trainer that a command starts."""
    if "fsdp_sft_trainer" in text:
        return _OF_PAIRS
    return _OF_MESSAGES | _OF_AUTOMODEL if re.search(r"\boptim=automodel\b", text) else _OF_MESSAGES
