"""Keys and defaults of verl's `trainer/config/`, which siiRL and Trinity-RFT also use."""

from typing import Any

from areal_like.interop.keys import shared
from areal_like.interop.keys.entries import Table, changes, drop, rename, together
from areal_like.interop.keys.verl_sft import SFT

_ACTOR, _REF, _ROLLOUT, _MODEL = (f"actor_rollout_ref.{part}" for part in ("actor", "ref", "rollout", "model"))
_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
_FULL = {"True": "full", "False": None}


def _megatron(role: str, ours: str) -> Table:
    """Return the keys of the section `megatron` of `role`, mapped to our section `ours`."""
    t: Table = {f"{role}.megatron.{k}": e for k, e in shared.MEGATRON.items()}
    t[f"{role}.megatron.use_distributed_optimizer"] = (
        rename(f"{ours}.megatron.use_distributed_optimizer")
        if ours != "ref"
        else drop("the reference has no optimizer")
    )
    for k in ("param_offload", "grad_offload", "optimizer_offload"):
        t[f"{role}.megatron.{k}"] = rename(f"{ours}.megatron.{k}")
    t[f"{role}.megatron.override_transformer_config"] = rename(
        f"{ours}.megatron.override_transformer_config", {"{}": None}, below=True
    )
    for k in shared.TRANSFORMER:
        t[f"{role}.megatron.override_transformer_config.{k}"] = rename(f"{ours}.megatron.{k}")
    for k in ("attention_backend", "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"):
        t[f"{role}.megatron.override_transformer_config.{k}"] = shared.SPEED
    for k in ("overlap_grad_reduce", "overlap_param_gather"):
        t[f"{role}.megatron.override_ddp_config.{k}"] = rename(f"{ours}.megatron.{k}")
    t[f"{role}.megatron.override_ddp_config"] = shared.SPEED
    t[f"{role}.megatron.use_mbridge"] = drop("a bridge always converts the weights (actor.megatron.bridge_type)")
    t[f"{role}.megatron.vanilla_mbridge"] = drop("use actor.megatron.bridge_type")
    for k in ("use_dist_checkpointing", "dist_checkpointing_path"):
        t[f"{role}.megatron.{k}"] = rename(f"{ours}.megatron.{k}", {"None": None})
    t[f"{role}.megatron.param_dtype"] = rename(f"{ours}.dtype")
    t[f"{role}.megatron"] = shared.SPEED
    return t


def _engine(role: str, ours: str) -> Table:
    """Return the keys of section `role`, mapped to our section `ours`."""
    t = _megatron(role, ours)
    t[f"{role}.load_weight"] = drop("weights are always loaded")
    t[f"{role}.strategy"] = shared.LAYOUT
    for place in ("fsdp_config", "model.fsdp_config", "fsdp"):
        t[f"{role}.{place}.param_offload"] = rename(f"{ours}.offload")
        t[f"{role}.{place}.optimizer_offload"] = drop(f"{ours}.offload moves all parts to host memory or none")
        t[f"{role}.{place}.offload_policy"] = rename(f"{ours}.fsdp.offload_params")
        t[f"{role}.{place}.model_dtype"] = rename(f"{ours}.dtype", _DTYPES)
        t[f"{role}.{place}"] = drop("a layout such as fsdp:d8 defines it; every layer is sharded separately")
    t[f"{role}.ulysses_sequence_parallel_size"] = shared.LAYOUT
    t[f"{role}.use_dynamic_bsz"] = drop("sequences are always packed")
    for k in (
        "ppo_micro_batch_size_per_gpu",
        "ppo_micro_batch_size",
        "log_prob_micro_batch_size_per_gpu",
        "log_prob_micro_batch_size",
        "log_prob_use_dynamic_bsz",
        "log_prob_max_token_len_per_gpu",
        "forward_micro_batch_size_per_gpu",
        "forward_micro_batch_size",
        "forward_max_token_len_per_gpu",
    ):
        t[f"{role}.{k}"] = drop(shared.PACKED)
    t[f"{role}.ppo_max_token_len_per_gpu"] = rename(f"{ours}.mb_spec.max_tokens_per_mb")
    t[f"{role}.use_prefix_grouper"] = rename(f"{ours}.mb_spec.share_prompts")
    for k in ("entropy_checkpointing", "entropy_from_logits_with_chunking", "use_torch_compile", "use_fused_kernels"):
        t[f"{role}.{k}"] = shared.SPEED
    for k in ("checkpoint", "profiler", "profile", "use_remove_padding", "nccl_timeout", "calculate_entropy"):
        t[f"{role}.{k}"] = shared.SPEED
    for place in ("router_replay", "megatron.router_replay"):
        t[f"{role}.{place}.mode"] = (
            together("rollout.router_replay") if ours == "actor" else drop("the actor's mode is used")
        )
    t[f"{role}.shuffle"] = drop("samples are distributed to mini-batches round-robin")
    t[f"{role}.data_loader_seed"] = drop("samples are distributed to mini-batches round-robin")
    one_pass = changes("the critic makes one pass over the mini-batches of a step", 1)
    t[f"{role}.ppo_epochs"] = rename("actor.ppo_epochs") if ours == "actor" else one_pass
    return t


