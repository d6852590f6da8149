"""Teach a language model to solve word problems by asynchronous GRPO.

python examples/math/gsm8k_rl.py --config examples/math/gsm8k_grpo_cpu.yaml [--dry-run] [key=value ...]
"""

import sys

if __name__ == "__main__":  # reward processes import this file too
    try:
        from areal_like.cli import app
    except ModuleNotFoundError as error:
        package = str(error.name).partition(".")[0]
        print(f"error[RUN-PACKAGE]: the package {package} is not installed\n  help: run `make setup`", file=sys.stderr)
        sys.exit(2)
    app()
