"""A family of models that is one file in a copy of the tree: the checks know it, and the FSDP trainer trains it."""

from __future__ import annotations

from pathlib import Path

from running import CONFIG
from tiny_models import SHAPE
from transformers import AutoModelForCausalLM, GraniteConfig
from trees import copy_tree, run_in

from areal_like.core.config.schema import InitModelConfig
from areal_like.demo.init_model import write_init_model

FILE = '''"""Granite."""

from allocation.families import Family, ServedFamily

FAMILIES = {"granite": Family(bias="qkvo", server=ServedFamily(on_cpus=True))}
'''
STEP = """
import math, sys
from pathlib import Path
import numpy as np
from allocation import ParallelSizes
from areal_like.core.algorithms.losses import sft
from areal_like.runtime.ports import listen
from areal_like.core.config.schema import EngineConfig, OptimizerConfig
from areal_like.core.trainer.engine import EngineSpec, Rendezvous
from areal_like.backends.training.rank import make_engine
from areal_like.core.types import Batch, LossSpec

listener = listen("127.0.0.1")
spec = EngineSpec(
    "actor", EngineConfig(dtype="float32"), OptimizerConfig(lr=1e-2), Path(sys.argv[1]), ParallelSizes(), "cpu", seed=1,
    backend="fsdp",
)
made = make_engine(spec, Rendezvous(0, 1, *listener.getsockname(), listener=listener))
tokens = np.random.default_rng(0).integers(0, 100, 40).astype(np.int32)
batch = Batch(np.array([15, 25], np.int32), tokens, {"loss_mask": np.ones(40, np.float32)})
first, second = (made.train(batch, LossSpec(sft))["loss"] for _ in range(2))
assert math.isfinite(second) and second < first, (first, second)
made.shutdown()
"""


def test_a_family_is_one_file(tmp_path: Path) -> None:
    model, folder = tmp_path / "granite", tmp_path / "copy"
    folder.mkdir()
    write_init_model(InitModelConfig(), model, seed=0)  # its tokenizer
    (model / "model.safetensors").unlink()
    AutoModelForCausalLM.from_config(GraniteConfig(**SHAPE)).save_pretrained(model)
    tree = copy_tree(folder)
    kind = "from allocation.model_spec import load_model; print(load_model({!r}).known_family)"
    assert run_in(tree, "-c", kind.format(str(model))).stdout != "True\n"
    (tree / "allocation/families/granite.py").write_text(FILE)
    assert run_in(tree, "-c", kind.format(str(model))).stdout == "True\n"

    where = (f"actor.path={model}", "actor.init_model=null", "actor.backend=fsdp:d1", f"cluster.fileroot={tmp_path}")
    checked = run_in(tree, "-m", "areal_like", "check", str(CONFIG), *where)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    script = tmp_path / "one_step.py"
    script.write_text(STEP)
    trained = run_in(tree, str(script), str(model))
    assert trained.returncode == 0, trained.stderr
