"""ROLL's keys."""

from areal_like.interop.keys.entries import (
    CHECKED,
    LAYOUT,
    MEGATRON,
    PACKED,
    REPORT,
    TRANSFORMER,
    Table,
    lost,
    to,
    unneeded,
)

ROLL: Table = {
    "exp_name": to("experiment_name"),
    "seed": to("seed"),
    "logging_dir": unneeded("logs are below cluster.fileroot"),
    "output_dir": to("cluster.fileroot"),
    "num_gpus_per_node": to("cluster.n_gpus_per_node"),
    "max_steps": to("total_train_steps"),
    "save_steps": to("saver.freq_steps"),
    "eval_steps": to("evaluator.freq_steps"),
    "pretrain": to("actor.path"),
    "reward_pretrain": lost(CHECKED),
    "rollout_batch_size": to("train_dataset.batch_size"),
    "prompt_length": to("train_dataset.max_prompt_length"),
    "response_length": to("gconfig.max_new_tokens"),
    "num_return_sequences_in_group": to("gconfig.n_samples"),
    "async_generation_ratio": to("rollout.max_head_offpolicyness"),
    "adv_estimator": to("algorithm"),
    "ppo_epochs": lost("every sample is trained on once"),
    "pg_clip": to("actor.eps_clip"),
    "init_kl_coef": to("actor.kl_ctl"),
    "kl_loss_coef": to("actor.kl_loss_coef"),
    "use_kl_loss": unneeded("kl_loss_coef says it"),
    "add_token_level_kl": unneeded("init_kl_coef says it"),
    "entropy_loss_coef": to("actor.entropy_coeff"),
    "max_grad_norm": to("actor.optimizer.gradient_clipping"),
    "actor_train.training_args.lr_scheduler_type": to("actor.optimizer.lr_scheduler_type"),
    "gamma": to("actor.discount"),
    "lambd": to("actor.gae_lambda"),
    "actor_train.model_args.dtype": unneeded("actor.dtype is bfloat16 unless set"),
    "actor_train.training_args.learning_rate": to("actor.optimizer.lr"),
    "actor_train.training_args.weight_decay": to("actor.optimizer.weight_decay"),
    "actor_train.training_args.warmup_steps": to("actor.optimizer.warmup_steps"),
    "actor_train.training_args.per_device_train_batch_size": unneeded(PACKED),
    "actor_train.training_args.gradient_accumulation_steps": unneeded(PACKED),
    "actor_train.data_args.file_name": to("train_dataset.path"),
    "actor_train.data_args.prompt": to("train_dataset.prompt_field"),
    "actor_train.strategy_args.strategy_config.use_distributed_optimizer": to(
        "actor.megatron.use_distributed_optimizer"
    ),
    **{
        f"actor_train.strategy_args.strategy_config.{k}": to(f"actor.megatron.{k}")
        for k in (*TRANSFORMER, "overlap_grad_reduce", "overlap_param_gather")
    },
    **{f"actor_train.strategy_args.strategy_config.{k}": e for k, e in MEGATRON.items()},
    **{
        f"actor_train.strategy_args.strategy_config.account_for_{k}_in_pipeline_split": lost(
            "give num_layers_in_first_pipeline_stage and num_layers_in_last_pipeline_stage, or "
            "pipeline_model_parallel_layout, in actor.megatron.override_transformer_config"
        )
        for k in ("embedding", "loss")
    },
    "actor_train.strategy_args.strategy_config": lost("name it in actor.megatron.override_transformer_config"),
    "actor_train.strategy_args": LAYOUT,
    "actor_train.device_mapping": LAYOUT,
    "actor_train.infer_batch_size": unneeded("log-probs are computed on packed micro-batches"),
    "actor_infer.generating_args.temperature": to("gconfig.temperature"),
    "actor_infer.generating_args.top_p": to("gconfig.top_p"),
    "actor_infer.generating_args.max_new_tokens": to("gconfig.max_new_tokens"),
    "actor_infer.generating_args.num_return_sequences": to("gconfig.n_samples"),
    "actor_infer.strategy_args.strategy_config.mem_fraction_static": to("sglang.mem_fraction_static"),
    "actor_infer.strategy_args.strategy_config.gpu_memory_utilization": to("sglang.mem_fraction_static"),
    "actor_infer": LAYOUT,
    "reference": LAYOUT,
    "critic.device_mapping": LAYOUT,
    "critic.training_args.learning_rate": to("critic.optimizer.lr"),
    "critic.training_args.weight_decay": to("critic.optimizer.weight_decay"),
    "critic.training_args.warmup_steps": to("critic.optimizer.warmup_steps"),
    "critic": lost("what a critic has of its own is in the section critic"),
    "rewards": lost("name the reward as reward.type or reward.function"),
    "validation.data_args.file_name": to("valid_dataset.path"),
    "validation": unneeded("the evaluator takes all prompts"),
    "track_with": REPORT,
    "checkpoint_config": unneeded("checkpoints are below cluster.fileroot"),
    "system_envs": to("actor.env_vars"),
    "defaults": lost("only this file was read"),
    "hydra": unneeded("there is no Hydra here"),
}
