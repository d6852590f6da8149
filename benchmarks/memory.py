"""Measure peak memory and step time of the trainer in a layout, and compare them with the memory model.

python -m benchmarks.memory --device cuda --out FILE [--only NAME ...]
python -m benchmarks.memory table FILE ...    errors of the current model against the measurements

Cases with the same number of ranks run one after the other in the same processes, one per rank, each with a new
engine and random weights. A case that fails ends its processes, and the next case has new ones. Sizes are the maxima
of torch's allocator: allocated (`max_memory_allocated`) and reserved (`max_memory_reserved`). On CPU, without such
counters, the tensors of the engine are summed; this tests the benchmark with a tiny model. Results are written after
every case.
"""

from __future__ import annotations

import fcntl
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any
from unittest.mock import patch

import numpy as np
import typer

import allocation
from allocation.adapters import adapter_parameters
from allocation.memory import megatron
from allocation.memory.items import CUDA, NCCL, RESERVE, Item
from allocation.model_spec import ModelSpec, from_config
from allocation.parameters import total_parameters
from allocation.plan import ParallelSizes
from allocation.settings import BatchSpec, MegatronSettings, MemorySettings, Workload
from benchmarks.report import ROOT, circumstances

EXAMPLE = ROOT / "examples" / "math" / "gsm8k_grpo_qwen3_0.6b.yaml"
RESULTS = sorted((ROOT / "benchmarks" / "results").glob("memory_h200*.json"))
LENGTH = 2048
CASE_LIMIT_S = 240
TIMED = 3  # steps of which the median counts


@dataclass(frozen=True)
class Case:
    """A shape in a layout, whole or with adapters of a rank in all layers.

    `tokens` are those of a micro-batch; a step has `sequences`, or two micro-batches on each rank.
    """

    name: str
    shape: str
    layout: str = "megatron:d1"
    tokens: int = 16384
    recompute: Mapping[str, Any] = field(default_factory=dict)
    lora_rank: int | None = None
    sequences: int | None = None

    @property
    def ranks(self) -> int:
        return allocation.compile(self.layout).engines[0].world_size


DENSE = {"tokenizer": "bytes", "vocab_size": 151936, "num_key_value_heads": 8, "head_dim": 128,
         "max_position_embeddings": 40960}  # fmt: skip


def dense(hidden: int, layers: int, heads: int, ffn: int, **more: Any) -> dict[str, Any]:
    return DENSE | {
        "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads, "intermediate_size": ffn,
    } | more  # fmt: skip