VERL: Table = {
    **_engine(_ACTOR, "actor"),
    **_engine(_REF, "ref"),
    **_engine("critic", "critic"),
    **shared.optimizer(f"{_ACTOR}.optim", "actor.optimizer"),
    **shared.optimizer("critic.optim", "critic.optimizer"),
    "critic.grad_clip": rename("critic.optimizer.gradient_clipping"),
    "critic.cliprange_value": rename("critic.eps_clip"),
    "critic.ppo_mini_batch_size": together("actor.ppo_n_minibatches"),
    "critic.loss_agg_mode": drop("the critic's loss is the mean over tokens"),
    "critic.enable": together("algorithm"),
    "critic.model.path": rename("critic.path"),
    "critic.model.enable_gradient_checkpointing": rename("critic.megatron.recompute_granularity", _FULL),
    "critic.model": drop("use critic.path, which is loaded like actor.path"),
    f"{_ACTOR}.ppo_mini_batch_size": together("actor.ppo_n_minibatches"),
    f"{_ACTOR}.grad_clip": rename("actor.optimizer.gradient_clipping"),
    f"{_ACTOR}.clip_ratio": drop("verl reads clip_ratio_low and clip_ratio_high"),
    f"{_ACTOR}.clip_ratio_low": together("actor.eps_clip"),
    f"{_ACTOR}.clip_ratio_high": rename("actor.eps_clip_higher"),
    f"{_ACTOR}.clip_ratio_c": together("actor.c_clip"),
    f"{_ACTOR}.use_kl_loss": together("actor.kl_loss_coef"),
    f"{_ACTOR}.kl_loss_coef": together("actor.kl_loss_coef"),
    f"{_ACTOR}.kl_loss_type": together("actor.kl_estimator"),
    f"{_ACTOR}.entropy_coeff": rename("actor.entropy_coeff"),
    f"{_ACTOR}.loss_agg_mode": together("actor.loss_agg_mode"),
    f"{_ACTOR}.loss_scale_factor": changes("the constant length is gconfig.max_new_tokens"),
    f"{_ACTOR}.policy_loss.loss_mode": together("algorithm"),
    f"{_ACTOR}.policy_loss": drop("only used with policy_loss.loss_mode"),
    f"{_ACTOR}.use_rollout_log_probs": together("actor.use_decoupled_loss"),
    f"{_ACTOR}.tis_imp_ratio_cap": together("actor.behave_imp_weight_mode and actor.behave_imp_weight_cap"),
    f"{_ACTOR}.tau_pos": together("actor.sapo_tau_pos"),
    f"{_ACTOR}.tau_neg": together("actor.sapo_tau_neg"),
    f"{_ACTOR}.freeze_vision_tower": rename("actor.freeze_vision_tower"),
    f"{_MODEL}.path": rename("actor.path"),
    f"{_MODEL}.tokenizer_path": rename("tokenizer_path"),
    f"{_MODEL}.enable_gradient_checkpointing": rename("actor.megatron.recompute_granularity", _FULL),
    f"{_MODEL}.lora_rank": together("actor.use_lora and actor.lora_rank"),
    f"{_MODEL}.lora_alpha": together("actor.lora_alpha"),
    f"{_MODEL}.target_modules": together("actor.target_modules"),
    f"{_MODEL}.lora.rank": together("actor.use_lora and actor.lora_rank"),
    f"{_MODEL}.lora.alpha": together("actor.lora_alpha"),
    f"{_MODEL}.lora.target_modules": together("actor.target_modules"),
    f"{_MODEL}.lora.dropout": changes("adapters have no dropout", 0, 0.0),
    f"{_MODEL}.lora": shared.SPEED,
    f"{_MODEL}.exclude_modules": changes("name the layers in actor.target_modules", ".*visual.*"),
    f"{_MODEL}.lora_adapter_path": changes("adapters always start untrained"),
    f"{_MODEL}.external_lib": changes("only the run's own code is imported"),
    f"{_MODEL}.custom_chat_template": changes("the tokenizer's chat template is used"),
    f"{_MODEL}.override_config": changes("the model follows its config.json", "{}"),
    f"{_MODEL}.trust_remote_code": drop("code shipped with a model is never executed"),
    f"{_MODEL}.mtp.enable_train": rename("actor.megatron.train_mtp_layers"),
    f"{_MODEL}.mtp.enable": changes(
        "actor.megatron.train_mtp_layers trains the layer, and servers do not use it", False
    ),
    f"{_MODEL}.mtp": drop("actor.megatron.train_mtp_layers has no further settings"),
    f"{_MODEL}": shared.SPEED,
    "actor_rollout_ref.hybrid_engine": together("rollout.sharing"),
    "actor_rollout_ref.nccl_timeout": shared.SPEED,
    f"{_ROLLOUT}.n": rename("gconfig.n_samples"),
    f"{_ROLLOUT}.temperature": rename("gconfig.temperature"),
    f"{_ROLLOUT}.top_p": rename("gconfig.top_p"),
    f"{_ROLLOUT}.top_k": rename("gconfig.top_k", shared.ALL_WORDS),
    f"{_ROLLOUT}.do_sample": changes("responses are always sampled", True),
    f"{_ROLLOUT}.ignore_eos": changes("only the model's end-of-text token ends a response", False),
    f"{_ROLLOUT}.quantization": changes("servers use the trainer's data type"),
    f"{_ROLLOUT}.enable_rollout_routing_replay": together("rollout.router_replay"),
    f"{_ROLLOUT}.multi_turn.enable": together("workflow"),
    f"{_ROLLOUT}.multi_turn": drop("a workflow defines its turns and tools"),
    f"{_ROLLOUT}.agent.default_agent_loop": together("workflow"),
    f"{_ROLLOUT}.agent.agent_loop_config_path": together("workflow"),
    f"{_ROLLOUT}.response_length": rename("gconfig.max_new_tokens"),
    f"{_ROLLOUT}.prompt_length": rename("train_dataset.max_prompt_length"),
    f"{_ROLLOUT}.gpu_memory_utilization": rename("sglang.mem_fraction_static"),
    f"{_ROLLOUT}.max_num_seqs": rename("sglang.max_running_requests"),
    f"{_ROLLOUT}.max_model_len": rename("sglang.context_length"),
    f"{_ROLLOUT}.val_kwargs.temperature": together("evaluator.temperature"),
    f"{_ROLLOUT}.val_kwargs.do_sample": together("evaluator.temperature"),
    f"{_ROLLOUT}.val_kwargs.top_p": together("evaluator.top_p"),
    f"{_ROLLOUT}.val_kwargs.top_k": together("evaluator.top_k"),
    f"{_ROLLOUT}.val_kwargs.n": rename("evaluator.n_samples"),
    f"{_ROLLOUT}.val_kwargs": changes("evaluations have temperature, top_p, top_k and n_samples"),
    **{
        f"{_ROLLOUT}.{k}": shared.LAYOUT
        for k in (
            *("name", "tensor_model_parallel_size", "data_parallel_size", "pipeline_model_parallel_size"),
            *("expert_parallel_size", "mode", "nnodes", "n_gpus_per_node"),
        )
    },
    f"{_ROLLOUT}": drop("SGLang's default is used; set server options in sglang.extra_args"),
    "data.train_files": rename("train_dataset.path"),
    "data.val_files": rename("valid_dataset.path"),
    "data.train_batch_size": rename("train_dataset.batch_size"),
    "data.gen_batch_size": drop("more prompts are generated on demand"),
    "data.max_prompt_length": rename("train_dataset.max_prompt_length"),
    "data.max_response_length": rename("gconfig.max_new_tokens"),
    "data.shuffle": rename("train_dataset.shuffle"),
    "data.seed": rename("seed", {"None": None}),
    "data.prompt_key": rename("train_dataset.prompt_field"),
    "data.filter_overlong_prompts": together("train_dataset.overlong_prompts"),
    "data.truncation": together("train_dataset.overlong_prompts"),
    "data.apply_chat_template_kwargs": rename("train_dataset.chat_template_kwargs", {"{}": None}, below=True),
    "data.train_max_samples": changes("all rows are used", -1),
    "data.val_max_samples": rename("valid_dataset.max_samples", shared.NEVER),
    "data.custom_cls.path": together("train_dataset.path"),
    "data.custom_cls": drop("write a function that returns the rows: train_dataset.path=my_data.py:rows"),
    "data.sampler": changes("prompts are shuffled every epoch"),
    "data.image_key": rename("train_dataset.image_field"),
    "data.video_key": changes(shared.VIDEO, "videos"),
    "data.tool_config_path": together("workflow"),
    **{
        f"data.{k}": shared.SPEED
        for k in (
            *("val_batch_size", "return_raw_chat", "return_raw_input_ids", "return_full_prompt", "reward_fn_key"),
            *("filter_overlong_prompts_workers", "dataloader_num_workers", "trust_remote_code", "use_shm", "tokenizer"),
            *("validation_shuffle", "return_multi_modal_inputs", "image_patch_size", "datagen"),
        )
    },
    "trainer.n_gpus_per_node": rename("cluster.n_gpus_per_node"),
    "trainer.nnodes": rename("cluster.n_nodes"),
    "trainer.experiment_name": rename("experiment_name"),
    "trainer.total_epochs": rename("total_train_epochs"),
    "trainer.total_training_steps": rename("total_train_steps", shared.NEVER | {"None": None}),
    "trainer.save_freq": rename("saver.freq_steps", shared.NEVER),
    "trainer.test_freq": rename("evaluator.freq_steps", shared.NEVER),
    "trainer.val_before_train": rename("evaluator.at_start"),
    "trainer.val_only": changes("a run always trains", False),
    "trainer.default_local_dir": rename("cluster.fileroot"),
    "trainer.logger": shared.REPORT,
    "trainer.resume_mode": rename("recover.mode", {"disable": "off", "False": "off", "resume_path": "auto"}),
    "trainer.max_actor_ckpt_to_keep": rename("recover.keep", {"None": None}),
    "trainer.critic_warmup": together("critic.warmup_steps"),
    "trainer.project_name": drop("use experiment_name"),
    "trainer.v1.trainer_mode": changes("set rollout.max_head_offpolicyness, and separate GPUs for the servers", "sync"),
    "trainer": shared.SPEED,
    "rollout.n": drop("verl reads actor_rollout_ref.rollout.n"),
    "rollout.nnodes": shared.LAYOUT,
    "rollout.n_gpus_per_node": shared.LAYOUT,
    "rollout.total_rollout_steps": together("total_train_steps"),
    "rollout.test_freq": together("evaluator.freq_steps"),
    "async_training.staleness_threshold": together("rollout.max_head_offpolicyness"),
    "async_training.trigger_parameter_sync_step": together("train_dataset.batch_size and actor.ppo_n_minibatches"),
    "async_training.require_batches": together("train_dataset.batch_size and actor.ppo_n_minibatches"),
    "async_training.partial_rollout": together("weight_update.requests"),
    "async_training.compute_prox_log_prob": together("actor.use_decoupled_loss"),
    **{
        f"async_training.{k}": shared.SPEED
        for k in (
            *("use_trainer_do_validate", "use_dynamic_resource_scheduling", "concurrent_samples_per_replica"),
            *("dynamic_schedule_policy", "dynamic_schedule_deactivate_ratio", "dynamic_schedule_enable_rebalance"),
        )
    },
    "algorithm.adv_estimator": together("algorithm"),
    "algorithm.norm_adv_by_std_in_grpo": together("actor.reward_norm.std_level"),
    "algorithm.use_kl_in_reward": together("actor.kl_ctl"),
    "algorithm.kl_penalty": together("actor.kl_estimator"),
    "algorithm.kl_ctrl.kl_coef": together("actor.kl_ctl"),
    "algorithm.kl_ctrl.type": changes("the weight of the KL divergence is constant", "fixed"),
    "algorithm.kl_ctrl": drop("the weight of the KL divergence is constant"),
    "algorithm.gamma": rename("actor.discount"),
    "algorithm.lam": together("actor.gae_lambda"),
    "algorithm.filter_groups.enable": rename("actor.dynamic_sampling"),
    "algorithm.filter_groups": drop("the filter compares the rewards of a group (actor.max_dropped_groups)"),
    "algorithm.rollout_correction": together("actor.behave_imp_weight_mode and actor.behave_imp_weight_cap"),
    "algorithm.use_pf_ppo": changes("rewards do not influence the choice of prompts", False),
    "algorithm.pf_ppo": drop("only used with algorithm.use_pf_ppo"),
    "reward_model.enable": together("reward.type"),
    "reward_model.model.path": together("reward.model.path"),
    "reward_model.overlong_buffer": together("actor.overlong_penalty_factor and actor.overlong_tokens"),
    "reward_model.reward_kwargs.overlong_buffer_cfg": together(
        "actor.overlong_penalty_factor and actor.overlong_tokens"
    ),
    "reward_model": drop("use the section reward"),
    "reward.custom_reward_function": together("reward.function"),
    "reward.reward_model.enable": together("reward.type"),
    "reward.reward_model.model_path": together("reward.model.path"),
    "reward.reward_model": drop("use the section reward"),
    "reward.reward_manager": drop("use the section reward"),
    "reward.reward_kwargs.overlong_buffer_cfg": together("actor.overlong_penalty_factor and actor.overlong_tokens"),
    "reward.reward_kwargs.max_resp_len": drop("the penalty for length ends at gconfig.max_new_tokens"),
    "reward.num_workers": shared.SPEED,
    "reward_manager": drop("use the section reward"),
    "custom_reward_function": together("reward.function"),
    "model_engine": shared.LAYOUT,
    "ray_init": drop("scheduler.address connects to an existing cluster"),
    "ray_kwargs": drop("scheduler.address connects to an existing cluster"),
    "global_profiler": shared.SPEED,
    "transfer_queue": shared.SPEED,
    "hydra": drop("areal-like does not use Hydra"),
    "profiler": shared.SPEED,
    "defaults": changes("included files were not read"),
    **SFT,
}
DEFAULTS: dict[str, Any] = {
    "algorithm.adv_estimator": "gae",
    "algorithm.norm_adv_by_std_in_grpo": True,
    "algorithm.kl_ctrl.kl_coef": 0.001,
    "algorithm.kl_penalty": "kl",
    "algorithm.gamma": 1.0,
    "algorithm.lam": 1.0,
    f"{_ACTOR}.ppo_mini_batch_size": 256,
    f"{_ACTOR}.router_replay.mode": "disabled",
    f"{_ACTOR}.tau_pos": 1.0,
    f"{_ACTOR}.tau_neg": 1.05,
    f"{_ACTOR}.clip_ratio_low": 0.2,
    f"{_ACTOR}.clip_ratio_high": 0.2,
    f"{_ACTOR}.clip_ratio_c": 3.0,
    f"{_ACTOR}.loss_agg_mode": "token-mean",
    f"{_ACTOR}.entropy_coeff": 0.0,
    f"{_ACTOR}.kl_loss_coef": 0.001,
    f"{_ACTOR}.kl_loss_type": "low_var_kl",
    f"{_ACTOR}.policy_loss.loss_mode": "vanilla",
    f"{_ACTOR}.grad_clip": 1.0,
    f"{_ACTOR}.optim.lr": 1e-6,
    f"{_ACTOR}.optim.weight_decay": 0.01,
    f"{_ACTOR}.optim.betas": [0.9, 0.999],
    f"{_ACTOR}.optim.lr_scheduler_type": "constant",
    f"{_ACTOR}.optim.lr_warmup_steps_ratio": 0.0,
    "critic.optim.lr": 1e-5,
    "critic.optim.weight_decay": 0.01,
    "critic.optim.betas": [0.9, 0.999],
    "critic.cliprange_value": 0.5,
    f"{_ROLLOUT}.n": 1,
    f"{_ROLLOUT}.temperature": 1.0,
    f"{_ROLLOUT}.val_kwargs.temperature": 0,
    f"{_ROLLOUT}.val_kwargs.n": 1,
    f"{_ROLLOUT}.val_kwargs.top_p": 1.0,
    f"{_ROLLOUT}.val_kwargs.top_k": -1,
    "data.train_batch_size": 1024,
    "data.max_prompt_length": 512,
    "data.max_response_length": 512,
    "data.shuffle": True,
    "data.prompt_key": "prompt",
    "data.truncation": "error",
    "trainer.total_epochs": 30,
}
# Of verl's fully asynchronous trainer, in addition: `verl/experimental/fully_async_policy/config/`.
ASYNC_DEFAULTS: dict[str, Any] = {
    "async_training.staleness_threshold": 0.1,
    "async_training.trigger_parameter_sync_step": 4,
    "async_training.require_batches": 1,
    "async_training.partial_rollout": True,
    "algorithm.rollout_correction.bypass_mode": True,
    "rollout.total_rollout_steps": 100,
}
