"""AReaL's keys, except keys with the same name here, and its defaults."""

from typing import Any

from areal_like.interop.keys import shared
from areal_like.interop.keys.entries import Table, changes, drop, rename, together

_OWN = drop("the run's value is used")
_TRAINER = ("actor", "critic", "ref")

AREAL: Table = {
    "async_training": drop("training is asynchronous; rollout.max_head_offpolicyness=0 makes it synchronous"),
    "dynamic_bs": together("actor.dynamic_sampling"),
    "workflow": together("workflow"),
    "eval_workflow": drop("set valid_dataset.workflow for evaluation"),
    "teacher": changes("write algorithm=distill and a section teacher by hand"),
    "teacher.path": changes("the teacher is served by SGLang here: set teacher.path by hand, and algorithm=distill"),
    "teacher.backend": changes(
        "the teacher is served by SGLang here: set teacher.backend by hand, and algorithm=distill"
    ),
    "teacher.dtype": changes("the teacher is served by SGLang here: set teacher.dtype by hand, and algorithm=distill"),
    "total_train_n_seqs": changes("write total_train_steps"),
    "server_only": changes("a run always has a trainer", False),
    "enable_offload": together("rollout.sharing"),
    "rollout.experiment_name": _OWN,
    "rollout.trial_name": _OWN,
    "rollout.fileroot": _OWN,
    "rollout.tokenizer_path": drop("the run's tokenizer is used"),
    "rollout.consumer_batch_size": drop("use train_dataset.batch_size"),
    "rollout.queue_size": drop("the collector has no queue"),
    "rollout.max_concurrent_rollouts": together("rollout.max_concurrent_rollouts"),
    "rollout.enable_rollout_tracing": drop("the report always includes it"),
    "rollout.dump_to_file": drop("stats_logger.samples stores samples"),
    "rollout.check_trajectory_format": drop("trajectories are always checked"),
    "rollout.scheduling_spec": drop("servers inherit the run's environment"),
    "rollout.use_lora": drop("use actor.use_lora"),
    "rollout.return_routed_experts": rename("rollout.router_replay", shared.REPLAYED),
    "actor.megatron.enable_router_replay": drop("use rollout.router_replay"),
    "rollout.request_retries": shared.SPEED,
    "rollout.pause_grace_period": shared.SPEED,
    "rollout.routing_strategy": shared.SPEED,
    "rollout.poll_interval": shared.SPEED,
    "rollout._version": shared.SPEED,
    "rollout.model": drop("the actor's value is used"),
    "rollout.admin_api_key": drop("ports are open only with episode.endpoint"),
    "rollout.setup_timeout": rename("rollout.startup_timeout_s"),
    "rollout.request_timeout": rename("rollout.request_timeout_s"),
    "rollout.agent.tool_call_parser": together("episode.tool_call_parser"),
    "rollout.agent.turn_discount": rename("actor.turn_discount"),
    "rollout.agent.export_style": drop("trajectories are trained with all their turns"),
    "rollout.agent.session_timeout_seconds": rename("episode.timeout_s"),
    "rollout.agent.engine_max_tokens": rename("episode.max_tokens"),
    "rollout.agent.agent_cls_path": together("workflow"),
    "rollout.agent.mode": together("workflow"),
    "rollout.agent": drop("set the limits of a workflow in episode"),
    "gconfig.greedy": changes("responses are always sampled; set evaluator.temperature=0 for greedy evaluation", False),
    "gconfig.min_new_tokens": changes("only the model's end-of-text token ends a response", 0),
    "gconfig.top_k": rename("gconfig.top_k", shared.ALL_WORDS),
    "gconfig.top_p": rename("gconfig.top_p"),
    "gconfig.max_tokens": drop("the context length follows from prompt and response"),
    "gconfig.stop": changes("only the model's end-of-text token ends a response", []),
    "gconfig.ignore_eos": changes("only the model's end-of-text token ends a response", False),
    "gconfig.frequency_penalty": changes(shared.PATTERN, 0, 0.0),
    "gconfig.skip_special_tokens": drop("rewards receive the text without special tokens"),
    "gconfig.lora_name": drop("a run has a single adapter"),
    "gconfig.use_beam_search": changes("responses are always sampled", False),
    **{f"eval_gconfig.{k}": together(f"evaluator.{k}") for k in ("temperature", "top_p", "top_k", "n_samples")},
    "eval_gconfig.max_new_tokens": rename("evaluator.max_new_tokens"),
    "eval_gconfig.greedy": together("evaluator.temperature"),
    "eval_gconfig": shared.SPEED,
    **{f"{role}.{name}": _OWN for role in _TRAINER for name in ("experiment_name", "trial_name")},
    **{f"{role}.init_from_scratch": changes("use actor.init_model for random weights", False) for role in _TRAINER},
    **{f"{role}.disable_dropout": drop("models are trained without dropout") for role in _TRAINER},
    **{f"{role}.{name}": shared.SPEED for role in _TRAINER for name in ("attn_impl", "use_kernels", "pad_to_maximum")},
    **{
        f"{role}.{name}": shared.SPEED
        for role in _TRAINER
        for name in ("mb_spec", "log_level", "_version", "archon", "fsdp")
    },
    **{f"{role}.{name}": _OWN for role in _TRAINER for name in ("request_timeout", "setup_timeout", "admin_api_key")},
    **{f"{role}.scheduling_spec": drop("the layout defines the GPUs") for role in _TRAINER},
    **{f"{role}.scheduling_spec.env_vars": rename(f"{role}.env_vars", below=True) for role in _TRAINER},
    **{f"{role}.scheduling_strategy.fork": shared.LAYOUT for role in _TRAINER},
    "rollout.scheduling_strategy": shared.LAYOUT,
    **{f"{role}.grad_reduce_dtype": changes("gradients are reduced in float32", "float32") for role in _TRAINER},
    **{
        f"{role}.gradient_checkpointing": rename(
            f"{role}.megatron.recompute_granularity", {"True": "full", "False": None}
        )
        for role in _TRAINER
    },
    **{f"{role}.enable_tree_training": shared.SPEED for role in _TRAINER},
    **{f"{role}.is_critic": drop("use the section critic") for role in _TRAINER},
    **{f"{role}.temperature": together("gconfig.temperature") for role in _TRAINER},
    **{
        f"{role}.weight_update_mode": rename("weight_update.mode", dict.fromkeys(("xccl", "nccl", "awex")))
        for role in _TRAINER
    },
    **{f"{role}.megatron.ddp.{k}": rename(f"{role}.megatron.{k}") for role in ("actor", "critic") for k in shared.DDP},
    **{f"{role}.megatron.ddp": shared.SPEED for role in _TRAINER},
    **{
        f"{role}.megatron.{k}": rename(f"{role}.megatron.override_transformer_config.{k}")
        for role in _TRAINER
        for k in ("distribute_saved_activations", "moe_router_dtype", "moe_shared_expert_overlap", "moe_permute_fusion")
    },
    **{f"{role}.megatron.virtual_pipeline_parallel_size": shared.LAYOUT for role in _TRAINER},
    **{
        f"{role}.megatron.fp8_config": changes("set Megatron's fp8 options in override_transformer_config")
        for role in _TRAINER
    },
    **{f"{role}.megatron": shared.SPEED for role in _TRAINER},
    "actor.lora_name": drop("a run has a single adapter"),
    "actor.target_modules": rename("actor.target_modules", shared.LORA_MODULES),
    "actor.optimizer.type": changes("the only optimizer is Adam", "adam", "adam_bf16", "adamw"),
    "actor.optimizer.offload": rename("actor.megatron.optimizer_offload"),
    **{
        f"actor.optimizer.{k}": drop("float16 has a dynamic loss scale with fixed settings")
        for k in ("initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis")
    },
    **{f"actor.{k}": together(f"actor.{k}") for k in ("reward_norm", "adv_norm")},
    "actor.use_sapo_loss": together("algorithm"),
    "actor.m2_threshold": together("algorithm"),
    "actor.rejection_sampling": together("actor.behave_imp_weight_mode and actor.behave_imp_weight_cap"),
    "actor.behav_imp_weight_cap": together("actor.behave_imp_weight_cap"),
    "actor.behave_imp_weight_cap": together("actor.behave_imp_weight_cap"),
    "actor.behave_imp_weight_mode": together("actor.behave_imp_weight_mode"),
    "actor.use_decoupled_loss": together("actor.use_decoupled_loss"),
    "actor.recompute_logprob": together("actor.use_decoupled_loss"),
    "actor.prox_logp_method": changes("proximal log-probs are always computed", "recompute"),
    "actor.overlong_reward_penalty": together("actor.overlong_penalty_factor"),
    "actor.overlong_tokens": together("actor.overlong_tokens"),
    "actor.overlong_penalty_factor": together("actor.overlong_penalty_factor"),
    "actor.mask_no_eos_with_zero": changes("truncated responses keep their reward", False),
    "actor.kl_ctl": together("actor.kl_ctl"),
    "actor.group_size": drop("use gconfig.n_samples"),
    "actor.max_new_tokens": drop("use gconfig.max_new_tokens"),
    "actor.log_agent_stats": drop("the report always includes it"),
    "actor.log_agent_stats_keys": drop("the report always includes it"),
    "actor.pack": drop("sequences are always packed"),
    "critic.ppo_n_minibatches": together("actor.ppo_n_minibatches"),
    "critic.mask_no_eos_with_zero": changes("truncated responses keep their value", False),
    "ref.optimizer": drop("the reference has no optimizer"),
    **{f"sglang.{k}": drop("the actor's value is used") for k in ("model_path", "dtype", "skip_tokenizer_init")},
    "sglang.random_seed": drop("derived from seed"),
    **{f"sglang.{k}": drop("use actor.use_lora") for k in ("enable_lora", "max_lora_rank", "lora_backend")},
    "sglang.enable_multimodal": drop("servers take images whenever the model does"),
    "sglang.kv_cache_dtype": changes("the KV cache uses the model's data type", "auto"),
    "sglang.dp_size": shared.LAYOUT,
    "sglang.ep_size": shared.LAYOUT,
    "sglang": shared.SPEED,
    "vllm": drop("all servers are SGLang servers"),
    **{
        f"{data}.{k}": shared.SPEED
        for data in ("train_dataset", "valid_dataset")
        for k in ("pin_memory", "num_workers", "num_dataset_workers", "scheduling_spec", "setup_timeout")
    },
    "train_dataset.type": together("algorithm"),
    "actor.beta": rename("actor.dpo_beta"),
    "actor.loss_type": changes("the loss of DPO is the sigmoid's", "sigmoid"),
    "train_dataset.max_length": together("train_dataset.max_prompt_length"),
    "train_dataset.drop_last": drop("every step has a full batch"),
    "train_dataset.dataset_kwargs": changes(
        "write a function that returns the rows: train_dataset.path=my_data.py:rows"
    ),
    "valid_dataset.type": drop("use train_dataset.type"),
    "valid_dataset.max_length": rename("valid_dataset.max_prompt_length"),
    **{
        f"valid_dataset.{k}": drop("evaluation uses all prompts")
        for k in ("batch_size", "shuffle", "drop_last", "dataset_kwargs")
    },
    "saver.freq_steps": rename("saver.freq_steps"),
    "saver.freq_epochs": together("saver.freq_steps"),
    "saver.freq_secs": together("saver.freq_steps"),
    "saver": drop("the run's value is used"),
    "recover.mode": rename(
        "recover.mode",
        {
            "True": "auto",
            "on": "auto",
            "resume": "auto",
            "False": "off",
            "disabled": "off",
            "disable": "off",
            "fault": "fault",
        },
    ),
    "recover.freq_steps": rename("recover.freq_steps"),
    "recover": drop("use recover.freq_steps or recover.freq_secs"),
    "evaluator.eval_before_train": rename("evaluator.at_start"),
    "evaluator.freq_steps": rename("evaluator.freq_steps"),
    "evaluator.freq_epochs": together("evaluator.freq_steps"),
    "evaluator.freq_secs": together("evaluator.freq_steps"),
    "evaluator": drop("the run's value is used"),
    "stats_logger": drop("stats_logger has separate switches"),
    "checkpointer": drop("use the section saver"),
    "launcher": drop("use the section scheduler"),
    "scheduler.type": rename("scheduler.type", {"None": None, "slurm": "ray"}),
    "scheduler": drop("scheduler.address connects to an existing cluster"),
    "cluster.name_resolve": drop("areal-like has no such service"),
    "cluster.cluster_name": drop("Ray provides it"),
    "perf_tracer": drop("the report always includes it"),
    "daemon": drop("a run ends when its command ends"),
}
DEFAULTS: dict[str, Any] = {
    "total_train_epochs": 1,
    "actor.ppo_n_minibatches": 4,
    "actor.eps_clip": 0.2,
    "actor.kl_ctl": 0.1,
    "actor.kl_estimator": "k1",
    "actor.reward_scaling": 1.0,
    "actor.reward_bias": 0.0,
    "actor.reward_clip": 20.0,
    "actor.discount": 1.0,
    "actor.gae_lambda": 1.0,
    "actor.importance_sampling_level": "token",
    "rollout.return_routed_experts": False,
    "actor.optimizer.lr": 1e-3,
    "actor.optimizer.weight_decay": 0.01,
    "actor.optimizer.beta1": 0.9,
    "actor.optimizer.beta2": 0.999,
    "actor.optimizer.eps": 1e-8,
    "actor.optimizer.lr_scheduler_type": "constant",
    "actor.optimizer.min_lr_ratio": 0.0,
    "actor.optimizer.warmup_steps_proportion": 0.001,
    "actor.optimizer.gradient_clipping": 1.0,
    "actor.dtype": "bfloat16",
    "critic.eps_clip": 0.5,
    "gconfig.n_samples": 1,
    "gconfig.max_new_tokens": 16384,
    "gconfig.temperature": 1.0,
    "rollout.max_head_offpolicyness": 0,
    "train_dataset.batch_size": 1,
    "train_dataset.shuffle": True,
}
