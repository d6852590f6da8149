"""Teach a language model to solve word problems by asynchronous GRPO.

python examples/math/gsm8k_rl.py --config examples/math/gsm8k_grpo_cpu.yaml [--dry-run] [key=value ...]
"""

from areal_like.cli import app

if __name__ == "__main__":
    app()