SHAPES = {
    "qwen3-0.6b": dense(1024, 28, 16, 3072),
    "qwen3-1.7b": dense(2048, 28, 16, 6144),
    "qwen3-4b": dense(2560, 36, 32, 9728),
    "qwen3-8b": dense(4096, 36, 32, 12288, tie_word_embeddings=False),
    "qwen3-8b-20-layers": dense(4096, 20, 32, 12288, tie_word_embeddings=False),
    "qwen3-moe-6-layers": dense(
        2048, 6, 32, 6144, num_key_value_heads=4, tie_word_embeddings=False, num_experts=64, num_experts_per_tok=8,
        moe_intermediate_size=768,
    ),
    "qwen3-moe-16-layers": dense(
        2048, 16, 32, 6144, num_key_value_heads=4, tie_word_embeddings=False, num_experts=64, num_experts_per_tok=8,
        moe_intermediate_size=768,
    ),
    "tiny": {"tokenizer": "bytes", "vocab_size": 300, "hidden_size": 64, "num_hidden_layers": 2,
             "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 96},
    "tiny-moe": {"tokenizer": "bytes", "vocab_size": 300, "hidden_size": 64, "num_hidden_layers": 2,
                 "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 96,
                 "tie_word_embeddings": False, "num_experts": 4, "moe_intermediate_size": 32},
}  # fmt: skip
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
DENSE_ON_FOUR = ("d4", "d2t2", "t4", "d2p2", "p4", "p2t2", "d2c2", "c4", "c2t2")
MOE_ON_FOUR = (("d4", "e4"), ("d4", "e2"), ("d4", "d4"), ("d2t2", "e4"), ("t4", "e4"), ("d2c2", "e4"), ("c2t2", "e4"),
               ("d2p2", "p2e2"), ("p2t2", "p2e2"))  # fmt: skip
CASES = {
    case.name: case
    for case in (
        Case("0.6b", "qwen3-0.6b"),
        Case("0.6b short", "qwen3-0.6b", tokens=4096),
        Case("0.6b full", "qwen3-0.6b", recompute=FULL),
        Case("1.7b", "qwen3-1.7b"),
        Case("1.7b block", "qwen3-1.7b", recompute=FULL | {"recompute_method": "block", "recompute_num_layers": 14}),
        Case("4b", "qwen3-4b", tokens=8192),
        Case("4b full", "qwen3-4b", tokens=32768, recompute=FULL),
        Case("moe", "qwen3-moe-6-layers"),
        Case("8b cut full", "qwen3-8b-20-layers", tokens=8192, recompute=FULL),
        Case("0.6b lora", "qwen3-0.6b", lora_rank=32),
        Case("4b lora", "qwen3-4b", tokens=8192, lora_rank=32),
        Case("8b cut full lora", "qwen3-8b-20-layers", tokens=8192, recompute=FULL, lora_rank=32),
        Case("tiny", "tiny", tokens=512),
        Case("tiny lora", "tiny", tokens=512, lora_rank=4),
        Case("tiny moe", "tiny-moe", tokens=512),
        Case("tiny t2", "tiny", "megatron:d1t2", tokens=512),
        Case("0.6b t2", "qwen3-0.6b", "megatron:d1t2"),
        Case("1.7b d2", "qwen3-1.7b", "megatron:d2"),
        Case("1.7b p2", "qwen3-1.7b", "megatron:d1p2"),
        Case("4b c2", "qwen3-4b", "megatron:d1c2", tokens=16384),
        Case("moe e2", "qwen3-moe-6-layers", "megatron:(attn:d2|ffn:e2)"),
        *(Case(f"4b {name}", "qwen3-4b", f"megatron:{name}", 8192, sequences=32) for name in DENSE_ON_FOUR),
        *(
            Case(f"moe {attn}{ffn}", "qwen3-moe-6-layers", f"megatron:(attn:{attn}|ffn:{ffn})", 8192, sequences=32)
            for attn, ffn in MOE_ON_FOUR
        ),
        *(Case(f"tiny {name}", "tiny", f"megatron:{name}", 512, sequences=8) for name in ("d2", "p2")),
    )
}
ON_FOUR = [name for name, case in CASES.items() if case.ranks == 4]
DEFAULT = {
    "cuda": ["0.6b", "0.6b short", "0.6b full", "1.7b", "1.7b block", "moe", "4b", "4b full", "8b cut full"],
    "cpu": ["tiny", "tiny t2"],
}


def main(
    out: Annotated[Path, typer.Option()],
    device: Annotated[str, typer.Option()] = "cuda",
    only: Annotated[list[str] | None, typer.Option(help=f"of {', '.join(CASES)}; on-four: all of 4 ranks")] = None,
    limit_s: Annotated[int, typer.Option(help="seconds after which no further case starts")] = 500,
) -> None:
    end, results = time.monotonic() + limit_s, []
    names = [ON_FOUR if name == "on-four" else [name] for name in only or DEFAULT[device]]
    cases = [CASES[name] for several in names for name in several]
    head = circumstances()
    with tempfile.TemporaryDirectory() as folder:
        for _, group in itertools.groupby(cases, key=lambda case: case.ranks):
            for result in measure(list(group), device, Path(folder), end):
                results.append(result)
                show(result)
                out.parent.mkdir(parents=True, exist_ok=True)
                out.write_text(json.dumps({**head, "unit": "bytes", "cases": results}, indent=1) + "\n")


def measure(cases: list[Case], device: str, folder: Path, end: float) -> Iterator[dict[str, Any]]:
    """Cases of as many ranks in turn, none begun after `end`; of each phase the rank with the highest peak."""
    while cases and time.monotonic() < end:
        ranks = [start_rank(rank, cases, device, folder) for rank in range(cases[0].ranks)]
        try:
            for case in cases[:]:
                begun = time.monotonic()
                result = outcome(case, ranks, folder)
                cases.remove(case)
                yield {**result, "seconds": round(time.monotonic() - begun, 1)}
                if "failed" in result or time.monotonic() > end:
                    break
        finally:
            for process in ranks:
                process.kill()
                process.wait()
    for case in cases:
        print(f"{case.name}: left out, no time", flush=True)


def start_rank(rank: int, cases: list[Case], device: str, folder: Path) -> subprocess.Popen[bytes]:
    names = [case.name for case in cases]
    command = [sys.executable, "-m", "benchmarks.memory", "rank", device, str(folder), str(rank), *names]
    with (folder / f"rank{rank}.log").open("wb") as log:
        return subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)


