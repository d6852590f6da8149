"""verl's `trainer/config/`, which siiRL and Trinity-RFT took over."""

from areal_like.interop.keys.entries import (
    CHECKED,
    LAYOUT,
    MEGATRON,
    NOWHERE,
    PACKED,
    REPORT,
    TRANSFORMER,
    Table,
    lost,
    to,
    unneeded,
)


def _engine(role: str, ours: str) -> Table:
    """Keys of the section `role`, whose settings are in our section `ours`."""
    t: Table = {f"{role}.megatron.{k}": e for k, e in MEGATRON.items()}
    t[f"{role}.megatron.use_distributed_optimizer"] = (
        to(f"{ours}.megatron.use_distributed_optimizer") if ours != "ref" else unneeded("a reference has no optimizer")
    )
    for k in ("param_offload", "grad_offload", "optimizer_offload"):
        t[f"{role}.megatron.{k}"] = to(f"{ours}.megatron.{k}")
    for k in TRANSFORMER:
        t[f"{role}.megatron.override_transformer_config.{k}"] = to(f"{ours}.megatron.{k}")
    for k in ("overlap_grad_reduce", "overlap_param_gather"):
        t[f"{role}.megatron.override_ddp_config.{k}"] = to(f"{ours}.megatron.{k}")
    t[f"{role}.megatron.override_transformer_config"] = to(f"{ours}.megatron.override_transformer_config")
    t[f"{role}.megatron.use_mbridge"] = unneeded("weights always go through a bridge (actor.megatron.bridge_type)")
    for k in ("use_dist_checkpointing", "dist_checkpointing_path"):
        t[f"{role}.megatron.{k}"] = to(f"{ours}.megatron.{k}")
    t[f"{role}.megatron.param_dtype"] = to(f"{ours}.dtype")
    t[f"{role}.strategy"] = LAYOUT
    t[f"{role}.fsdp_config.param_offload"] = to(f"{ours}.offload")
    t[f"{role}.fsdp_config.optimizer_offload"] = lost(f"{ours}.offload takes all parts to host memory or none")
    t[f"{role}.fsdp_config.offload_policy"] = to(f"{ours}.fsdp.offload_params")
    t[f"{role}.fsdp_config"] = unneeded("a layout such as fsdp:d8 says it; every layer is sharded on its own")
    t[f"{role}.ulysses_sequence_parallel_size"] = LAYOUT
    t[f"{role}.use_dynamic_bsz"] = unneeded("sequences are always packed")
    for k in (
        "ppo_micro_batch_size_per_gpu",
        "ppo_micro_batch_size",
        "log_prob_micro_batch_size_per_gpu",
        "log_prob_micro_batch_size",
        "log_prob_use_dynamic_bsz",
        "log_prob_max_token_len_per_gpu",
    ):
        t[f"{role}.{k}"] = unneeded(PACKED)
    t[f"{role}.ppo_max_token_len_per_gpu"] = to(f"{ours}.mb_spec.max_tokens_per_mb")
    t[f"{role}.use_prefix_grouper"] = to(f"{ours}.mb_spec.share_prompts")
    return t


