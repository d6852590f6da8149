"""The command `files`: SGLang 0.5.17 loads whole checkpoints from disk, and no deltas to an earlier one."""

from typing import Any

from areal_like.rollout.sglang.patch import Patch


def load_files(runner: Any, text: str, group: Any) -> tuple[bool, str]:
    """Load the weights after a chain of files (`Chain.to_json`)."""
    from areal_like.rollout.sglang.receiving import receive_files

    return receive_files(runner, text, group)


PATCH = Patch(commands={"files": load_files})
