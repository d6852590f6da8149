"""A run on a CPU whose servers have the launcher that the variable SERVER_LAUNCHER names."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from areal_like.backends.sglang import process
from areal_like.core.config.load import load
from areal_like.demo.init_model import write_init_model
from areal_like.preflight import sharing
from areal_like.run import start

EXPERTS = (
    *("actor.init_model.num_experts=8", "actor.init_model.num_experts_per_tok=2"),
    *("actor.init_model.moe_intermediate_size=64", "actor.init_model.tie_word_embeddings=false"),
)
FOLDED = (*("actor.backend=null", "rollout.backend=null"), "allocation_mode=sglang:d1+megatron:(attn:d2|ffn:e2)")
HERE = Path(__file__).with_name("run")


class LaunchedOtherwise(process.SGLangServer):
    """A server with the launcher of a test."""

    async def start(self) -> str:
        """Start the process and wait until it serves."""
        process.LAUNCHER = os.environ["SERVER_LAUNCHER"]
        return await super().start()


@contextmanager
def launched(folder: Path, launcher: str, *overrides: str, shape: tuple[str, ...] = (), fault: str = "") -> Iterator:
    """A run of a model without any training, whose log-probs nevertheless differ from token to token."""
    from running import CONFIG, ROOT, Run
    from serving import peaked_model

    if not (model := folder / "model").exists():  # as it does where a run goes on
        write_init_model(load(CONFIG, list(shape)).config.actor.init_model, folder / "small", seed=0)
        peaked_model(folder / "small", model, seed=1)
    settings = (
        *("actor.init_model=null", f"actor.path={model}", f"reward.function={HERE / 'varied_reward.py'}:score"),
        *("warm_start=null", "evaluator.at_start=false", "evaluator.at_end=false", "saver.freq_steps=null"),
    )
    places = os.pathsep.join(map(str, (ROOT, HERE, ROOT / "tests/rollout")))
    environment = {"PYTHONPATH": places, "SERVER_LAUNCHER": launcher, "SERVER_FAULT": fault}
    started = Run(folder, *settings, *overrides, script=Path(__file__), env=environment)
    try:
        yield started
    finally:
        if started.process.poll() is None:
            started.process.kill()
            started.process.wait()


if __name__ == "__main__":
    start.SGLangServer = LaunchedOtherwise
    if "rollout.sharing=alternate" in sys.argv:  # refused on a CPU, which has no memory to take turns on
        sharing._turns = lambda *_: ()
    from areal_like.cli import app

    app()
