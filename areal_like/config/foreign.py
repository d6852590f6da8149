"""Keys of other systems' configurations: what they are here, why they are not needed, or why they are not offered.

One table per system, read by `areal_like/migrate.py` and by the message about an unknown key. A dotted key covers all
keys below it that have no entry of their own. Where the schema has no key of the name in `ours`, it is not offered yet.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Entry:
    """Exactly one of them is set: the key here, why the key is not needed, or why its meaning is not offered."""

    ours: str | None = None
    unneeded: str | None = None
    lost: str | None = None


Table = dict[str, Entry]


def _to(key: str) -> Entry:
    return Entry(ours=key)


def _un(why: str) -> Entry:
    return Entry(unneeded=why)


def _lost(why: str) -> Entry:
    return Entry(lost=why)


_LAYOUT = _un("the layout says it (allocation_mode, or actor.backend and rollout.backend)")
_DDP = ("overlap_grad_reduce", "overlap_param_gather", "use_distributed_optimizer")
_NOWHERE = "it has no counterpart that a run needs"
_PACKED = "micro-batches are packed up to mb_spec.max_tokens_per_mb"
_REPORT = _un("console, TensorBoard and a report are written (stats_logger)")
_CHECKED = "write a sequence classifier as reward.model.path and .backend, with reward.type=model"

_TRANSFORMER = (
    *("recompute_granularity", "recompute_method", "recompute_num_layers", "recompute_modules"),
    *("moe_token_dispatcher_type", "moe_grouped_gemm", "moe_layer_recompute"),
)
_MEGATRON: Table = {
    **dict.fromkeys(
        (
            "tensor_model_parallel_size",
            "pipeline_model_parallel_size",
            "virtual_pipeline_model_parallel_size",
            "context_parallel_size",
            "expert_model_parallel_size",
            "expert_tensor_parallel_size",
        ),
        _LAYOUT,
    ),
    "sequence_parallel": _un("it is on whenever tensor parallelism is"),
}


def _verl() -> Table:
    """verl's `trainer/config/`, which siiRL and Trinity-RFT took over."""
    t: Table = {}
    for role, ours in (("actor_rollout_ref.actor", "actor"), ("actor_rollout_ref.ref", "ref"), ("critic", "critic")):
        t |= {f"{role}.megatron.{k}": e for k, e in _MEGATRON.items()}
        t[f"{role}.megatron.use_distributed_optimizer"] = (
            _to(f"{ours}.megatron.use_distributed_optimizer") if ours != "ref" else _un("a reference has no optimizer")
        )
        for k in ("param_offload", "grad_offload", "optimizer_offload"):
            t[f"{role}.megatron.{k}"] = _to(f"{ours}.megatron.{k}")
        for k in _TRANSFORMER:
            t[f"{role}.megatron.override_transformer_config.{k}"] = _to(f"{ours}.megatron.{k}")
        for k in ("overlap_grad_reduce", "overlap_param_gather"):
            t[f"{role}.megatron.override_ddp_config.{k}"] = _to(f"{ours}.megatron.{k}")
        t[f"{role}.megatron.override_transformer_config"] = _to(f"{ours}.megatron.override_transformer_config")
        t[f"{role}.megatron.use_mbridge"] = _un("weights always go through a bridge (actor.megatron.bridge_type)")
        for k in ("use_dist_checkpointing", "dist_checkpointing_path"):
            t[f"{role}.megatron.{k}"] = _to(f"{ours}.megatron.{k}")
        t[f"{role}.megatron.param_dtype"] = _to(f"{ours}.dtype")
        t[f"{role}.strategy"] = _LAYOUT
        t[f"{role}.fsdp_config"] = _lost("the trainer is Megatron; a layout takes FSDP's place")
        t[f"{role}.ulysses_sequence_parallel_size"] = _LAYOUT
        t[f"{role}.use_dynamic_bsz"] = _un("sequences are always packed")
        for k in (
            "ppo_micro_batch_size_per_gpu",
            "ppo_micro_batch_size",
            "log_prob_micro_batch_size_per_gpu",
            "log_prob_micro_batch_size",
            "log_prob_use_dynamic_bsz",
            "log_prob_max_token_len_per_gpu",
        ):
            t[f"{role}.{k}"] = _un(_PACKED)
        t[f"{role}.ppo_max_token_len_per_gpu"] = _to(f"{ours}.mb_spec.max_tokens_per_mb")
    a = "actor_rollout_ref.actor"
    t |= {
        f"{a}.ppo_mini_batch_size": _to("actor.ppo_n_minibatches"),
        f"{a}.optim.lr": _to("actor.optimizer.lr"),
        f"{a}.optim.weight_decay": _to("actor.optimizer.weight_decay"),
        f"{a}.optim.lr_warmup_steps": _to("actor.optimizer.warmup_steps"),
        f"{a}.optim.clip_grad": _to("actor.optimizer.gradient_clipping"),
        f"{a}.optim.lr_decay_style": _to("actor.optimizer.lr_scheduler_type"),
        f"{a}.grad_clip": _to("actor.optimizer.gradient_clipping"),
        f"{a}.clip_ratio": _to("actor.eps_clip"),
        f"{a}.clip_ratio_low": _to("actor.eps_clip"),
        f"{a}.clip_ratio_high": _to("actor.eps_clip_higher"),
        f"{a}.use_kl_loss": _un("kl_loss_coef says it"),
        f"{a}.kl_loss_coef": _to("actor.kl_loss_coef"),
        f"{a}.kl_loss_type": _to("actor.kl_estimator"),
        f"{a}.entropy_coeff": _to("actor.entropy_coeff"),
        f"{a}.ppo_epochs": _lost("every sample is trained on once"),
        f"{a}.loss_agg_mode": _lost("actor.loss_agg_mode is token_mean, sequence_mean or constant"),
        "actor_rollout_ref.model.path": _to("actor.path"),
        "actor_rollout_ref.model.enable_gradient_checkpointing": _to("actor.megatron.recompute_granularity"),
        "actor_rollout_ref.model.use_remove_padding": _un("sequences are always packed"),
        "actor_rollout_ref.model.use_fused_kernels": _un("the fused kernels are always on"),
        "actor_rollout_ref.model.trust_remote_code": _lost("no code of a model is run"),
        "actor_rollout_ref.hybrid_engine": _un("the layout says which GPUs are shared"),
        "actor_rollout_ref.rollout.n": _to("gconfig.n_samples"),
        "actor_rollout_ref.rollout.temperature": _to("gconfig.temperature"),
        "actor_rollout_ref.rollout.top_p": _to("gconfig.top_p"),
        "actor_rollout_ref.rollout.gpu_memory_utilization": _to("sglang.mem_fraction_static"),
        "actor_rollout_ref.rollout.max_num_seqs": _to("sglang.max_running_requests"),
        "actor_rollout_ref.rollout.max_model_len": _to("sglang.context_length"),
        **{
            f"actor_rollout_ref.rollout.{k}": _LAYOUT
            for k in (
                "name",
                "tensor_model_parallel_size",
                "data_parallel_size",
                "pipeline_model_parallel_size",
                "expert_parallel_size",
                "mode",
            )
        },
        "actor_rollout_ref.rollout": _un("SGLang decides it; sglang.extra_args takes the server's own options"),
        "data.train_files": _to("train_dataset.path"),
        "data.val_files": _to("valid_dataset.path"),
        "data.train_batch_size": _to("train_dataset.batch_size"),
        "data.max_prompt_length": _to("train_dataset.max_prompt_length"),
        "data.max_response_length": _to("gconfig.max_new_tokens"),
        "data.shuffle": _to("train_dataset.shuffle"),
        "data.prompt_key": _to("train_dataset.prompt_field"),
        "data.filter_overlong_prompts": _un("prompts beyond max_prompt_length are always left out"),
        "data.truncation": _un("no prompt is cut"),
        "data.val_batch_size": _un("evaluation takes all prompts at once"),
        "data": _un(_NOWHERE),
        "trainer.n_gpus_per_node": _to("cluster.n_gpus_per_node"),
        "trainer.nnodes": _to("cluster.n_nodes"),
        "trainer.experiment_name": _to("experiment_name"),
        "trainer.project_name": _un("experiment_name names the run"),
        "trainer.total_epochs": _to("total_train_epochs"),
        "trainer.total_training_steps": _to("total_train_steps"),
        "trainer.save_freq": _to("saver.freq_steps"),
        "trainer.test_freq": _to("evaluator.freq_steps"),
        "trainer.val_before_train": _to("evaluator.at_start"),
        "trainer.default_local_dir": _to("cluster.fileroot"),
        "trainer.logger": _REPORT,
        "trainer.resume_mode": _to("recover.mode"),
        "trainer.max_actor_ckpt_to_keep": _to("recover.keep"),
        "trainer.critic_warmup": _lost("where there is a critic, write critic.warmup_steps"),
        "trainer": _un(_NOWHERE),
        "algorithm.adv_estimator": _to("algorithm"),
        "algorithm.use_kl_in_reward": _un("kl_ctrl.kl_coef says it"),
        "algorithm.kl_ctrl.kl_coef": _to("actor.kl_ctl"),
        "algorithm.gamma": _to("actor.discount"),
        "algorithm.lam": _to("actor.gae_lambda"),
        "algorithm": _lost("the algorithm does without it"),
        "reward_model": _lost(_CHECKED),
        "custom_reward_function.path": _lost("name the function as reward.function=FILE.py:NAME; its arguments differ"),
        "custom_reward_function": _lost("name the function as reward.function=FILE.py:NAME; its arguments differ"),
        "model_engine": _LAYOUT,
        "critic": _lost("what a critic has of its own is in the section critic"),
        "actor_rollout_ref": _lost("it has no counterpart"),
        "ray_init": _un("scheduler.address names an existing cluster"),
    }
    return t


