ray job submit -- python3 train_async.py --actor-num-nodes 1 --actor-num-gpus-per-node 4 --rollout-num-gpus 4 \
  --rollout-num-gpus-per-engine 2 --hf-checkpoint /models/qwen3-4b --prompt-data /data/dapo.jsonl --input-key prompt \
  --label-key label --num-rollout 3000 --rollout-batch-size 32 --n-samples-per-prompt 8 --lr 1e-6 \
  --rollout-max-response-len 8192 --rollout-temperature 0.8 --tensor-model-parallel-size 2 --sequence-parallel
