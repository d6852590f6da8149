"""The constants of the planner, each with its source: the share of the figures in `hardware.py` that a run reaches."""

# Matrix multiplications of training reach PEAK · w / (w + HALF) of a GPU's FLOP/s, w being the width of the narrower
# side. These and the seconds of launches are fitted together to the rows of benchmarks/results/planner.json.
PEAK = 0.694
HALF = 810
# Seconds that a host needs to launch a rank's kernels per micro-batch and layer, for log-probs, forward and backward;
# more with tensor or context parallelism; for experts those beside them, and some for each expert that the rank has
# where each has kernels of its own. The hosts are virtual machines' Xeons.
LAUNCH = 6.88e-3
LAUNCH_BATCH = 36e-3  # of a micro-batch beside its layers: embedding, output layer, loss
LAUNCH_TP = 0.79e-3
LAUNCH_CP = 2.9e-3
LAUNCH_MOE = 11.1e-3
LAUNCH_EXPERT = 0.212e-3
LAUNCH_GROUPED = 3.5e-3  # instead of both, where one kernel computes all experts; benchmarks/results/experts_h200.json
# The share of the shorter of launching and computing that is not hidden with experts: the host waits for the numbers of
# their tokens in every layer.
WAITS = 0.566
# Bytes a second between a GPU and pinned host memory, from benchmarks/results/offload_h200.json.
HOST_LINK = 45e9
# The share of a GPU's FLOP/s that a server reaches. Not measured here.
SERVING = 0.45
# Shares of a link's and of a memory's bandwidth. Not measured here; usual values of NCCL and of decoding kernels.
LINK = 0.7
NETWORK = 0.7
MEMORY = 0.6
# Communication that computation does not hide: gradients behind backward, keys and values behind attention; tensor
# parallel and expert exchanges block all subsequent work. Not measured here.
EXPOSED = {"dp": 0.4, "cp": 0.5, "tp": 1.0, "ep": 1.0, "pp": 1.0}
# Seconds of a decoding step beside memory and arithmetic, and for every all-reduce of a layer. Not measured here.
DECODE_STEP = 4e-3
ALL_REDUCE = 15e-6
ALL_REDUCE_NODES = 60e-6  # of a server over several nodes
# Bytes a second of a weight update, from gathering to the last acknowledgement, and its fixed seconds, from
# benchmarks/results/h200x2_nccl_weight_update.json for the latter; the former is not measured for a large model.
TRANSFER = 10e9
TRANSFER_START = 0.1
# The longest of a batch's responses over their mean, where only the limit is known: half of them end halfway.
MEAN_OF_LONGEST = 0.5
# Imbalance of packed micro-batches over the data-parallel ranks. Not measured here.
IMBALANCE = 1.05
