"""What share of a GPU's figures in `hardware.py` a run reaches: every constant of the planner, with its source."""

# Matrix multiplications reach PEAK · w / (w + HALF) of a GPU's FLOP/s, w being the width of the narrower side. Fitted
# to benchmarks/results/trainer_throughput_policy_cuda.json (w 768: 18 %) and h100_gsm8k_grpo_qwen3_0.6b.json (w 1024:
# 22 %).
PEAK = 0.45
HALF = 1024
# Shares of a link's and of a memory's bandwidth. Not measured here; usual values of NCCL and of decoding kernels.
LINK = 0.7
NETWORK = 0.7
MEMORY = 0.6
# Communication that computation does not hide: gradients behind backward, keys and values behind attention; tensor
# parallel and expert exchanges stand in the way of all that follows. Not measured here.
EXPOSED = {"dp": 0.4, "cp": 0.5, "tp": 1.0, "ep": 1.0, "pp": 1.0}
# Seconds of a decoding step beside memory and arithmetic, and for every all-reduce of a layer. Not measured here.
DECODE_STEP = 4e-3
ALL_REDUCE = 15e-6
# Bytes a second of a weight update, from gathering to the last acknowledgement, and its fixed seconds, from
# benchmarks/results/h200x2_nccl_weight_update.json for the latter; the former is not measured for a large model.
TRANSFER = 10e9
TRANSFER_START = 0.1
# The longest of a batch's responses over their mean, where only the limit is known: half of them end halfway.
MEAN_OF_LONGEST = 0.5
# Imbalance of packed micro-batches over the data-parallel ranks. Not measured here.
IMBALANCE = 1.05