def outcome(case: Case, ranks: list[subprocess.Popen[bytes]], folder: Path) -> dict[str, Any]:
    head = {"name": case.name, "shape": SHAPES[case.shape], "layout": case.layout, "tokens": case.tokens,
            "length": min(LENGTH, case.tokens), "recompute": dict(case.recompute),
            "lora_rank": case.lora_rank, "sequences": case.sequences, "trained": "all"}  # fmt: skip
    files = [folder / f"case-{case.name}" / f"rank{rank}.json" for rank in range(len(ranks))]
    limit = time.monotonic() + CASE_LIMIT_S
    while not all(file.exists() for file in files):
        if any(rank.poll() for rank in ranks) or time.monotonic() > limit:
            logs = [folder / f"rank{number}.log" for number, rank in enumerate(ranks) if rank.poll()]
            return head | {"failed": (logs or [folder / "rank0.log"])[0].read_text(errors="replace")[-2000:]}
        time.sleep(0.1)
    figures = [json.loads(file.read_text()) for file in files]
    phases = {
        name: max((one["phases"][name] for one in figures), key=lambda sizes: sizes["peak"])
        for name in figures[0]["phases"]
    }
    seconds = {name: max(one[name] for one in figures) for name in ("step_seconds", "log_probs_seconds")}
    return head | figures[0] | seconds | {"phases": phases, "predicted": predicted(head)}


def predicted(result: Mapping[str, Any]) -> dict[str, int]:
    """Bytes of tensors in each phase by the memory model: without what the device needs beside the allocator's.

    A result without `trained` is compared with logits of every token, as the trainer had them when it was measured.
    """
    model, sizes = described(result)
    batch = BatchSpec(sequences(result), 1, 1, result["length"], result["tokens"])
    settings = MegatronSettings(**result["recompute"])
    adapters = adapter_parameters(model, rank, lambda _: True) if (rank := result.get("lora_rank")) else None
    trained = adapters / total_parameters(model) if adapters else 1.0
    memory = MemorySettings(trained=trained, ahead_bytes=0)  # it was measured a bucket at a time
    at_that_time = {"_LOGITS_AT_ONCE": 1 << 62, "_deeper": _deeper_with_all_logits, "_read": _all_logits}
    with nullcontext() if "trained" in result else patch.multiple(megatron, **at_that_time):
        phases = megatron.trainer("actor", sizes, Workload(model, settings, memory, batch)).phases
    return {p.name: sum(item.bytes for item in p.items if item.name not in (CUDA, NCCL, RESERVE)) for p in phases}


def _deeper_with_all_logits(
    logits: int, table: int, ends: int, in_layer: list[Item], *, tied: bool, alone: bool
) -> list[Item]:
    at_head = [Item("logits", logits), Item("their gradient", max(logits, table)), Item("head", ends)]
    return max(at_head, [*in_layer, Item("head's gradient", tied * table)], key=megatron._sum)


def _all_logits(logits: int, inside: int) -> Item:
    return Item("logits of two micro-batches", 2 * logits) if logits >= inside else Item("inside a layer", inside)


def described(result: Mapping[str, Any]) -> tuple[ModelSpec, ParallelSizes]:
    from areal_like.core.config.schema import InitModelConfig
    from areal_like.demo.init_model import model_config

    model = from_config(model_config(InitModelConfig(**result["shape"]), "bfloat16"))
    return model, allocation.compile(result["layout"]).engines[0].sizes


def sequences(result: Mapping[str, Any]) -> int:
    """Sequences of a step, on all ranks together."""
    sizes = described(result)[1]
    return result.get("sequences") or 2 * result["tokens"] // result["length"] * sizes.dp


