"""Commands that compare weights with the trainer's: SGLang 0.5.17 has checksums of whole ranks, after its own layout.

`watch` and `compare` enclose an update over any transport. `note` and `compare noted` enclose one that sends the
server's present weights.
"""

import json
from functools import partial
from typing import Any

from areal_like.rollout.sglang.patch import Patch


def run(name: str, runner: Any, text: str, group: Any) -> tuple[bool, str]:
    """Carry out one of the commands on every rank."""
    from areal_like.rollout.sglang import checksums
    from areal_like.rollout.sglang.patches.adapters import adapter_tensors
    from areal_like.rollout.sglang.receiving import on_each

    work = {
        "watch": lambda: checksums.watch(runner.model),
        "compare": lambda: checksums.compare(runner.model, json.loads(text)),
        "note": lambda: checksums.note(runner.model, adapter_tensors(runner)),
        "compare noted": lambda: checksums.compare_noted(runner.model, adapter_tensors(runner)),
    }
    return on_each(group, work[name])


PATCH = Patch(commands={name: partial(run, name) for name in ("watch", "compare", "note", "compare noted")})
