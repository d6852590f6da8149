export ACTOR_TP=4
export MODEL=/models/qwen3-8b
python3 -m siirl.client.main_dag data.train_batch_size=128 data.train_files=/data/train.parquet \
    data.max_prompt_length=2048 data.max_response_length=4096 actor_rollout_ref.model.path=$MODEL \
    actor_rollout_ref.actor.strategy=megatron actor_rollout_ref.actor.megatron.tensor_model_parallel_size=$ACTOR_TP \
    actor_rollout_ref.rollout.tensor_model_parallel_size=4 actor_rollout_ref.rollout.n=8 \
    trainer.n_gpus_per_node=8 trainer.nnodes=1