def measured(files: Iterable[Path] = RESULTS) -> list[dict[str, Any]]:
    """The cases of result files that did not fail."""
    cases = [case for file in files for case in json.loads(file.read_text())["cases"]]
    return [case for case in cases if "failed" not in case]


def errors(cases: Iterable[Mapping[str, Any]]) -> dict[str, list[tuple[float, str]]]:
    """Return the relative error of the current model in each case with the case's name, by phase."""
    found: dict[str, list[tuple[float, str]]] = {}
    for case in cases:
        said = predicted(case)
        for phase, sizes in case["phases"].items():
            if phase in said:
                found.setdefault(phase, []).append((said[phase] / sizes["peak"] - 1, case["name"]))
    return found


def table(files: list[str]) -> None:
    for phase, found in errors(measured(map(Path, files))).items():
        worst = max(found, key=lambda one: abs(one[0]))
        each = ", ".join(f"{name} {error:+.1%}" for error, name in found)
        median = statistics.median(abs(error) for error, _ in found)
        print(f"{phase}: median {median:.1%}, worst {worst[0]:+.1%} ({worst[1]}): {each}")


def show(result: Mapping[str, Any]) -> None:
    if "failed" in result:
        print(f"{result['name']}: failed\n{result['failed']}", flush=True)
        return
    print(f"{result['name']} ({result['seconds']} s)", flush=True)
    for name, measured in result["phases"].items():
        if name in result["predicted"]:
            said = result["predicted"][name]
            error = said / measured["peak"] - 1
            print(
                f"  {name:22} {measured['peak'] / 2**30:8.3f} GiB, predicted {said / 2**30:8.3f} ({error:+.1%})",
                flush=True,
            )


