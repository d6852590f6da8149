"""Entries, reasons and values that several tables share."""

from allocation.convert import megatron
from areal_like.interop.keys.entries import Table, drop

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
