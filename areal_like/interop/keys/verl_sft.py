"""Keys of verl's trainer for supervised fine-tuning that its RL trainer does not have, and its defaults."""

from typing import Any

from areal_like.interop.keys import shared
from areal_like.interop.keys.entries import Table, changes, drop, rename, together

SFT: Table = {
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
    "model": shared.SPEED,
    "checkpoint": drop("checkpoints are written to cluster.fileroot"),
    "optim.lr": rename("actor.optimizer.lr"),
    "optim.betas": together("actor.optimizer.beta1 and actor.optimizer.beta2"),
    "optim.weight_decay": rename("actor.optimizer.weight_decay"),
    "optim.lr_warmup_steps_ratio": rename("actor.optimizer.warmup_steps_proportion"),
    "optim.clip_grad": rename("actor.optimizer.gradient_clipping"),
    "optim.lr_scheduler": rename("actor.optimizer.lr_scheduler_type"),
    "optim.lr_scheduler_type": rename("actor.optimizer.lr_scheduler_type"),
    "optim": changes("the optimizer's settings are lr, betas, weight decay, warm-up and schedule"),
    "engine": shared.LAYOUT,
    "ulysses_sequence_parallel_size": shared.LAYOUT,
    "use_remove_padding": drop("sequences are always packed"),
}
DEFAULTS: dict[str, Any] = {
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
