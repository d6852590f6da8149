#!/usr/bin/env bash
#SBATCH --job-name=areal-like
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --time=1-00:00:00
#SBATCH --output=areal-like-%j.log
# One run on the nodes of one job, with a Ray cluster that starts and ends with it (docs/clusters.md):
# sbatch examples/clusters/slurm.sh examples/math/gsm8k_grpo_moe.yaml cluster.fileroot=/shared/runs
set -euo pipefail
if [[ $# -lt 1 || ! -f $1 ]]; then
  echo "usage: sbatch examples/clusters/slurm.sh FILE [key=value ...]" >&2
  exit 2
fi
source .venv/bin/activate

head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
address=$head:6379
# The token keeps others on the network out of this Ray cluster.
RAY_AUTH_TOKEN=$(python -c 'import secrets; print(secrets.token_hex(32))')
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN

# Every node runs the same command: the first node starts Ray's head and then the run, the others join.
srun --ntasks="$SLURM_NNODES" --ntasks-per-node=1 --kill-on-bad-exit=1 \
  ray symmetric-run --address "$address" --min-nodes "$SLURM_NNODES" --num-gpus "$SLURM_GPUS_ON_NODE" \
  --no-monitor -- \
  areal-like run "$@" scheduler.type=ray scheduler.address="$address" \
  cluster.n_nodes="$SLURM_NNODES" cluster.n_gpus_per_node="$SLURM_GPUS_ON_NODE"