VERL: Table = {
    **_engine("actor_rollout_ref.actor", "actor"),
    **_engine("actor_rollout_ref.ref", "ref"),
    **_engine("critic", "critic"),
    "critic.optim.lr": to("critic.optimizer.lr"),
    "critic.optim.weight_decay": to("critic.optimizer.weight_decay"),
    "critic.optim.lr_warmup_steps": to("critic.optimizer.warmup_steps"),
    "critic.cliprange_value": to("critic.eps_clip"),
    "critic.model.path": to("critic.path"),
    "critic.model": unneeded("critic.path names it, and it is loaded as the actor's is"),
    "actor_rollout_ref.actor.ppo_mini_batch_size": to("actor.ppo_n_minibatches"),
    "actor_rollout_ref.actor.optim.lr": to("actor.optimizer.lr"),
    "actor_rollout_ref.actor.optim.weight_decay": to("actor.optimizer.weight_decay"),
    "actor_rollout_ref.actor.optim.lr_warmup_steps": to("actor.optimizer.warmup_steps"),
    "actor_rollout_ref.actor.optim.clip_grad": to("actor.optimizer.gradient_clipping"),
    "actor_rollout_ref.actor.optim.lr_decay_style": to("actor.optimizer.lr_scheduler_type"),
    "actor_rollout_ref.actor.grad_clip": to("actor.optimizer.gradient_clipping"),
    "actor_rollout_ref.actor.clip_ratio": to("actor.eps_clip"),
    "actor_rollout_ref.actor.clip_ratio_low": to("actor.eps_clip"),
    "actor_rollout_ref.actor.clip_ratio_high": to("actor.eps_clip_higher"),
    "actor_rollout_ref.actor.use_kl_loss": unneeded("kl_loss_coef says it"),
    "actor_rollout_ref.actor.kl_loss_coef": to("actor.kl_loss_coef"),
    "actor_rollout_ref.actor.kl_loss_type": to("actor.kl_estimator"),
    "actor_rollout_ref.actor.entropy_coeff": to("actor.entropy_coeff"),
    "actor_rollout_ref.actor.ppo_epochs": lost("every sample is trained on once"),
    "actor_rollout_ref.actor.loss_agg_mode": lost("actor.loss_agg_mode is token_mean, sequence_mean or constant"),
    "actor_rollout_ref.model.path": to("actor.path"),
    "actor_rollout_ref.model.enable_gradient_checkpointing": to("actor.megatron.recompute_granularity"),
    "actor_rollout_ref.model.use_remove_padding": unneeded("sequences are always packed"),
    "actor_rollout_ref.model.use_fused_kernels": unneeded("the fused kernels are always on"),
    "actor_rollout_ref.model.trust_remote_code": lost("no code of a model is run"),
    "actor_rollout_ref.hybrid_engine": unneeded("the layout says which GPUs are shared"),
    "actor_rollout_ref.rollout.n": to("gconfig.n_samples"),
    "actor_rollout_ref.rollout.temperature": to("gconfig.temperature"),
    "actor_rollout_ref.rollout.top_p": to("gconfig.top_p"),
    "actor_rollout_ref.rollout.gpu_memory_utilization": to("sglang.mem_fraction_static"),
    "actor_rollout_ref.rollout.max_num_seqs": to("sglang.max_running_requests"),
    "actor_rollout_ref.rollout.max_model_len": to("sglang.context_length"),
    **{
        f"actor_rollout_ref.rollout.{k}": LAYOUT
        for k in (
            "name",
            "tensor_model_parallel_size",
            "data_parallel_size",
            "pipeline_model_parallel_size",
            "expert_parallel_size",
            "mode",
        )
    },
    "actor_rollout_ref.rollout": unneeded("SGLang decides it; sglang.extra_args takes the server's own options"),
    "data.train_files": to("train_dataset.path"),
    "data.val_files": to("valid_dataset.path"),
    "data.train_batch_size": to("train_dataset.batch_size"),
    "data.max_prompt_length": to("train_dataset.max_prompt_length"),
    "data.max_response_length": to("gconfig.max_new_tokens"),
    "data.shuffle": to("train_dataset.shuffle"),
    "data.prompt_key": to("train_dataset.prompt_field"),
    "data.filter_overlong_prompts": to("train_dataset.overlong_prompts"),
    "data.truncation": to("train_dataset.overlong_prompts"),
    "data.val_batch_size": unneeded("evaluation takes all prompts at once"),
    "data": unneeded(NOWHERE),
    "trainer.n_gpus_per_node": to("cluster.n_gpus_per_node"),
    "trainer.nnodes": to("cluster.n_nodes"),
    "trainer.experiment_name": to("experiment_name"),
    "trainer.project_name": unneeded("experiment_name names the run"),
    "trainer.total_epochs": to("total_train_epochs"),
    "trainer.total_training_steps": to("total_train_steps"),
    "trainer.save_freq": to("saver.freq_steps"),
    "trainer.test_freq": to("evaluator.freq_steps"),
    "trainer.val_before_train": to("evaluator.at_start"),
    "trainer.default_local_dir": to("cluster.fileroot"),
    "trainer.logger": REPORT,
    "trainer.resume_mode": to("recover.mode"),
    "trainer.max_actor_ckpt_to_keep": to("recover.keep"),
    "trainer.critic_warmup": to("critic.warmup_steps"),
    "trainer": unneeded(NOWHERE),
    "algorithm.adv_estimator": to("algorithm"),
    "algorithm.use_kl_in_reward": unneeded("kl_ctrl.kl_coef says it"),
    "algorithm.kl_ctrl.kl_coef": to("actor.kl_ctl"),
    "algorithm.gamma": to("actor.discount"),
    "algorithm.lam": to("actor.gae_lambda"),
    "algorithm": lost("the algorithm does without it"),
    "reward_model": lost(CHECKED),
    "custom_reward_function": lost("name the function as reward.function=FILE.py:NAME; its arguments differ"),
    "model_engine": LAYOUT,
    "critic": lost("what a critic has of its own is in the section critic"),
    "actor_rollout_ref": lost("it has no counterpart"),
    "ray_init": unneeded("scheduler.address names an existing cluster"),
}