VERL = _verl()
SIIRL = {**VERL, "trainer.trainer_strategy": _LAYOUT}
TRINITY: Table = {
    "project": _un("experiment_name names the run"),
    "name": _to("experiment_name"),
    "mode": _un("trainer and rollout always run side by side"),
    "checkpoint_root_dir": _to("cluster.fileroot"),
    "algorithm.algorithm_type": _to("algorithm"),
    "algorithm.repeat_times": _to("gconfig.n_samples"),
    "algorithm.optimizer.lr": _to("actor.optimizer.lr"),
    "algorithm": _lost("the algorithm does without it"),
    "model.model_path": _to("actor.path"),
    "model.max_response_tokens": _to("gconfig.max_new_tokens"),
    "model.max_prompt_tokens": _to("train_dataset.max_prompt_length"),
    "model.max_model_len": _to("sglang.context_length"),
    "cluster.node_num": _to("cluster.n_nodes"),
    "cluster.gpu_per_node": _to("cluster.n_gpus_per_node"),
    "buffer.total_epochs": _to("total_train_epochs"),
    "buffer.total_steps": _to("total_train_steps"),
    "buffer.batch_size": _to("train_dataset.batch_size"),
    "buffer.explorer_input.taskset.path": _to("train_dataset.path"),
    "buffer.explorer_input.taskset.split": _to("train_dataset.split"),
    "buffer.explorer_input.taskset.subset_name": _to("train_dataset.name"),
    "buffer.explorer_input.taskset.format.prompt_key": _to("train_dataset.prompt_field"),
    "buffer.explorer_input.taskset.format.response_key": _to("train_dataset.answer_field"),
    "buffer.explorer_input.taskset.rollout_args.temperature": _to("gconfig.temperature"),
    "buffer": _un("groups go straight from rollout to the trainer"),
    "explorer.eval_interval": _to("evaluator.freq_steps"),
    "explorer.rollout_model": _LAYOUT,
    "explorer": _un("the collector decides it"),
    "synchronizer.sync_interval": _un("weights are sent after every step"),
    "synchronizer.sync_offset": _to("rollout.max_head_offpolicyness"),
    "synchronizer": _un("weights are sent after every step"),
    "trainer.save_interval": _to("saver.freq_steps"),
    "trainer.trainer_type": _LAYOUT,
    "trainer.max_token_len_per_gpu": _to("actor.mb_spec.max_tokens_per_mb"),
    "trainer.grad_clip": _to("actor.optimizer.gradient_clipping"),
    **{f"trainer.trainer_config.{k}": e for k, e in VERL.items() if k.startswith(("actor_rollout_ref", "critic"))},
    **{k: e for k, e in VERL.items() if k.startswith(("actor_rollout_ref", "critic"))},
    "trainer": _un(_NOWHERE),
    "monitor": _REPORT,
    "data_processor": _lost("prepare the data before the run"),
    "service": _lost("prepare the data before the run"),
}
ROLL: Table = {
    "exp_name": _to("experiment_name"),
    "seed": _to("seed"),
    "logging_dir": _un("logs are below cluster.fileroot"),
    "output_dir": _to("cluster.fileroot"),
    "num_gpus_per_node": _to("cluster.n_gpus_per_node"),
    "max_steps": _to("total_train_steps"),
    "save_steps": _to("saver.freq_steps"),
    "eval_steps": _to("evaluator.freq_steps"),
    "pretrain": _to("actor.path"),
    "reward_pretrain": _lost(_CHECKED),
    "rollout_batch_size": _to("train_dataset.batch_size"),
    "prompt_length": _to("train_dataset.max_prompt_length"),
    "response_length": _to("gconfig.max_new_tokens"),
    "num_return_sequences_in_group": _to("gconfig.n_samples"),
    "async_generation_ratio": _to("rollout.max_head_offpolicyness"),
    "adv_estimator": _to("algorithm"),
    "ppo_epochs": _lost("every sample is trained on once"),
    "pg_clip": _to("actor.eps_clip"),
    "init_kl_coef": _to("actor.kl_ctl"),
    "kl_loss_coef": _to("actor.kl_loss_coef"),
    "gamma": _to("actor.discount"),
    "lambd": _to("actor.gae_lambda"),
    "actor_train.model_args.dtype": _un("actor.dtype is bfloat16 unless set"),
    "actor_train.training_args.learning_rate": _to("actor.optimizer.lr"),
    "actor_train.training_args.weight_decay": _to("actor.optimizer.weight_decay"),
    "actor_train.training_args.warmup_steps": _to("actor.optimizer.warmup_steps"),
    "actor_train.training_args.per_device_train_batch_size": _un(_PACKED),
    "actor_train.training_args.gradient_accumulation_steps": _un(_PACKED),
    "actor_train.data_args.file_name": _to("train_dataset.path"),
    "actor_train.data_args.prompt": _to("train_dataset.prompt_field"),
    "actor_train.strategy_args.strategy_config.use_distributed_optimizer": _to(
        "actor.megatron.use_distributed_optimizer"
    ),
    **{
        f"actor_train.strategy_args.strategy_config.{k}": _to(f"actor.megatron.{k}")
        for k in (*_TRANSFORMER, "overlap_grad_reduce", "overlap_param_gather")
    },
    **{f"actor_train.strategy_args.strategy_config.{k}": e for k, e in _MEGATRON.items()},
    "actor_train.strategy_args.strategy_config": _lost("name it in actor.megatron.override_transformer_config"),
    "actor_train.strategy_args": _LAYOUT,
    "actor_train.device_mapping": _LAYOUT,
    "actor_train.infer_batch_size": _un("log-probs are computed on packed micro-batches"),
    "actor_infer.generating_args.temperature": _to("gconfig.temperature"),
    "actor_infer.generating_args.top_p": _to("gconfig.top_p"),
    "actor_infer.generating_args.max_new_tokens": _to("gconfig.max_new_tokens"),
    "actor_infer.generating_args.num_return_sequences": _to("gconfig.n_samples"),
    "actor_infer.strategy_args.strategy_config.mem_fraction_static": _to("sglang.mem_fraction_static"),
    "actor_infer.strategy_args.strategy_config.gpu_memory_utilization": _to("sglang.mem_fraction_static"),
    "actor_infer": _LAYOUT,
    "reference": _LAYOUT,
    "critic.device_mapping": _LAYOUT,
    "critic": _lost("what a critic has of its own is in the section critic"),
    "rewards": _lost("name the reward as reward.type or reward.function"),
    "validation.data_args.file_name": _to("valid_dataset.path"),
    "validation": _un("the evaluator takes all prompts"),
    "track_with": _REPORT,
    "checkpoint_config": _un("checkpoints are below cluster.fileroot"),
    "system_envs": _to("actor.env_vars"),
    "defaults": _lost("only this file was read"),
    "hydra": _un("there is no Hydra here"),
}
SLIME: Table = {
    "hf-checkpoint": _to("actor.path"),
    "ref-load": _to("ref.path"),
    "load": _un("a start is made from Hugging Face weights"),
    "save": _to("cluster.fileroot"),
    "save-interval": _to("saver.freq_steps"),
    "prompt-data": _to("train_dataset.path"),
    "input-key": _to("train_dataset.prompt_field"),
    "label-key": _to("train_dataset.answer_field"),
    "apply-chat-template": _un("the tokenizer's template is applied"),
    "rollout-shuffle": _to("train_dataset.shuffle"),
    "rm-type": _lost("name the reward as reward.type or reward.function"),
    "num-rollout": _to("total_train_steps"),
    "num-epoch": _to("total_train_epochs"),
    "rollout-batch-size": _to("train_dataset.batch_size"),
    "n-samples-per-prompt": _to("gconfig.n_samples"),
    "rollout-max-response-len": _to("gconfig.max_new_tokens"),
    "rollout-max-prompt-len": _to("train_dataset.max_prompt_length"),
    "rollout-temperature": _to("gconfig.temperature"),
    "rollout-top-p": _to("gconfig.top_p"),
    "num-steps-per-rollout": _to("actor.ppo_n_minibatches"),
    "eval-interval": _to("evaluator.freq_steps"),
    "n-samples-per-eval-prompt": _to("evaluator.n_samples"),
    "eval-max-response-len": _to("evaluator.max_new_tokens"),
    **{k.replace("_", "-"): e for k, e in _MEGATRON.items()},
    **{
        k.replace("_", "-"): _to(f"actor.megatron.{k}")
        for k in (*_TRANSFORMER, "overlap_grad_reduce", "overlap_param_gather", "use_precision_aware_optimizer")
    },
    "use-dynamic-batch-size": _un("sequences are always packed"),
    "max-tokens-per-gpu": _to("actor.mb_spec.max_tokens_per_mb"),
    "advantage-estimator": _to("algorithm"),
    "use-kl-loss": _un("kl-loss-coef says it"),
    "kl-loss-coef": _to("actor.kl_loss_coef"),
    "kl-loss-type": _to("actor.kl_estimator"),
    "entropy-coef": _to("actor.entropy_coeff"),
    "eps-clip": _to("actor.eps_clip"),
    "eps-clip-high": _to("actor.eps_clip_higher"),
    "optimizer": _un("it is Adam"),
    "lr": _to("actor.optimizer.lr"),
    "lr-decay-style": _to("actor.optimizer.lr_scheduler_type"),
    "weight-decay": _to("actor.optimizer.weight_decay"),
    "adam-beta1": _to("actor.optimizer.beta1"),
    "adam-beta2": _to("actor.optimizer.beta2"),
    "clip-grad": _to("actor.optimizer.gradient_clipping"),
    "sglang-mem-fraction-static": _to("sglang.mem_fraction_static"),
    "actor-num-nodes": _LAYOUT,
    "actor-num-gpus-per-node": _LAYOUT,
    "rollout-num-gpus": _LAYOUT,
    "rollout-num-gpus-per-engine": _LAYOUT,
    "colocate": _LAYOUT,
    "attention-dropout": _un("it is 0"),
    "hidden-dropout": _un("it is 0"),
    "accumulate-allreduce-grads-in-fp32": _un("it is on"),
    "attention-softmax-in-fp32": _un("it is on"),
    "attention-backend": _un("Transformer Engine chooses it"),
    "global-batch-size": _un("a step trains on all of its samples"),
}
AREAL: Table = {
    "async_training": _un("training is asynchronous; rollout.max_head_offpolicyness=0 makes it synchronous"),
    "rollout.experiment_name": _un("the run's own counts"),
    "rollout.trial_name": _un("the run's own counts"),
    "rollout.consumer_batch_size": _un("train_dataset.batch_size says it"),
    "rollout.queue_size": _un("the collector needs none"),
    "rollout.enable_rollout_tracing": _un("the report shows it"),
    "rollout.setup_timeout": _to("rollout.startup_timeout_s"),
    "rollout.request_timeout": _to("rollout.request_timeout_s"),
    "gconfig.greedy": _lost("temperature 0 says it"),
    "gconfig.min_new_tokens": _lost("a response ends where the model ends it"),
    "gconfig.top_k": _lost("samples are drawn from all words, or from top_p of them"),
    "gconfig.max_tokens": _un("the context is as long as a run needs"),
    "actor.experiment_name": _un("the run's own counts"),
    "actor.trial_name": _un("the run's own counts"),
    "actor.init_from_scratch": _lost("actor.init_model makes a model with random weights"),
    "actor.disable_dropout": _un("there is no dropout"),
    "actor.gradient_checkpointing": _to("actor.megatron.recompute_granularity"),
    "actor.optimizer.warmup_steps_proportion": _lost("write actor.optimizer.warmup_steps"),
    "actor.optimizer.offload": _to("actor.megatron.optimizer_offload"),
    **{f"actor.megatron.ddp.{k}": _to(f"actor.megatron.{k}") for k in _DDP},
    "actor.megatron.ddp": _un("gradients are reduced in float32, in buckets of Megatron's size"),
    "actor.megatron.fp8_config": _lost("actor.megatron.override_transformer_config takes Megatron's fp8 options"),
    **{
        f"actor.megatron.{k}": _to(f"actor.megatron.override_transformer_config.{k}")
        for k in ("distribute_saved_activations", "moe_router_dtype", "moe_shared_expert_overlap", "moe_permute_fusion")
    },
    "actor.megatron.virtual_pipeline_parallel_size": _LAYOUT,
    "actor.scheduling_spec.env_vars": _to("actor.env_vars"),
    "actor.weight_update_mode": _to("weight_update.mode"),
    "actor.group_size": _un("gconfig.n_samples says it"),
    "actor.temperature": _un("gconfig.temperature says it"),
    "actor.use_decoupled_loss": _un("it is on"),
    "actor.recompute_logprob": _un("log-probs are computed where a batch was generated with older weights"),
    "actor.pack": _un("sequences are always packed"),
    "actor.scheduling_spec": _un("the layout says the GPUs"),
    "actor.max_new_tokens": _un("gconfig.max_new_tokens says it"),
    "ref.experiment_name": _un("the run's own counts"),
    "ref.trial_name": _un("the run's own counts"),
    "sglang.model_path": _un("it is the actor's"),
    "sglang.random_seed": _un("it follows from seed"),
    "sglang.skip_tokenizer_init": _un("it is on"),
    "sglang.dtype": _un("it is the actor's"),
    "sglang.context_length": _to("sglang.context_length"),
    "vllm": _lost("servers are SGLang's"),
    "train_dataset.pin_memory": _un("it has no effect"),
    "train_dataset.type": _lost("train_dataset.path says what is read"),
    "train_dataset.max_length": _to("train_dataset.max_prompt_length"),
    "valid_dataset.batch_size": _un("evaluation takes all prompts"),
    "valid_dataset.pin_memory": _un("it has no effect"),
    "valid_dataset.type": _un("valid_dataset.path says it"),
    "checkpointer": _un("saver says it"),
    "saver": _un(_NOWHERE),
    "recover": _un(_NOWHERE),
    "evaluator": _un(_NOWHERE),
    "stats_logger": _un("stats_logger has switches of its own"),
    "launcher": _un("scheduler starts the run"),
    "cluster.name_resolve": _un("there is no such service"),
    "cluster.cluster_name": _un("Ray knows it"),
    "perf_tracer": _un("the report shows it"),
    "enable_offload": _lost("write rollout.sharing=alternate where trainer and servers share GPUs"),
    "total_train_n_seqs": _lost("write total_train_steps"),
    "server_only": _lost("a run has a trainer"),
}


TABLES = {"areal": AREAL, "verl": VERL, "siirl": SIIRL, "trinity": TRINITY, "roll": ROLL, "slime": SLIME}


def entry(system: str, key: str) -> Entry | None:
    """What `key` of `system` is here: its own entry, or that of the nearest section above it."""
    table = TABLES[system]
    while key not in table and "." in key:
        key = key.rpartition(".")[0]
    return table.get(key)


def known_elsewhere(key: str) -> tuple[str, str | None] | None:
    """What another system's key is here, in a sentence, and our key; also by its last part, where all systems agree."""
    names = {"siirl": "siiRL", "roll": "ROLL", "trinity": "Trinity-RFT", "areal": "AReaL"}
    for system, table in TABLES.items():
        if found := table.get(key):
            return f"{names.get(system, system)}'s key: {_words(found)}", found.ours
    last = key.rpartition(".")[2]
    same = {found for table in TABLES.values() for name, found in table.items() if name.rpartition(".")[2] == last}
    return (_words(found), found.ours) if len(same) == 1 and (found := same.pop()) else None


def _words(found: Entry) -> str:
    if found.ours:
        return f"write {found.ours} instead"
    return f"leave it out: {found.unneeded}" if found.unneeded else f"not offered: {found.lost}"
