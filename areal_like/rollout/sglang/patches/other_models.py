"""Models without a use: SGLang 0.5.17 imports two hundred modules of models at each start, and needs one."""

import os
import re
from collections.abc import Collection
from pathlib import Path

from areal_like.rollout.sglang.patch import Patch


def leave_out_other_models(architectures: Collection[str]) -> None:
    """Import only these models of SGLang; all of them if it lacks one of these names.

    `sglang/srt/models/registry.py` imports every module that the variable does not name. A user's own value stays.
    """
    from sglang.srt import models

    modules = {path.stem: path.read_bytes() for path in Path(models.__path__[0]).glob("*.py")}
    defined = re.compile(rf"^class ({'|'.join(map(re.escape, architectures))})\b".encode(), re.MULTILINE)
    needed = {name for name, code in modules.items() if defined.search(code)}
    if needed:
        os.environ.setdefault("SGLANG_DISABLED_MODEL_ARCHS", ",".join(modules.keys() - needed))


PATCH = Patch(serve=lambda launch: leave_out_other_models(launch.architectures))
