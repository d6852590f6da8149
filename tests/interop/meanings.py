"""What settings of other systems mean here: `SETTING -> KEY = VALUE`, or `SETTING -> !` where training changes.

Without a setting the row is of that system's own default, as its published configuration has it. The bases are the
least that a run of each system needs.
"""

AREAL_BASE = """
rollout: {backend: "sglang:d4"}
actor: {backend: "megatron:d4", path: /models/qwen, optimizer: {type: adam}}
ref: {backend: "${actor.backend}"}
train_dataset: {path: /data/rows.jsonl, type: rl}
valid_dataset: {path: /data/test.jsonl}
gconfig: {n_samples: 4, max_new_tokens: 1024}
"""
AREAL = """
-> evaluator.temperature = 1.0
-> evaluator.n_samples = 4
train_dataset.path=openai/gsm8k -> evaluator.temperature = 0.6
eval_gconfig={temperature: 0.3, top_p: 0.9, n_samples: 2} -> evaluator.top_p = 0.9
eval_gconfig={greedy: true} -> evaluator.n_samples = 1
-> actor.ppo_n_minibatches = 4
-> actor.eps_clip = 0.2
-> actor.kl_ctl = 0.1
-> actor.kl_estimator = k1
-> actor.use_decoupled_loss = False
-> actor.behave_imp_weight_mode = disabled
-> actor.reward_norm.mean_level = None
-> actor.reward_norm.std_level = None
-> actor.adv_norm.std_level = None
-> actor.reward_scaling = 1.0
-> actor.reward_clip = 20.0
-> actor.discount = 1.0
-> actor.gae_lambda = 1.0
-> actor.optimizer.lr = 0.001
-> actor.optimizer.weight_decay = 0.01
-> actor.optimizer.beta2 = 0.999
-> actor.optimizer.warmup_steps_proportion = 0.001
-> actor.optimizer.gradient_clipping = 1.0
-> actor.loss_agg_mode = token_mean
-> actor.importance_sampling_level = token
-> rollout.max_head_offpolicyness = 0
-> train_dataset.batch_size = 1
-> total_train_epochs = 1
-> gconfig.temperature = 1.0
-> rollout.sharing = resident
gconfig.max_new_tokens=2048 -> gconfig.max_new_tokens = 2048
actor.ppo_n_minibatches=2 -> actor.ppo_n_minibatches = 2
actor.eps_clip_higher=0.28 -> actor.eps_clip_higher = 0.28
actor.c_clip=3.0 -> actor.c_clip = 3.0
actor.reward_scaling=10.0 -> actor.reward_scaling = 10.0
actor.reward_bias=-0.5 -> actor.reward_bias = -0.5
actor.kl_ctl=0.0 -> ref = None
actor.reward_norm={mean_level: group, std_level: group} -> actor.reward_norm.std_level = group
actor.reward_norm={mean_level: group, std_level: group} -> actor.reward_norm.std_unbiased = True
actor.reward_norm={mean_level: group, std_level: null} -> actor.reward_norm.std_level = None
actor.reward_norm={mean_level: group} -> actor.reward_norm.std_level = batch
actor.adv_norm={} -> actor.adv_norm.mean_level = None
actor.adv_norm={mean_level: batch, std_level: batch} -> actor.adv_norm.mean_level = batch
actor.reward_norm={mean_level: group, mean_leave1out: true} -> actor.reward_norm.mean_leave1out = True
actor.use_decoupled_loss=true -> actor.use_decoupled_loss = True
actor.recompute_logprob=true -> actor.use_decoupled_loss = True
actor.use_decoupled_loss=true actor.rejection_sampling={upper: 2.0} -> actor.behave_imp_weight_mode = token_mask
actor.use_decoupled_loss=true actor.rejection_sampling={upper: 2.0} -> actor.behave_imp_weight_cap = 2.0
actor.use_decoupled_loss=true actor.rejection_sampling={level: sequence, action: clamp} -> actor.behave_imp_weight_mode = geometric_truncate
actor.use_decoupled_loss=true actor.rejection_sampling={upper: 2.0, lower: 0.5} -> actor.behave_imp_weight_floor = 0.5
actor.use_decoupled_loss=true actor.rejection_sampling={level: sequence} -> actor.behave_imp_weight_floor = 0
actor.use_decoupled_loss=true actor.rejection_sampling={metric: kl_k2} -> !
actor.use_decoupled_loss=true actor.behav_imp_weight_cap=3.0 -> actor.behave_imp_weight_cap = 3.0
actor.overlong_reward_penalty=true actor.overlong_tokens=100 actor.overlong_penalty_factor=0.5 -> actor.overlong_penalty_factor = 0.5
actor.overlong_penalty_factor=0.5 -> actor.overlong_penalty_factor = 0.0
actor.importance_sampling_level=sequence -> actor.importance_sampling_level = sequence
actor.scheduling_spec=[{env_vars: {A: 1}}] -> actor.env_vars.A = "1"
critic={path: /models/critic, ppo_n_minibatches: 4} -> algorithm = ppo
critic={path: /models/critic, ppo_n_minibatches: 4} -> critic.eps_clip = 0.5
critic={ppo_n_minibatches: 2} -> !
rollout.max_concurrent_rollouts=64 -> rollout.max_concurrent_rollouts = 256
rollout.agent={tool_call_parser: qwen25} -> episode.tool_call_parser = qwen25
-> rollout.router_replay = "off"
rollout.return_routed_experts=true -> rollout.router_replay = auto
rollout.return_routed_experts=false -> rollout.router_replay = "off"
actor.path=/models/Qwen2.5-VL-3B-Instruct -> actor.megatron.bridge_type = megatron-bridge
actor.path=/models/Qwen2.5-VL-3B-Instruct train_dataset.path=hiyouga/geometry3k -> actor.path = /models/Qwen2.5-VL-3B-Instruct
actor.path=/models/Qwen2-VL-7B -> !
actor.path=/models/Qwen3-VL-30B-A3B-Instruct -> actor.megatron.bridge_type = megatron-bridge
train_dataset.path=BUAADreamer/clevr_count_70k -> !
rollout.return_routed_experts=true sglang.enable_return_routed_experts=true actor.megatron.enable_router_replay=true -> rollout.router_replay = auto
rollout.scheduling_strategy={type: colocation, target: actor} -> allocation_mode = "sglang:d4|megatron:d4"
rollout.scheduling_strategy={type: colocation, target: actor} -> cluster.n_nodes = 1
rollout.scheduling_strategy={type: colocation, target: actor} enable_offload=true -> rollout.sharing = alternate
train_dataset.max_length=512 -> train_dataset.max_prompt_length = 512
train_dataset.max_length=512 -> train_dataset.overlong_prompts = drop
train_dataset.path=openai/gsm8k -> train_dataset.name = main
train_dataset.path=openai/gsm8k -> reward.type = gsm8k
saver={freq_epochs: 1, freq_steps: 5} -> saver.freq_steps = 5
recover={mode: on} -> recover.mode = auto
actor.use_sapo_loss=true -> algorithm = sapo
actor.use_sapo_loss=true actor.sapo_tau_neg=1.5 -> actor.sapo_tau_neg = 1.5
actor.m2_threshold=0.04 -> !
dynamic_bs=true -> !
teacher={path: /models/teacher} -> !
train_dataset.type=sft -> algorithm = sft
train_dataset.type=sft -> actor.ppo_n_minibatches = 1
train_dataset.type=rw -> !
train_dataset.type=dpo actor.beta=0.3 -> actor.dpo_beta = 0.3
train_dataset.type=dpo -> gconfig.n_samples = 2
gconfig.stop_token_ids=[5,7] -> gconfig.stop_token_ids = [5, 7]
gconfig.top_k=20 -> gconfig.top_k = 20
gconfig.top_k=100000000 -> gconfig.top_k = -1
gconfig.top_p=0.9 -> !
gconfig.greedy=true -> !
actor.temperature=0.5 -> !
actor.no_such_key=1 -> !
"""
VERL_BASE = """python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_files=/data/train.parquet
data.val_files=/data/test.parquet actor_rollout_ref.model.path=/models/qwen actor_rollout_ref.rollout.name=sglang
actor_rollout_ref.rollout.tensor_model_parallel_size=2 actor_rollout_ref.actor.strategy=megatron
actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2 trainer.n_gpus_per_node=8 trainer.nnodes=1
"""
_VERL = """
-> train_dataset.batch_size = 1024
-> actor.ppo_n_minibatches = 4
-> train_dataset.max_prompt_length = 512
-> gconfig.max_new_tokens = 512
-> train_dataset.overlong_prompts = refuse
-> train_dataset.prompt_field = prompt
-> train_dataset.answer_field = reward_model.ground_truth
-> gconfig.n_samples = 1
-> gconfig.temperature = 1.0
-> actor.eps_clip = 0.2
-> actor.eps_clip_higher = 0.2
-> actor.c_clip = 3.0
-> actor.loss_agg_mode = token_mean
-> actor.entropy_coeff = 0.0
-> actor.kl_loss_coef = 0.0
-> actor.kl_ctl = 0.0
-> ref = None
-> actor.use_decoupled_loss = True
-> actor.behave_imp_weight_mode = disabled
-> actor.reward_norm.mean_level = group
-> actor.reward_norm.std_level = group
-> actor.reward_norm.std_unbiased = True
-> actor.adv_norm.mean_level = None
-> actor.optimizer.lr = 1e-06
-> actor.optimizer.weight_decay = 0.01
-> actor.optimizer.beta2 = 0.999
-> actor.optimizer.gradient_clipping = 1.0
-> actor.optimizer.lr_scheduler_type = constant
-> total_train_epochs = 30
-> rollout.sharing = alternate
-> rollout.max_head_offpolicyness = 0
-> evaluator.temperature = 0.0
-> train_dataset.shuffle = True
A.ppo_mini_batch_size=128 -> actor.ppo_n_minibatches = 8
A.ppo_mini_batch_size=$((128*2)) -> actor.ppo_n_minibatches = 4
A.clip_ratio_low=0.1 -> actor.eps_clip = 0.1
A.clip_ratio_high=0.28 -> actor.eps_clip_higher = 0.28
A.clip_ratio_c=10.0 -> actor.c_clip = 10.0
A.loss_agg_mode=seq-mean-token-mean -> actor.loss_agg_mode = sequence_mean
A.loss_agg_mode=seq-mean-token-sum-norm -> actor.loss_agg_mode = constant
A.loss_agg_mode=seq-mean-token-sum -> actor.loss_agg_mode = sequence_sum
A.use_kl_loss=True -> actor.kl_loss_coef = 0.001
A.use_kl_loss=True -> actor.kl_estimator = k3
A.use_kl_loss=True A.kl_loss_coef=0.5 A.kl_loss_type=mse -> actor.kl_estimator = k2
A.kl_loss_coef=0.5 -> actor.kl_loss_coef = 0.0
A.entropy_coeff=0.01 -> actor.entropy_coeff = 0.01
A.optim.lr=2e-6 -> actor.optimizer.lr = 2e-06
A.optim.lr_warmup_steps=10 -> actor.optimizer.warmup_steps = 10
A.optim.lr_warmup_steps_ratio=0.1 -> actor.optimizer.warmup_steps_proportion = 0.1
A.optim.betas=[0.8,0.9] -> actor.optimizer.beta1 = 0.8
A.optim.clip_grad=0.5 -> actor.optimizer.gradient_clipping = 0.5
A.tis_imp_ratio_cap=2.0 -> actor.behave_imp_weight_mode = token_truncate
A.ppo_epochs=2 -> actor.ppo_epochs = 2
A.ppo_epochs=2 algorithm.adv_estimator=gae -> !
A.ppo_epochs=2 algorithm.adv_estimator=gae critic.ppo_epochs=1 -> actor.ppo_epochs = 2
A.policy_loss.loss_mode=gspo -> actor.importance_sampling_level = sequence
A.policy_loss.loss_mode=gspo -> actor.c_clip = None
A.policy_loss.loss_mode=kl_cov -> !
A.megatron.param_offload=True -> actor.megatron.param_offload = True
A.megatron.override_transformer_config.moe_router_dtype=fp32 -> actor.megatron.override_transformer_config.moe_router_dtype = fp32
A.megatron.override_transformer_config.recompute_granularity=full -> actor.megatron.recompute_method = uniform
algorithm.norm_adv_by_std_in_grpo=False -> actor.reward_norm.std_level = None
algorithm.adv_estimator=gae -> algorithm = ppo
algorithm.adv_estimator=gae -> critic.eps_clip = 0.5
algorithm.adv_estimator=gae -> critic.optimizer.lr = 1e-05
algorithm.adv_estimator=gae -> actor.adv_norm.std_level = batch
algorithm.adv_estimator=gae trainer.critic_warmup=3 -> critic.warmup_steps = 3
algorithm.adv_estimator=gae algorithm.lam=0.95 -> actor.gae_lambda = 0.95
algorithm.adv_estimator=gae algorithm.use_kl_in_reward=True -> actor.kl_ctl = 0.001
algorithm.adv_estimator=rloo -> actor.reward_norm.mean_leave1out = True
algorithm.adv_estimator=rloo -> actor.loss_agg_mode = token_mean
algorithm.adv_estimator=reinforce_plus_plus -> actor.adv_norm.mean_level = batch
algorithm.adv_estimator=reinforce_plus_plus_baseline -> actor.reward_norm.mean_level = group
algorithm.adv_estimator=remax -> !
algorithm.use_kl_in_reward=True -> !
algorithm.filter_groups.enable=True -> actor.dynamic_sampling = True
reward_model.overlong_buffer.enable=True reward_model.overlong_buffer.len=64 reward_model.overlong_buffer.penalty_factor=1.0 -> actor.overlong_tokens = 64
data.filter_overlong_prompts=True -> train_dataset.overlong_prompts = drop
data.truncation=left -> train_dataset.overlong_prompts = truncate
data.truncation=right -> !
R.val_kwargs.n=4 -> evaluator.n_samples = 1
R.val_kwargs.n=4 R.val_kwargs.temperature=0.6 R.val_kwargs.do_sample=True -> evaluator.n_samples = 4
-> rollout.router_replay = "off"
A.router_replay.mode=R3 R.enable_rollout_routing_replay=True -> rollout.router_replay = auto
A.megatron.router_replay.mode=R3 R.enable_rollout_routing_replay=True -> rollout.router_replay = auto
R.enable_rollout_routing_replay=True -> rollout.router_replay = auto
R.enable_rollout_routing_replay=False -> rollout.router_replay = "off"
A.router_replay.mode=disabled -> rollout.router_replay = "off"
A.router_replay.mode=R2 -> !
A.megatron.router_replay.mode=R2 -> !
R.val_kwargs.temperature=0.6 R.val_kwargs.do_sample=True -> evaluator.temperature = 0.6
R.val_kwargs.temperature=0.6 R.val_kwargs.do_sample=True R.val_kwargs.top_p=0.7 -> evaluator.top_p = 0.7
R.val_kwargs.temperature=0.6 R.val_kwargs.do_sample=True R.val_kwargs.top_k=20 -> evaluator.top_k = 20
R.val_kwargs.top_p=0.7 -> evaluator.top_p = 1.0
R.top_p=0.9 -> !
R.top_p=0.9 R.top_k=50 -> gconfig.top_p = 0.9
R.top_p=0.9 R.top_k=50 -> gconfig.top_k = 50
algorithm.use_kl_in_reward=True algorithm.kl_penalty=low_var_kl -> !
algorithm.adv_estimator=gae algorithm.use_kl_in_reward=True A.use_kl_loss=True A.kl_loss_coef=0.5 -> actor.kl_estimator = None
M.lora_rank=64 -> actor.use_lora = True
M.lora_rank=64 M.lora_alpha=32 -> actor.lora_rank = 64
trainer.total_training_steps=100 -> total_train_steps = 100
my.own=1 -> !
data.train_files=/data/geo3k/train.parquet -> !
data.image_key=images -> !
M.path=/models/Qwen2.5-VL-7B-Instruct data.video_key=clips -> !
M.path=/models/Qwen2.5-VL-7B-Instruct -> actor.freeze_vision_tower = False
M.path=/models/Qwen2.5-VL-7B-Instruct A.freeze_vision_tower=True -> actor.freeze_vision_tower = True
M.path=/models/Qwen3-VL-8B-Instruct data.image_key=pictures -> train_dataset.image_field = pictures
M.path=/models/Qwen3-VL-8B-Instruct data.image_key=pictures -> valid_dataset.image_field = pictures
M.path=/models/Qwen3-VL-8B-Instruct M.lora_rank=8 -> !
M.path=/models/Qwen3-VL-8B-Instruct M.lora_rank=8 M.exclude_modules='.*visual.*' -> actor.lora_rank = 8
M.path=/models/Qwen3-VL-30B-A3B-Instruct -> actor.megatron.bridge_type = megatron-bridge
M.path=/models/Qwen3-VL-30B-A3B-Instruct +actor_rollout_ref.actor.megatron.override_transformer_config.recompute_granularity=full -> actor.megatron.recompute_granularity = selective
M.path=/models/GLM-4.1V-9B-Thinking -> !
M.path=/models/MiniCPM-o-2_6 -> !
"""
VERL = (
    _VERL
    + """
R.val_kwargs.temperature=1.0 -> evaluator.temperature = 1.0
trainer.v1.trainer_mode=colocate_async -> !
algorithm.rollout_correction.rollout_is=token algorithm.rollout_correction.rollout_is_threshold=3.0 -> actor.behave_imp_weight_cap = 3.0
algorithm.rollout_correction.rollout_is=sequence -> actor.behave_imp_weight_mode = sequence_truncate
algorithm.rollout_correction.rollout_is=token algorithm.rollout_correction.rollout_is_threshold=0.5_4.0 -> actor.behave_imp_weight_mode = token_mask
algorithm.rollout_correction.rollout_is=token algorithm.rollout_correction.rollout_is_threshold=0.5_4.0 -> actor.behave_imp_weight_cap = 4.0
algorithm.rollout_correction.rollout_is=token algorithm.rollout_correction.rollout_is_threshold=0.5_4.0 -> actor.behave_imp_weight_floor = 0.5
algorithm.rollout_correction.rollout_token_veto_threshold=1.0e-4 -> actor.behave_imp_weight_veto = 0.0001
algorithm.rollout_correction.bypass_mode=True -> actor.use_decoupled_loss = False
"""
)
SIIRL_BASE = VERL_BASE.replace("verl.trainer.main_ppo", "siirl.main_dag")
SIIRL = (
    _VERL.replace("lr_scheduler_type = constant", "lr_scheduler_type = linear")
    + """
R.val_kwargs.temperature=1.0 -> evaluator.temperature = 0.0
A.strategy=fsdp -> actor.optimizer.lr_scheduler_type = constant
A.optim.lr_decay_style=cosine -> actor.optimizer.lr_scheduler_type = cosine
A.use_cpgd_loss=True A.policy_drift_coeff=0.001 -> actor.policy_drift_coeff = 0.001
A.use_cpgd_loss=True A.policy_drift_coeff=0.001 -> algorithm = grpo
A.policy_drift_coeff=0.001 -> actor.policy_drift_coeff = 0.0
algorithm.adv_estimator=cpgd A.policy_loss.loss_mode=cpgd -> algorithm = cpgd
algorithm.adv_estimator=cpgd A.policy_loss.loss_mode=cpgd -> actor.policy_drift_coeff = 0.0
algorithm.weight_factor_in_cpgd=naive -> !
"""
)
SLIME_BASE = """python3 train.py --actor-num-nodes 1 --actor-num-gpus-per-node 8 --colocate --hf-checkpoint /models/qwen
--prompt-data /data/rows.jsonl --rollout-batch-size 32 --rollout-max-response-len 1024 --num-rollout 100
--eval-prompt-data aime /data/aime.jsonl
"""
SLIME = """
-> evaluator.temperature = 1.0
--rollout-temperature 0.8 -> evaluator.temperature = 0.8
--rollout-temperature 0.8 --eval-temperature 0.6 -> evaluator.temperature = 0.6
--eval-temperature 0 -> evaluator.temperature = 0
--eval-top-p 0.7 -> evaluator.top_p = 0.7
--eval-top-k 20 -> evaluator.top_k = 20
--rollout-top-p 0.9 --rollout-top-k 40 -> evaluator.top_k = 40
--eval-config sets.yaml -> valid_dataset.path = "my_file.py:run"
-> algorithm = grpo
-> gconfig.n_samples = 1
-> actor.ppo_n_minibatches = 1
-> actor.loss_agg_mode = sequence_mean
-> actor.eps_clip = 0.2
-> actor.eps_clip_higher = 0.2
-> actor.c_clip = None
-> actor.entropy_coeff = 0.0
-> actor.kl_loss_coef = 0.0
-> actor.kl_ctl = 0.0
-> actor.use_decoupled_loss = True
-> actor.behave_imp_weight_mode = disabled
-> actor.adv_norm.mean_level = None
-> actor.discount = 1.0
-> actor.optimizer.lr = 1e-06
-> actor.optimizer.lr_scheduler_type = linear
-> actor.optimizer.weight_decay = 0.01
-> actor.optimizer.beta2 = 0.999
-> actor.optimizer.gradient_clipping = 1.0
-> gconfig.temperature = 1.0
-> train_dataset.shuffle = False
-> train_dataset.prompt_field = input
-> rollout.sharing = alternate
-> rollout.max_head_offpolicyness = 0
-> total_train_steps = 100
-> valid_dataset.path = /data/aime.jsonl
-> allocation_mode = "sglang:d8|megatron:d8"
--n-samples-per-prompt 8 -> actor.reward_norm.mean_level = group
--n-samples-per-prompt 8 -> actor.reward_norm.std_level = group
--n-samples-per-prompt 8 -> actor.reward_norm.std_unbiased = True
--n-samples-per-prompt 8 --disable-grpo-std-normalization -> actor.reward_norm.std_level = None
--n-samples-per-prompt 8 --disable-rewards-normalization -> actor.reward_norm.mean_level = None
--n-samples-per-prompt 8 --global-batch-size 64 -> actor.ppo_n_minibatches = 4
--n-samples-per-prompt 8 --global-batch-size $((32 * 4)) -> actor.ppo_n_minibatches = 2
--num-steps-per-rollout 4 -> actor.ppo_n_minibatches = 4
--calculate-per-token-loss -> actor.loss_agg_mode = token_mean
--normalize-advantages -> actor.adv_norm.std_level = batch
--use-kl-loss --kl-loss-coef 0.01 --kl-loss-type low_var_kl -> actor.kl_estimator = k3
--use-kl-loss --kl-loss-coef 0.01 --kl-loss-type k2 -> actor.kl_loss_coef = 0.01
--advantage-estimator reinforce_plus_plus --kl-coef 0.01 --kl-loss-type k3 -> !
--kl-loss-coef 0.01 -> actor.kl_loss_coef = 0.0
--use-kl-loss --kl-loss-coef 0.01 -> !
--eps-clip-high 0.28 -> actor.eps_clip_higher = 0.28
--eps-clip 0.1 -> actor.eps_clip = 0.1
--eps-clip 0.1 -> actor.eps_clip_higher = 0.1
--eps-clip-c 3.0 -> actor.c_clip = 3.0
--entropy-coef 0.001 -> actor.entropy_coeff = 0.001
--use-rollout-logprobs -> actor.use_decoupled_loss = False
--use-tis -> actor.behave_imp_weight_mode = token_truncate
--use-tis -> actor.behave_imp_weight_cap = 2.0
--use-tis --tis-clip 5.0 -> actor.behave_imp_weight_cap = 5.0
--use-tis --tis-clip-low 0.5 -> actor.behave_imp_weight_floor = 0.5
-> rollout.router_replay = "off"
--use-rollout-routing-replay -> rollout.router_replay = auto
--use-routing-replay --use-rollout-routing-replay -> rollout.router_replay = auto
--use-routing-replay -> !
--hf-checkpoint /models/Qwen3-VL-8B --multimodal-keys '{"image": "pictures"}' -> train_dataset.image_field = pictures
--hf-checkpoint /models/Qwen3-VL-8B --multimodal-keys '{"image": "pictures"}' -> actor.megatron.bridge_type = megatron-bridge
--hf-checkpoint /models/Qwen3-VL-8B --multimodal-keys '{"video": "clips"}' -> !
--hf-checkpoint /models/Qwen3.5-27B --multimodal-keys '{"image": "images"}' -> actor.megatron.bridge_type = megatron-bridge
--advantage-estimator gspo --n-samples-per-prompt 8 -> actor.importance_sampling_level = sequence
--advantage-estimator gspo --n-samples-per-prompt 8 -> actor.eps_clip = 0.2
--advantage-estimator reinforce_plus_plus --normalize-advantages -> algorithm = reinforce_pp
--advantage-estimator ppo -> critic.eps_clip = 0.2
--advantage-estimator ppo --num-critic-only-steps 2 -> critic.warmup_steps = 2
--lr 5e-6 -> actor.optimizer.lr = 5e-06
--min-lr 5e-7 -> actor.optimizer.min_lr_ratio = 0.5
--lr-warmup-iters 5 -> actor.optimizer.warmup_steps = 5
--lr-warmup-fraction 0.1 -> actor.optimizer.warmup_steps_proportion = 0.1
--adam-beta2 0.98 -> actor.optimizer.beta2 = 0.98
--lr-decay-style constant -> actor.optimizer.lr_scheduler_type = constant
--rollout-shuffle -> train_dataset.shuffle = True
--dynamic-sampling-filter-path slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std -> actor.dynamic_sampling = True
--tensor-model-parallel-size 2 --expert-model-parallel-size 4 --sglang-ep-size 4 --rollout-num-gpus-per-engine 4 -> allocation_mode = "sglang:d2t4e4|megatron:(attn:d4t2|ffn:t1e4)"
--apply-chat-template-kwargs '{"enable_thinking": false}' -> train_dataset.chat_template_kwargs.enable_thinking = False
--partial-rollout -> !
--loss-type sft_loss -> !
--loss-type sft_loss --calculate-per-token-loss -> algorithm = sft
--rollout-stop-token-ids 5 7 -> gconfig.stop_token_ids = [5, 7]
--use-opd -> !
--rollout-top-p 0.9 -> !
--custom-loss-function-path my.loss -> !
--no-such-option 1 -> !
"""
ROLL_BASE = """
exp_name: demo
pretrain: /models/qwen
rollout_batch_size: 64
response_length: 1024
num_return_sequences_in_group: 8
adv_estimator: grpo
num_gpus_per_node: 8
actor_train:
  training_args: {per_device_train_batch_size: 1, gradient_accumulation_steps: 64}
  data_args: {file_name: data/math.jsonl}
  strategy_args: {strategy_name: megatron_train, strategy_config: {tensor_model_parallel_size: 2}}
  device_mapping: list(range(0,4))
actor_infer:
  strategy_args: {strategy_name: sglang, strategy_config: {}}
  generating_args: {top_p: 1, top_k: -1}
  num_gpus_per_worker: 1
  device_mapping: list(range(4,8))
"""
ROLL = """
-> algorithm = grpo
-> actor.ppo_n_minibatches = 4
-> actor.reward_norm.mean_level = group
-> actor.reward_norm.std_level = group
-> actor.reward_norm.std_unbiased = True
-> actor.adv_norm.mean_level = None
-> actor.eps_clip = 0.2
-> actor.eps_clip_higher = 0.2
-> actor.c_clip = None
-> actor.loss_agg_mode = sequence_mean
-> actor.kl_ctl = 0.0
-> actor.kl_loss_coef = 0.0
-> ref = None
-> actor.entropy_coeff = 0.0
-> actor.use_decoupled_loss = True
-> actor.behave_imp_weight_mode = disabled
-> actor.discount = 1.0
-> actor.optimizer.lr = 5e-05
-> actor.optimizer.lr_scheduler_type = linear
-> actor.optimizer.weight_decay = 0.0
-> actor.optimizer.beta2 = 0.999
-> actor.optimizer.gradient_clipping = 1.0
-> gconfig.temperature = 0.95
-> total_train_steps = 500
-> train_dataset.max_prompt_length = 1024
-> train_dataset.path = data/math.jsonl
-> rollout.max_head_offpolicyness = 0
-> allocation_mode = "megatron:d2t2+sglang:d4"
actor_train.training_args.gradient_accumulation_steps=32 -> actor.ppo_n_minibatches = 8
actor_train.training_args.learning_rate=1e-6 -> actor.optimizer.lr = 1e-06
actor_train.training_args.warmup_steps=20 -> actor.optimizer.warmup_steps = 20
actor_train.training_args.warmup_ratio=0.1 -> actor.optimizer.warmup_steps_proportion = 0.1
actor_train.training_args={learning_rate: 1.0e-6, lr_scheduler_kwargs: {min_lr: 1.0e-7}} -> actor.optimizer.min_lr_ratio = 0.1
actor_train.training_args.lr_scheduler_type=constant -> actor.optimizer.lr_scheduler_type = constant
adv_estimator=reinforce -> actor.reward_norm.mean_level = None
adv_estimator=reinforce norm_mean_type=batch norm_std_type=group -> actor.reward_norm.std_level = group
adv_estimator=reinforce whiten_advantages=true -> actor.adv_norm.std_level = batch
pretrain=/models/Qwen3-VL-4B-Thinking -> actor.megatron.bridge_type = megatron-bridge
pretrain=/models/Qwen3-VL-4B-Thinking -> actor.ppo_n_minibatches = 4
pretrain=/models/Qwen3-VL-4B-Thinking actor_train.model_args.freeze_module_prefix=vision_model -> actor.freeze_vision_tower = True
pretrain=/models/Qwen3-VL-4B-Thinking actor_train.model_args.freeze_module_prefix=vision_model.blocks -> !
pretrain=/models/Qwen3-VL-4B-Thinking actor_train.data_args.video_folder=/clips -> !
pretrain=/models/Qwen3-VL-30B-A3B-Instruct -> actor.ppo_n_minibatches = 4
pretrain=Qwen/Qwen3.5-27B -> allocation_mode = "megatron:d2t2+sglang:d4"
pretrain=Qwen/Qwen3.5-27B actor_train.data_args.file_name=data/geometry3k/ -> actor.megatron.bridge_type = megatron-bridge
adv_estimator=reinforce reward_clip=10 -> actor.reward_clip = 10
adv_estimator=gae value_clip=0.5 -> critic.eps_clip = 0.5
adv_estimator=gae value_clip=0.5 -> actor.gae_lambda = 0.95
pg_clip=0.1 -> actor.eps_clip = 0.1
use_pg_clip_range=true pg_clip_high=0.28 -> actor.eps_clip_higher = 0.28
dual_clip_loss=true -> actor.c_clip = 1.4
loss_agg_mode=token-mean -> actor.loss_agg_mode = token_mean
use_kl_loss=true kl_loss_coef=0.001 -> actor.kl_loss_coef = 0.001
use_kl_loss=true kl_loss_coef=0.001 -> actor.kl_estimator = k3
add_token_level_kl=true -> actor.kl_ctl = 0.2
init_kl_coef=0.5 -> actor.kl_ctl = 0.0
importance_sampling=seq -> actor.importance_sampling_level = sequence
async_generation_ratio=1 -> rollout.max_head_offpolicyness = 1
is_offload_states=true -> rollout.sharing = resident
actor_infer.device_mapping=list(range(0,4)) -> rollout.sharing = alternate
reward_clip=10 -> actor.reward_clip = None
system_envs={A: 1} -> actor.env_vars.A = "1"
max_steps=50 -> total_train_steps = 50
num_return_sequences_in_group=4 -> actor.ppo_n_minibatches = 2
validation={data_args: {file_name: [data/test.jsonl]}, generating_args: {temperature: 0.6}} -> evaluator.temperature = 0.6
validation={data_args: {file_name: [data/test.jsonl]}} -> evaluator.temperature = 0.95
validation={data_args: {file_name: [data/test.jsonl]}} -> evaluator.top_p = 0.7
validation={data_args: {file_name: [data/test.jsonl]}, generating_args: {top_k: 30}} -> evaluator.top_k = 30
advantage_clip=2.0 -> actor.advantage_clip = 2.0
max_len_mask=true -> actor.mask_truncated = True
max_len_mask=false -> actor.mask_truncated = False
max_len_mask=true entropy_loss_coef=0.01 -> !
max_len_mask=true adv_estimator=gae value_clip=0.5 -> !
max_len_mask=true train_env_manager={group_size: 8} -> actor.mask_truncated = False
difficulty_mask=true -> actor.group_reward_above = 0.0
difficulty_mask=true -> actor.group_reward_below = 1.0
difficulty_mask=true difficulty_low_threshold=0.1 -> actor.group_reward_above = 0.1
difficulty_mask=true difficulty_high_threshold=0.95 -> actor.group_reward_below = 0.95
difficulty_high_threshold=0.95 -> actor.group_reward_below = None
error_max_len_clip=true -> !
adv_estimator=gae -> critic.eps_clip = None
actor_train.model_args={freeze_module_prefix: vision_model} -> algorithm = grpo
actor_train.model_args={freeze_module_prefix: model.layers} -> !
reward_scale=false -> actor.reward_scaling = 1.0
train_env_manager={group_size: 4} -> gconfig.n_samples = 4
train_env_manager={group_size: 4} -> train_dataset.batch_size = 16
train_env_manager={group_size: 4} -> actor.ppo_n_minibatches = 1
train_env_manager={group_size: 4} -> actor.reward_norm.mean_level = None
train_env_manager={group_size: 4} reward_normalization={grouping: traj_group_id, method: mean_std} -> actor.reward_norm.std_level = group
train_env_manager={group_size: 4} reward_normalization={grouping: traj_group_id, method: mean} -> actor.reward_norm.std_level = None
train_env_manager={group_size: 4} reward_normalization={grouping: traj_group_id, method: mean} -> actor.reward_norm.mean_level = group
train_env_manager={group_size: 4} reward_normalization={method: mean_std} -> actor.reward_norm.mean_level = batch
train_env_manager={group_size: 4} reward_normalization={grouping: tags, method: mean_std} -> !
train_env_manager={group_size: 4} reward_clip=2.0 -> actor.reward_clip = 2.0
train_env_manager={group_size: 4} reward_normalization={method: mean_std} reward_clip=2.0 -> actor.reward_norm.clip = 2.0
train_env_manager={group_size: 4} adv_estimator=step_reinforce -> algorithm = turn_reinforce
train_env_manager={group_size: 4} adv_estimator=step_reinforce -> actor.turn_discount = 0.95
train_env_manager={group_size: 4} adv_estimator=step_reinforce -> actor.turns_per_minibatch = 128
train_env_manager={group_size: 4} adv_estimator=step_reinforce -> actor.optimizer.lr_decay_steps = 250
train_env_manager={group_size: 4} adv_estimator=step_reinforce -> episode.history = as_deployed
train_env_manager={group_size: 4} adv_estimator=step_reinforce -> actor.loss_agg_mode = turn_mean
train_env_manager={group_size: 4} adv_estimator=step_reinforce loss_agg_mode=token-mean -> actor.loss_agg_mode = token_mean
train_env_manager={group_size: 4} adv_estimator=step_reinforce loss_agg_mode=seq-mean-token-sum -> !
train_env_manager={group_size: 4} adv_estimator=step_reinforce batch_adjust_mode=delete -> !
train_env_manager={group_size: 4} adv_estimator=gigpo reward_normalization={grouping: traj_group_id, method: mean} -> algorithm = gigpo
train_env_manager={group_size: 4} adv_estimator=gigpo reward_normalization={grouping: traj_group_id} step_reward_weight=0.5 -> actor.state_coef = 0.5
train_env_manager={group_size: 4} adv_estimator=gigpo reward_normalization={grouping: batch, method: mean} -> !
train_env_manager={group_size: 4} adv_estimator=gigpo reward_normalization={grouping: traj_group_id} episode_reward_weight=0.5 -> !
train_env_manager={group_size: 4} max_tokens_per_step=64 -> gconfig.max_new_tokens = 64
train_env_manager={group_size: 4} importance_sampling=seq -> actor.importance_sampling_level = token
ppo_epochs=2 -> actor.ppo_epochs = 2
actor_train.worker_cls=roll.pipeline.rlvr.actor_pg_worker.ActorPGWorker actor_train.pg_variant=topr -> algorithm = topr
actor_train.worker_cls=roll.pipeline.rlvr.actor_pg_worker.ActorPGWorker actor_train.pg_variant=ppo -> algorithm = grpo
actor_train.worker_cls=roll.pipeline.rlvr.actor_pg_worker.ActorPGWorker actor_train.pg_variant=tis -> !
actor_train.worker_cls=roll.pipeline.rlvr.actor_pg_worker.ActorPGWorker -> !
adv_estimator=gigpo -> !
-> rollout.router_replay = "off"
actor_infer.generating_args={top_p: 0.99, top_k: 100} -> gconfig.top_p = 0.99
actor_infer.generating_args={top_p: 0.99, top_k: 100} -> gconfig.top_k = 100
actor_infer.generating_args={} -> gconfig.top_p = 0.7
actor_infer.generating_args={} -> gconfig.top_k = 50
add_token_level_kl=true kl_penalty=mse -> !
use_opd=true -> !
sft_train={model_args: {dtype: bf16}} -> algorithm = sft
student_train={model_args: {dtype: bf16}} teacher={model_args: {model_name_or_path: /models/t}} -> algorithm = distill
student_train={model_args: {dtype: bf16}} teacher={a: {opd_kl_coef: 1}, b: {opd_kl_coef: 1}} -> !
beta=0.2 -> actor.dpo_beta = 0.2
rollout_mock={enable: true, mode: dump} -> algorithm = grpo
rollout_mock={enable: true, mode: mock} -> !
train_env_manager={group_size: 4, tags: [A]} reward_normalization={grouping: tags, method: mean_std} -> actor.reward_norm.std_level = batch
train_env_manager={group_size: 4} batch_adjust_mode=delete -> !
actor_infer.generating_args={stop_strings: ["</code>"]} -> !
loss_agg_mode=seq-mean-token-sum -> actor.loss_agg_mode = sequence_sum
no_such_key=1 -> !
"""
TRINITY_BASE = """
name: demo
model: {model_path: /models/qwen, max_response_tokens: 1024, max_prompt_tokens: 256}
cluster: {node_num: 1, gpu_per_node: 8}
algorithm: {algorithm_type: grpo, repeat_times: 8}
buffer: {batch_size: 96, explorer_input: {taskset: {path: /data/rows.jsonl}}}
explorer: {rollout_model: {engine_num: 4, tensor_parallel_size: 1}}
synchronizer: {sync_interval: 1}
trainer: {trainer_config: {actor_rollout_ref: {actor: {strategy: megatron}}}}
"""
TRINITY = """
-> algorithm = grpo
-> gconfig.n_samples = 8
-> actor.ppo_n_minibatches = 1
-> actor.reward_norm.mean_level = group
-> actor.reward_norm.std_level = group
-> actor.reward_norm.std_unbiased = True
-> actor.adv_norm.mean_level = None
-> actor.eps_clip = 0.2
-> actor.eps_clip_higher = 0.2
-> actor.c_clip = 3.0
-> actor.loss_agg_mode = token_mean
-> actor.kl_loss_coef = 0.001
-> actor.kl_estimator = k2
-> actor.kl_ctl = 0.0
-> actor.entropy_coeff = 0.0
-> actor.use_decoupled_loss = False
-> actor.behave_imp_weight_mode = disabled
-> actor.optimizer.lr = 1e-06
-> actor.optimizer.beta2 = 0.999
-> actor.optimizer.weight_decay = 0.01
-> actor.optimizer.gradient_clipping = 1.0
-> train_dataset.batch_size = 96
-> train_dataset.prompt_field = prompt
-> train_dataset.answer_field = response
-> train_dataset.shuffle = False
-> train_dataset.max_prompt_length = 256
-> gconfig.max_new_tokens = 1024
-> gconfig.temperature = 1.0
-> rollout.max_head_offpolicyness = 0
-> allocation_mode = "sglang:d4+megatron:d4"
algorithm.policy_loss_fn_args={clip_range_low: 0.1, clip_range_high: 0.28} -> actor.eps_clip_higher = 0.28
algorithm.policy_loss_fn_args={clip_range: 0.3} -> actor.eps_clip = 0.3
algorithm.policy_loss_fn_args={clip_ratio_c: 5.0} -> actor.c_clip = 5.0
algorithm.policy_loss_fn_args={loss_agg_mode: seq-mean-token-mean} -> actor.loss_agg_mode = sequence_mean
algorithm.kl_loss_fn=none -> ref = None
algorithm.kl_loss_fn=k3 -> actor.kl_estimator = k3
algorithm.kl_loss_fn_args={kl_coef: 0.01} -> actor.kl_loss_coef = 0.01
algorithm.kl_penalty_fn=k1 algorithm.kl_loss_fn=none -> actor.kl_ctl = 0.001
algorithm.entropy_loss_fn_args={entropy_coef: 0.01} -> actor.entropy_coeff = 0.01
algorithm.entropy_loss_fn=none -> actor.entropy_coeff = 0.0
algorithm.bypass_old_logprobs=false -> actor.use_decoupled_loss = True
algorithm.advantage_fn_args={std_cal_level: batch} -> actor.reward_norm.std_level = batch
algorithm.algorithm_type=ppo -> algorithm = ppo
algorithm.algorithm_type=ppo -> actor.adv_norm.std_level = batch
algorithm.algorithm_type=ppo algorithm.advantage_fn_args={lam: 0.95} -> actor.gae_lambda = 0.95
algorithm.algorithm_type=ppo trainer.critic_warmup=2 -> critic.warmup_steps = 2
algorithm.algorithm_type=rloo -> actor.reward_norm.mean_leave1out = True
algorithm.algorithm_type=gspo -> actor.eps_clip = 0.0003
algorithm.algorithm_type=gspo -> actor.loss_agg_mode = sequence_mean
algorithm.algorithm_type=dapo -> actor.kl_loss_coef = 0.0
algorithm.algorithm_type=cispo -> actor.eps_clip_higher = 0.28
algorithm.optimizer={lr: 5.0e-6, lr_warmup_steps_ratio: 0.1} -> actor.optimizer.warmup_steps_proportion = 0.1
trainer.trainer_config.actor_rollout_ref.actor.optim={lr: 3.0e-6} -> actor.optimizer.lr = 3e-06
buffer.total_steps=20 -> total_train_steps = 20
synchronizer.sync_offset=1 -> rollout.max_head_offpolicyness = 1
buffer.explorer_input.taskset.path=openai/gsm8k -> reward.type = gsm8k
model={model_path: "${oc.env:MODEL,/models/other}", max_response_tokens: 512, max_model_len: 1536} -> actor.path = /models/other
model={model_path: /m, max_response_tokens: 512, max_model_len: 1536} -> train_dataset.max_prompt_length = 1024
model={model_path: /m, lora_configs: [{lora_rank: 8, lora_alpha: 4}]} -> actor.lora_rank = 8
buffer.explorer_input={taskset: {path: /d}, eval_tasksets: [{path: /e, split: test}, {path: /f}]} -> valid_dataset.path = /e
buffer.explorer_input={taskset: {path: /d}, eval_tasksets: [{path: /e}]} -> evaluator.temperature = 1.0
buffer.explorer_input={taskset: {path: /d}, eval_tasksets: [{path: /e, rollout_args: {temperature: 0.6, top_p: 0.8}}]} -> evaluator.top_p = 0.8
buffer.explorer_input={taskset: {path: /d}, eval_tasksets: [{path: /e}, {path: /f, name: aime, repeat_times: 4, rollout_args: {temperature: 0.6}}]} -> evaluator.datasets.aime.temperature = 0.6
buffer.explorer_input={taskset: {path: /d}, eval_tasksets: [{path: /e}, {path: /f, name: aime, repeat_times: 4, rollout_args: {temperature: 0.6}}]} -> evaluator.datasets.aime.n_samples = 4
-> train_dataset.overlong_prompts = truncate
-> rollout.router_replay = "off"
algorithm.enable_router_replay=true -> rollout.router_replay = auto
trainer.trainer_config.actor_rollout_ref.actor.router_replay={mode: R3} -> rollout.router_replay = auto
synchronizer.sync_interval=10 -> !
algorithm.algorithm_type=opmd -> !
algorithm.algorithm_type=sft -> !
algorithm.policy_loss_fn=sapo -> !
algorithm.algorithm_type=sapo -> !
algorithm.kl_loss_fn=k1 -> !
buffer.train_batch_size=100 -> !
mode=train -> !
model.top_p=0.9 -> !
no_such_section.key=1 -> !
model.model_path=/models/Qwen2.5-VL-3B-Instruct buffer.explorer_input.taskset.format={image_key: pictures} -> train_dataset.image_field = pictures
buffer.explorer_input.taskset.format={image_key: images} -> !
model.model_path=/models/Qwen2.5-VL-3B-Instruct buffer.explorer_input.taskset.format={video_key: clips} -> !
"""
SYSTEMS = {
    "areal": (AREAL_BASE, AREAL),
    "verl": (VERL_BASE, VERL),
    "siirl": (SIIRL_BASE, SIIRL),
    "slime": (SLIME_BASE, SLIME),
    "roll": (ROLL_BASE, ROLL),
    "trinity": (TRINITY_BASE, TRINITY),
}
