"""Entries, reasons and values that several tables share."""

from allocation.convert import megatron
from areal_like.interop.keys.entries import Table, changes, drop, rename, together

LAYOUT = drop("the layout defines it (allocation_mode, or actor.backend and rollout.backend)")
DDP = ("overlap_grad_reduce", "overlap_param_gather", "use_distributed_optimizer")
PACKED = "micro-batches are packed up to mb_spec.max_tokens_per_mb; their size does not change the gradient"
REPORT = drop("console, TensorBoard and a report are written (stats_logger)")
HELD_OUT = drop("set evaluation prompts in valid_dataset, or several sets in evaluator.datasets")
VIDEO = "video and audio are not supported"
NO_ALGORITHM = "this algorithm is not built in: write a function and set algorithm=my_file.py:make (docs/algorithms.md)"
PATTERN = "samples are drawn from the full distribution, which SGLang's log-probs describe"
TRAINERS_ROUTES = "only the servers' routes are replayed (rollout.router_replay=auto), not the trainer's own"
REPLAYED = {"True": "auto", "False": "off"}
ALL_WORDS = {"100000000": -1, "0": -1}  # values of top_k that set no limit
NEVER = {"-1": None, "0": None}
MODEL = drop("the model's config.json defines it")
SPEED = drop("it changes speed or memory, not training")
LORA_MODULES = {  # Megatron's linear layers
    "linear_qkv": ["q_proj", "k_proj", "v_proj"],
    "linear_proj": ["o_proj"],
    "linear_fc1": ["gate_proj", "up_proj"],
    "linear_fc2": ["down_proj"],
}
ESTIMATORS = {"kl": "k1", "low_var_kl": "k3", "mse": "k2", "kl+": "k1", "low_var_kl+": "k3", "k3+": "k3"}
SCHEDULES = {"cosine_with_min_lr": "cosine", "constant_with_warmup": "constant"}

TRANSFORMER = (
    *("recompute_granularity", "recompute_method", "recompute_num_layers", "recompute_modules"),
    *("moe_token_dispatcher_type", "moe_grouped_gemm", "moe_layer_recompute"),
)
MEGATRON: Table = {
    **dict.fromkeys(megatron.MEGATRON.values(), LAYOUT),
    "sequence_parallel": drop("sequence parallelism is on whenever tensor parallelism is"),
}
SYNONYMS = {  # of other libraries, such as TRL
    "learning_rate": "actor.optimizer.lr",
    "batch_size": "train_dataset.batch_size",
    "num_train_epochs": "total_train_epochs",
    "num_epochs": "total_train_epochs",
    "max_steps": "total_train_steps",
    "num_generations": "gconfig.n_samples",
    "group_size": "gconfig.n_samples",
    "max_completion_length": "gconfig.max_new_tokens",
    "max_tokens": "gconfig.max_new_tokens",
    "model_name_or_path": "actor.path",
    "model_path": "actor.path",
    "warmup_ratio": "actor.optimizer.warmup_steps_proportion",
    "max_grad_norm": "actor.optimizer.gradient_clipping",
    "clip_range": "actor.eps_clip",
    "entropy_coef": "actor.entropy_coeff",
    "kl_coef": "actor.kl_ctl",
    "output_dir": "cluster.fileroot",
    "save_steps": "saver.freq_steps",
    "eval_steps": "evaluator.freq_steps",
    "resume_from_checkpoint": "recover.mode",
}


def optimizer(role: str, ours: str) -> Table:
    """Return the keys of verl's optimizer in section `role`, mapped to our section."""
    return {
        f"{role}.lr": rename(f"{ours}.lr"),
        f"{role}.weight_decay": rename(f"{ours}.weight_decay"),
        f"{role}.clip_grad": rename(f"{ours}.gradient_clipping"),
        f"{role}.lr_warmup_steps": rename(f"{ours}.warmup_steps", NEVER),
        f"{role}.lr_warmup_steps_ratio": together(f"{ours}.warmup_steps_proportion"),
        f"{role}.lr_decay_style": rename(f"{ours}.lr_scheduler_type", SCHEDULES),
        f"{role}.lr_scheduler_type": rename(f"{ours}.lr_scheduler_type", SCHEDULES),
        f"{role}.warmup_style": rename(f"{ours}.lr_scheduler_type", SCHEDULES),
        f"{role}.min_lr_ratio": rename(f"{ours}.min_lr_ratio"),
        f"{role}.min_lr": together(f"{ours}.min_lr_ratio"),
        f"{role}.betas": together(f"{ours}.beta1 and {ours}.beta2"),
        f"{role}.eps": rename(f"{ours}.eps"),
        f"{role}.optimizer": changes("the only optimizer is Adam", "adam", "AdamW", "adamw", "Adam"),
        f"{role}.optimizer_impl": SPEED,
        f"{role}.num_cycles": changes("a cosine schedule has no restarts", 0.5),
        f"{role}.lr_warmup_init": changes("warm-up starts at 0", 0, 0.0),
        f"{role}.lr_decay_steps": changes("the learning rate decays over the whole run"),
        f"{role}.total_training_steps": drop("the run's number of steps is used"),
        f"{role}.override_optimizer_config.use_precision_aware_optimizer": rename(
            f"{ours.partition('.')[0]}.megatron.use_precision_aware_optimizer"
        ),
        f"{role}.override_optimizer_config": SPEED,
    }
