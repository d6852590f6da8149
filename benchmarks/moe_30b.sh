#!/usr/bin/env bash
# A whole asynchronous loop of Qwen3-30B-A3B's shape on four GPUs of 140 GiB: three train, one serves.
#   benchmarks/moe_30b.sh [key=value ...]
set -euo pipefail
cd "$(dirname "$0")/.."
exec "${PYTHON:-python}" -m benchmarks.moe_30b "$@"