class Rank:
    """One rank: phases, and what they took."""

    def __init__(self, case: Case, device: str, folder: Path, work: Path, rank: int) -> None:
        from areal_like.backends.megatron.engine import MegatronEngine  # before the lock: it takes longest
        from areal_like.core.config.load import load

        self.case, self.device, self.rank = case, device, rank
        self.sizes = allocation.compile(case.layout).engines[0].sizes
        overrides = [f"device={device}", "actor.init_model=null", "actor.path=model"]
        overrides += [f"actor.mb_spec.max_tokens_per_mb={case.tokens}"]
        overrides += [f"actor.megatron.{name}={value}" for name, value in case.recompute.items()]
        self.actor = load(EXAMPLE, overrides).config.actor
        self.make, self.folder, self.work = MegatronEngine, folder, work

    def run(self) -> dict[str, Any]:
        from areal_like.core.algorithms.losses import decoupled_ppo
        from areal_like.core.algorithms.settings import Settings
        from areal_like.core.trainer.engine import EngineSpec, LoRA
        from areal_like.core.types import LossSpec

        model = made_model(SHAPES[self.case.shape], self.folder / self.case.shape, self.device)
        phases: dict[str, dict[str, int]] = {}
        rank = self.case.lora_rank
        spec = EngineSpec("actor", self.actor, self.actor.optimizer, model, self.sizes, self.device, 1, 1000)
        spec = replace(spec, lora=LoRA(rank, rank, ("all-linear",)) if rank else None)
        self.engine = self.phase(phases, "load", lambda: self.make(spec, self.meet()))
        batch, loss = self.batch(), LossSpec(decoupled_ppo, Settings())
        self.phase(phases, "first log-probs", lambda: self.engine.log_probs(batch))
        self.phase(phases, "first step", lambda: self.engine.train(batch, loss))
        self.phase(phases, "forward and backward", lambda: self.engine.train(batch, loss))
        steps = [self.seconds(lambda: self.engine.train(batch, loss)) for _ in range(TIMED)]
        self.phase(phases, "log-probs", lambda: self.engine.log_probs(batch))
        forwards = [self.seconds(lambda: self.engine.log_probs(batch)) for _ in range(TIMED)]
        self.phase(phases, "weight update", self.export)
        self.engine.shutdown()
        return {"phases": phases, "step_seconds": statistics.median(steps),
                "log_probs_seconds": statistics.median(forwards), "tokens_per_step": len(batch.tokens)}  # fmt: skip

    def seconds(self, call: Callable[[], Any]) -> float:
        import torch

        begun = time.perf_counter()
        call()
        if self.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - begun

    def phase(self, phases: dict[str, dict[str, int]], name: str, call: Callable[[], Any]) -> Any:
        """Runs a phase; `peak` and `reserved` are its highest, `after` is what stays."""
        import torch

        if self.device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        value = call()
        if self.device == "cuda":
            torch.cuda.synchronize()
            stats = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved(), torch.cuda.memory_allocated()
        else:
            import gc

            storages = {
                tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
                for tensor in gc.get_objects()
                if isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu"
            }
            stats = (sum(storages.values()),) * 3
        phases[name] = dict(zip(("peak", "reserved", "after"), stats, strict=True))
        return value

    def meet(self) -> Any:
        from areal_like.core.trainer.engine import Rendezvous
        from areal_like.runtime.ports import listen

        world, place = self.sizes.dp * self.sizes.per_replica, self.work / "port"
        if self.rank == 0:
            listener = listen("127.0.0.1")
            place.with_suffix(".new").write_text(str(listener.getsockname()[1]))
            place.with_suffix(".new").rename(place)
            return Rendezvous(0, world, "127.0.0.1", listener.getsockname()[1], listener=listener)
        while not place.exists():
            time.sleep(0.1)
        return Rendezvous(self.rank, world, "127.0.0.1", int(place.read_text()))

    def batch(self) -> Any:
        """Return the case's batch; every token is trained on, which is the most."""
        from areal_like.core.types import Batch

        length, rng = min(LENGTH, self.case.tokens), np.random.default_rng(0)
        n = self.case.sequences or 2 * self.case.tokens // length * self.sizes.dp
        total = n * length
        return Batch(
            lengths=np.full(n, length, np.int32),
            tokens=rng.integers(4, SHAPES[self.case.shape]["vocab_size"], total, dtype=np.int32),
            fields={
                "loss_mask": np.ones(total, np.float32),
                "advantages": rng.normal(size=total).astype(np.float32),
                "behaviour_logprobs": np.full(total, -12, np.float32),
                "on_policy": np.ones(total, np.float32),
            },
        )

    def export(self) -> None:
        from areal_like.backends.transports.collective.rank import CollectiveSender

        sender = CollectiveSender(self.engine, self.rank, "127.0.0.1")
        for number in range(len(sender.layout(MemorySettings().bucket_bytes >> 20))):
            sender.prepare(number)
            sender.ready.clear()


def made_model(shape: Mapping[str, Any], folder: Path, device: str, dtype: str = "bfloat16") -> Path:
    """A checkpoint with random weights, made by the first that needs it, on the GPU where there is one."""
    import torch
    from safetensors.torch import save_file

    from areal_like.core.config.schema import InitModelConfig
    from areal_like.demo.init_model import _tensor_shapes, model_config

    with open(f"{folder}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            new, kind = folder.with_suffix(".new"), getattr(torch, dtype)
            new.mkdir()
            config = model_config(InitModelConfig(**shape), dtype)
            (new / "config.json").write_text(json.dumps(config))
            weights = {
                name: (torch.randn(size, dtype=kind, device=device) * 0.02).cpu()
                if len(size) > 1
                else torch.ones(size, dtype=kind)
                for name, size in _tensor_shapes(config)
            }
            save_file(weights, new / "model.safetensors", {"format": "pt"})
            new.rename(folder)
    return folder


def rank_main(device: str, folder: str, rank: str, *names: str) -> None:
    import gc
    import os

    if device == "cuda":
        os.environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1,2,3").split(",")[int(rank)]
    for name in names:
        work = Path(folder, f"case-{name}")
        work.mkdir(exist_ok=True)
        figures = Rank(CASES[name], device, Path(folder), work, int(rank)).run()
        gc.collect()
        file = work / f"rank{rank}.json"
        file.with_suffix(".new").write_text(json.dumps(figures))
        file.with_suffix(".new").rename(file)


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        rank_main(*sys.argv[2:])
    elif sys.argv[1:2] == ["table"]:
        table(sys.argv[2:])
    else:
        typer.run(main)
