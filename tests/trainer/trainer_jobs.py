"""What ranks do in these tests; each job runs in every rank and makes, uses and ends an engine."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import numpy as np
import psutil
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint import FileSystemWriter

from allocation import ParallelSizes, load_model
from allocation.model_spec import ModelError, ModelSpec
from areal_like.backends.megatron import optimizer
from areal_like.backends.megatron.engine import MegatronEngine  # before anything else of megatron
from areal_like.backends.training.rank import make_engine
from areal_like.core.algorithms.losses import LossInputs, TokenLoss, decoupled_ppo, sft
from areal_like.core.algorithms.settings import Settings
from areal_like.core.config.schema import (
    EngineConfig,
    FSDPConfig,
    MegatronConfig,
    MicroBatchConfig,
    OptimizerConfig,
    TrainerRole,
)
from areal_like.core.trainer.engine import PARTS, EngineSpec, LoRA, NonFiniteError, Rendezvous, RoleError, TrainEngine

# isort: split
from limits import HUNG_S
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

from areal_like.core.columns import Ragged
from areal_like.core.sampling_masks import KEPT
from areal_like.core.types import TEACHER_IDS, TEACHER_TOP, TEMPERATURES, Batch, LossSpec

VOCABULARY = 101
TEMPERATURE = 0.7


@dataclass(frozen=True)
class Machine:
    """What an engine runs on, and the data type that goes with it."""

    device: Literal["cpu", "cuda"]
    dtype: Literal["float32", "bfloat16", "float16"]


CPU, GPU = Machine("cpu", "float32"), Machine("cuda", "bfloat16")


@dataclass(frozen=True)
class Setting:
    """One engine: a model in one layout. The large epsilon keeps Adam from blowing rounding errors up to full steps."""

    model: Path
    sizes: ParallelSizes = field(default_factory=ParallelSizes)
    bridge: str = "mbridge"
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=1e-2, eps=1e-2))
    total_steps: int | None = None
    max_tokens_per_mb: int = 64
    machine: Machine = CPU
    megatron: Mapping[str, Any] = field(default_factory=dict)
    role: TrainerRole = "actor"
    backend: str = "megatron"
    fsdp: Mapping[str, Any] = field(default_factory=dict)
    offload: bool = False
    lora: LoRA | None = None
    weights: Path | None = None
    share_prompts: bool = False
    fp32_head: bool = False
    freeze_vision_tower: bool = False
    adapters: tuple[str, ...] = ()
    copy_bytes: int | None = None


@dataclass(frozen=True)
class Outcome:
    """What one rank saw of three training steps."""

    log_probs: tuple[np.ndarray, np.ndarray] | None
    steps: list[dict[str, float]]
    weights: dict[str, np.ndarray]


# Batches after a checkpoint. In batch 2 two experts of a token are tied: rounding, which CPUs differ in, decides.
THIRD, FOURTH = 12, 13


def make_batch(seed: int = 0, lengths: tuple[int, ...] = (5, 17, 9, 30, 3, 12, 8, 21, 1)) -> Batch:
    """Sequences of uneven length with masks and made-up advantages."""
    rng = np.random.default_rng(seed)
    total = sum(lengths)
    fields = {
        "loss_mask": (rng.random(total) < 0.7).astype(np.float32),
        "advantages": rng.normal(size=total).astype(np.float32),
        "behaviour_logprobs": np.log(rng.random(total) * 0.05).astype(np.float32),
        "on_policy": np.ones(total, np.float32),
    }
    return Batch(np.array(lengths, np.int32), rng.integers(0, VOCABULARY, total).astype(np.int32), fields)


def make_groups(seed: int = 0) -> Batch:
    """Groups of responses to one prompt, the last of them one response; some go on after words of others."""
    rng, tokens, masks = np.random.default_rng(seed), [], []
    for prompt, responses in ((9, (3, 11, 1)), (1, (2, 5)), (14, (4, 4, 20, 7)), (6, (5,))):
        words = rng.integers(0, VOCABULARY, prompt)
        for response in responses:
            tokens.append(np.concatenate([words, rng.integers(0, VOCABULARY, response)]))
            said = rng.random(response) < 0.7
            said[0] = True
            masks.append(np.concatenate([np.zeros(prompt), said]))
    lengths = tuple(map(len, tokens))
    batch = make_batch(seed, lengths)
    fields = {**batch.fields, "loss_mask": np.concatenate(masks).astype(np.float32)}
    return Batch(batch.lengths, np.concatenate(tokens).astype(np.int32), fields)


def make_trees(seed: int = 0) -> Batch:
    """Conversations with branches: tokens that sequences share are trained on in some of them, with other advantages.

    One tree has four levels, with a sequence that ends where others go on and one that is there twice; one has three,
    and one is a single sequence.
    """
    rng = np.random.default_rng(seed)

    def turn(tokens: int, *branches: list) -> list:
        words = rng.integers(0, VOCABULARY, tokens).tolist()
        return [words + rest for branch in branches for rest in branch] or [words]

    first = turn(
        9, turn(5, turn(3, turn(8), turn(2), [[]]), turn(11)), turn(4), turn(6, turn(1), turn(7, turn(5), turn(3)))
    )
    second = turn(12, turn(2, turn(4), turn(9)), turn(3, turn(6), turn(6), turn(1)))
    sequences = [*first, first[0], *second, *turn(10)]
    prompts = [9] * (len(first) + 1) + [12] * len(second) + [4]
    batch = make_batch(seed, tuple(map(len, sequences)))
    masks = [np.arange(len(each)) >= prompt for each, prompt in zip(sequences, prompts, strict=True)]
    mask = batch.fields["loss_mask"] * np.concatenate(masks)
    return Batch(batch.lengths, np.concatenate(sequences).astype(np.int32), {**batch.fields, "loss_mask": mask})


def make_supported(seed: int = 0, batch: Batch | None = None) -> Batch:
    """Groups whose tokens were sampled from a few words, or from all of them, at temperatures of their own."""
    batch, rng = batch or make_groups(seed), np.random.default_rng(seed)
    kept = [
        [*rng.choice(np.delete(np.arange(VOCABULARY), token), rng.integers(0, 9), replace=False).tolist(), token]
        if trained and rng.random() < 0.8
        else []
        for token, trained in zip(batch.tokens.tolist(), batch.fields["loss_mask"] > 0, strict=True)
    ]
    temperatures = rng.choice([0.6, 1.0, 1.3], len(kept)).astype(np.float32)
    return batch.with_field(TEMPERATURES, temperatures).with_field(KEPT, Ragged.from_lists(kept))


POLICY = LossSpec(decoupled_ppo, Settings(eps_clip_higher=0.3))


@contextlib.contextmanager
def engine(rendezvous: Rendezvous, listener: socket.socket | None, setting: Setting) -> Iterator[TrainEngine]:
    """An engine that leaves the process group in the end, so that the next one finds the process as new."""
    config = EngineConfig(
        dtype=setting.machine.dtype,
        fp32_head=setting.fp32_head,
        freeze_vision_tower=setting.freeze_vision_tower,
        megatron=MegatronConfig(bridge_type=setting.bridge, **setting.megatron),
        fsdp=FSDPConfig(**setting.fsdp),
        offload=setting.offload,
        mb_spec=MicroBatchConfig(max_tokens_per_mb=setting.max_tokens_per_mb, share_prompts=setting.share_prompts),
    )
    spec = EngineSpec(
        setting.role,
        config,
        None if setting.role == "ref" else setting.optimizer,
        setting.model,
        setting.sizes,
        setting.machine.device,
        seed=1,
        total_steps=setting.total_steps,
        backend=setting.backend,
        lora=setting.lora,
        weights=setting.weights,
        adapters=setting.adapters,
        shape=_shape_of(setting.model),
        copy_bytes=setting.copy_bytes,
    )
    made = make_engine(spec, replace(rendezvous, listener=listener))
    try:
        yield made
    finally:
        made.shutdown()


def exported(made: TrainEngine) -> dict[str, np.ndarray]:
    """All weights by Hugging Face name; a name that comes twice is an error."""
    weights: dict[str, np.ndarray] = {}
    for name, tensor in made.weights():
        assert name not in weights
        weights[name] = tensor.float().cpu().numpy().copy()
    return weights


def three_steps(rendezvous: Rendezvous, listener: socket.socket | None, setting: Setting) -> Outcome:
    """Log-probs, two supervised steps, one policy step, and the weights then; weights from rank 0 only."""
    with engine(rendezvous, listener, setting) as made:
        log_probs = made.log_probs(make_batch(), TEMPERATURE)
        steps = [made.train(make_batch(seed), LossSpec(sft), temperature=TEMPERATURE) for seed in (0, 1)]
        steps.append(made.train(make_batch(2), POLICY))
        weights = exported(made)
    return Outcome(log_probs, steps, weights if rendezvous.rank == 0 else {})


def one_short_sequence(rendezvous: Rendezvous, listener: socket.socket | None, setting: Setting) -> Outcome:
    """Three steps of a batch that is too small for several data-parallel ranks."""
    with engine(rendezvous, listener, setting) as made:
        steps = [made.train(make_batch(seed, (17,)), LossSpec(sft)) for seed in range(3)]
        weights = exported(made)
    return Outcome(None, steps, weights if rendezvous.rank == 0 else {})


def biases_after_padded_steps(
    rendezvous: Rendezvous, listener: socket.socket | None, setting: Setting, rows: int, name: str
) -> np.ndarray:
    """One of the weights after three steps, in which sequences are padded to a multiple of `rows`."""
    with engine(rendezvous, listener, setting) as made:
        assert isinstance(made, MegatronEngine)
        made._rows = rows
        for seed in (0, 1, 2):
            made.train(make_batch(seed), LossSpec(sft), temperature=TEMPERATURE)
        return exported(made)[name]


def steps_with_groups(rendezvous: Rendezvous, listener: socket.socket | None, setting: Setting) -> Outcome:
    """Log-probs, or a critic's values, and two steps of groups."""
    is_critic = setting.role == "critic"
    with engine(rendezvous, listener, setting) as made:
        read = made.values(make_groups()) if is_critic else made.log_probs(make_groups(), TEMPERATURE)
        loss = LossSpec(squared) if is_critic else POLICY
        steps = [made.train(make_groups(seed), loss) for seed in (0, 1)]
        weights = exported(made)
    return Outcome(read, steps, weights if rendezvous.rank == 0 else {})


def steps_with_supports(rendezvous: Rendezvous, listener: socket.socket | None, setting: Setting) -> Outcome:
    """Log-probs and two steps of tokens with supports; entropy has a gradient in the second."""
    with engine(rendezvous, listener, setting) as made:
        read = made.log_probs(make_supported(), TEMPERATURE)
        steps = [
            made.train(make_supported(seed), loss) for seed, loss in enumerate((POLICY, LossSpec(likely_and_sure)))
        ]
        weights = exported(made)
    return Outcome(read, steps, weights if rendezvous.rank == 0 else {})


def make_taught(seed: int = 0) -> Batch:
    """Groups with a teacher's eight likeliest words at each place, which are the same after the same words."""
    batch = make_groups(seed)
    ends = np.cumsum(batch.lengths)
    ids, logprobs = [], []
    for start, end in zip(ends - batch.lengths, ends, strict=True):
        for place in range(start, end):
            rng = np.random.default_rng([seed, *batch.tokens[start:place].tolist()])
            ids.append(rng.choice(VOCABULARY, 8, replace=False))
            logprobs.append(np.log(rng.dirichlet(np.ones(9))[:8] + 1e-6))
    taught = {TEACHER_IDS: np.array(ids, np.int32), TEACHER_TOP: np.array(logprobs, np.float32)}
    return replace(batch, fields={**batch.fields, **taught})


def steps_with_teacher(rendezvous: Rendezvous, listener: socket.socket | None, setting: Setting) -> Outcome:
    """Log-probs and two steps with the likeliest words of a teacher, at the temperature of both models."""
    loss = LossSpec(decoupled_ppo, Settings(eps_clip_higher=0.3, teacher_coef=0.5))
    with engine(rendezvous, listener, setting) as made:
        read = made.log_probs(make_taught(), TEMPERATURE)
        steps = [made.train(make_taught(seed), loss, TEMPERATURE) for seed in (0, 1)]
        weights = exported(made)
    return Outcome(read, steps, weights if rendezvous.rank == 0 else {})


def weighted(inputs: LossInputs, _: Any) -> TokenLoss:
    """Log-probs, weighted by the field `advantages`: of one sign, so that few gradients cancel out."""
    return -inputs.logprobs * torch.exp(inputs.fields["advantages"]), {"entropy": inputs.entropy.detach()}


def likely_and_sure(inputs: LossInputs, _: Any) -> TokenLoss:
    """Log-probs and entropies."""
    return inputs.entropy - 2 * inputs.logprobs, {"entropy": inputs.entropy}


# Adam's first step is lr * g / (|g| + eps): 1000 times the gradient, if both are large. So the last bit of a weight
# around 1 is less than 1e-10 of a gradient.
THOUSANDFOLD = OptimizerConfig(lr=1e9, eps=1e6, gradient_clipping=1e9, weight_decay=0.0, warmup_steps_proportion=0.0)


def step_with_trees(
    rendezvous: Rendezvous, listener: socket.socket | None, setting: Setting, batch: Batch, loss: LossSpec
) -> Outcome:
    """Log-probs, or a critic's values, and the gradients of a step, in place of weights; these of rank 0 only."""
    setting = replace(setting, optimizer=THOUSANDFOLD)
    with engine(rendezvous, listener, setting) as made:
        read = made.values(batch) if setting.role == "critic" else made.log_probs(batch, TEMPERATURE)
        before = exported(made)
        steps = [made.train(batch, loss, TEMPERATURE)]
        after = exported(made)
    gradients = {name: (weight - after[name].astype(np.float64)) / 1000 for name, weight in before.items()}
    return Outcome(read, steps, gradients if rendezvous.rank == 0 else {})


def three_steps_of_small_buckets(rendezvous: Rendezvous, listener: socket.socket | None, setting: Setting) -> Outcome:
    """`three_steps` in which a layer's weights are gathered apart from others'."""
    with mock.patch.object(optimizer, "BUCKET_SIZE", 3000):
        return three_steps(rendezvous, listener, setting)


@dataclass(frozen=True)
class Offloaded:
    """Three steps with offloads between, and the bytes of what is on the device: all of it, each part's, with nothing.

    `freed` is how much less was allocated without each part, and `left` how much more after it had come back.
    """

    outcome: Outcome
    full: list[int]
    less: dict[str, int]
    empty: list[int]
    freed: dict[str, int]
    left: dict[str, int]


def three_steps_with_offloads(
    rendezvous: Rendezvous, listener: socket.socket | None, setting: Setting, folder: Path
) -> Offloaded:
    """`three_steps`; between them parts leave the device, and everything does, for calls of every kind."""
    with engine(rendezvous, listener, setting) as made:
        log_probs = made.log_probs(make_batch(), TEMPERATURE)
        steps, full, empty, less = [], [], [], {}
        for seed, loss, temperature in (
            (0, LossSpec(sft), TEMPERATURE),
            (1, LossSpec(sft), TEMPERATURE),
            (2, POLICY, 1),
        ):
            made.offload()
            empty.append(device_bytes(made))
            made.log_probs(make_batch())
            list(made.weights())
            if seed == 1:
                made.save(folder)
                made.finish_save()
                made.save_hf(folder.with_name("hf"))
                saved = load_file(folder.with_name("hf") / "model.safetensors")
                assert all(torch.equal(saved[name], weight.cpu()) for name, weight in made.weights())
            assert device_bytes(made) == empty[-1]
            if seed == 1:  # once in host memory
                steps.append(made.train(make_batch(seed), loss, temperature))
                assert device_bytes(made) == empty[-1]
            made.onload()
            if seed != 1:
                steps.append(made.train(make_batch(seed), loss, temperature))
            full.append(device_bytes(made))
        freed, left = {}, {}
        for part in PARTS:
            before = allocated(made)
            made.offload([part])
            less[part], freed[part] = full[-1] - device_bytes(made), before - allocated(made)
            made.onload([part])
            left[part] = allocated(made) - before
        weights = exported(made)
    return Offloaded(Outcome(log_probs, steps, weights if rendezvous.rank == 0 else {}), full, less, empty, freed, left)


def device_bytes(made: TrainEngine) -> int:
    """What the storages of parameters, gradients and optimizer hold."""
    tensors = (tensor for part in PARTS for tensor in made._memory._tensors[part]())  # type: ignore[attr-defined]
    return sum(storage.nbytes() for storage in set(made._memory._on_device(tensors)))  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Adapted(Outcome):
    """The same of a model with adapters, these (rank 0's), log-probs then, and how many parameters are trained here."""

    adapters: dict[str, np.ndarray]
    log_probs_after: tuple[np.ndarray, np.ndarray] | None
    of_base: tuple[np.ndarray, np.ndarray] | None  # log-probs without adapters, then
    trained: int


def adapted_steps(
    rendezvous: Rendezvous, listener: socket.socket | None, setting: Setting, folder: Path | None = None
) -> Adapted:
    """`three_steps` of a model with adapters, which are saved in the end, to `folder` if that is given."""
    with engine(rendezvous, listener, setting) as made, tempfile.TemporaryDirectory() as scratch:
        log_probs = made.log_probs(make_batch(), TEMPERATURE)
        steps = [made.train(make_batch(seed), LossSpec(sft), temperature=TEMPERATURE) for seed in (0, 1)]
        steps.append(made.train(make_batch(2), POLICY))
        weights, log_probs_after = exported(made), made.log_probs(make_batch(), TEMPERATURE)
        of_base = made.log_probs(make_batch(), TEMPERATURE, adapted=False)
        path = folder or Path(scratch) / "adapters"
        made.save_adapters(path)
        trained = sum(p.numel() for group in made._optimizer.param_groups for p in group["params"])
        if rendezvous.rank:
            return Adapted(log_probs, steps, {}, {}, log_probs_after, of_base, trained)
        saved = load_file(path / "adapter_model.safetensors")
        adapters = {name: tensor.float().numpy() for name, tensor in saved.items()}
        return Adapted(log_probs, steps, weights, adapters, log_probs_after, of_base, trained)


def allocated(made: TrainEngine) -> int:
    """All that torch has on a GPU; on a CPU, where nobody counts, the same as above."""
    return torch.cuda.memory_allocated() if torch.cuda.is_available() else device_bytes(made)


def reached(rendezvous: Rendezvous, listener: socket.socket | None, setting: Setting) -> dict[str, dict[str, Any]]:
    """The fields of Megatron's own objects, and the classes of the model's modules, of an engine that has trained."""
    with engine(rendezvous, listener, setting) as made:
        made.train(make_batch(), LossSpec(sft))
        return _fields(made)  # who holds one of them after the engine's end holds gloo's threads, which poll


def _fields(made: Any) -> dict[str, dict[str, Any]]:
    (chunk, *_), optimized = made._wrapped, made._optimizer
    first = getattr(optimized, "chained_optimizers", [optimized])[0]
    modules = {type(module).__name__: True for module in chunk.modules()}
    objects = {"model": chunk.config, "ddp": chunk.ddp_config, "optimizer": first.config}
    plain = (bool, int, str, float, list)
    seen = {name: {k: v for k, v in vars(it).items() if isinstance(v, plain)} for name, it in objects.items()}
    return {**seen, "modules": modules}


def initial_weights(rendezvous: Rendezvous, listener: socket.socket | None, setting: Setting) -> dict[str, np.ndarray]:
    """The weights as loaded."""
    with engine(rendezvous, listener, setting) as made:
        return exported(made) if rendezvous.rank == 0 else list(exported(made)) and {}


def save_after_two_steps(
    rendezvous: Rendezvous, listener: socket.socket | None, setting: Setting, folder: Path
) -> list[dict[str, float]]:
    """Two steps with a checkpoint between, both kinds of checkpoint, a third step, before which nothing is written.

    Returns the third and a fourth step, which alone shows what the optimizer made of the third.
    """
    trained = threading.Event()
    written = FileSystemWriter.write_data

    def write_late(*arguments: Any) -> Any:
        assert trained.wait(HUNG_S)
        return written(*arguments)

    with engine(rendezvous, listener, setting) as made:
        made.train(make_batch(0), LossSpec(sft))
        made.save(folder / "earlier")
        made.finish_save()
        made.train(make_batch(1), LossSpec(sft))
        with mock.patch.object(FileSystemWriter, "write_data", write_late):
            made.save(folder / "state")
            made.save_hf(folder / "hf")
            step = made.train(make_batch(THIRD), LossSpec(sft))
            assert rendezvous.rank != 0 or not made.is_saved()
            trained.set()
            made.finish_save()
        return [step, made.train(make_batch(FOURTH), LossSpec(sft))]


def save_to_a_full_disk(
    rendezvous: Rendezvous, listener: socket.socket | None, setting: Setting, folder: Path
) -> str | None:
    """What `is_saved` says where no file may grow beyond 1000 bytes."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with engine(rendezvous, listener, setting) as made:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
        try:
            made.save(folder)
            while not made.is_saved():
                time.sleep(0.01)
        except OSError as error:
            return str(error)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    return None


def save_without_copies(
    rendezvous: Rendezvous, listener: socket.socket | None, setting: Setting, folder: Path
) -> list[dict[str, float]]:
    """A checkpoint after two steps whose copies exceed `copy_bytes`, so that it is written before training goes on."""
    with engine(rendezvous, listener, setting) as made:
        for seed in (0, 1):
            made.train(make_batch(seed), LossSpec(sft))
        made.save(folder / "state")
        assert made.is_saved()
        steps = [made.train(make_batch(seed), LossSpec(sft)) for seed in (THIRD, FOURTH)]
        made.finish_save()
        return steps


def resume(
    rendezvous: Rendezvous, listener: socket.socket | None, setting: Setting, folder: Path
) -> list[dict[str, float]]:
    """The third and fourth step, from the checkpoint."""
    with engine(rendezvous, listener, setting) as made:
        made.load(folder / "state")
        return [made.train(make_batch(i), LossSpec(sft)) for i in (THIRD, FOURTH)]


def learning_rates(
    rendezvous: Rendezvous, listener: socket.socket | None, setting: Setting, override_at: int
) -> list[float]:
    """The learning rate of each of six steps, the one at `override_at` being replaced."""
    with engine(rendezvous, listener, setting) as made:
        batch = make_batch(lengths=(4, 4))
        return [
            made.train(batch, LossSpec(sft), learning_rate=0.5 if i == override_at else None)["lr"] for i in range(6)
        ]


def infinite(inputs: LossInputs, parameters: None) -> TokenLoss:
    """Infinite everywhere."""
    return inputs.logprobs * np.inf, {}


def steep(inputs: LossInputs, parameters: None) -> TokenLoss:
    """0, with an infinite slope."""
    return (inputs.logprobs - inputs.logprobs.detach()).sqrt(), {}


def complaints(rendezvous: Rendezvous, listener: socket.socket | None, setting: Setting) -> list[str]:
    """What the engine says of batches that it cannot train on."""
    batch = make_batch()
    masked = Batch(batch.lengths, batch.tokens, {"loss_mask": np.zeros(len(batch.tokens), np.float32)})
    said = []
    with engine(rendezvous, listener, setting) as made:
        for bad in (masked, make_batch(lengths=(200,))):
            try:
                made.train(bad, LossSpec(sft))
            except ValueError as error:
                said.append(str(error))
    return said


def norms_by_trained_tokens(rendezvous: Rendezvous, listener: socket.socket | None, setting: Setting) -> list[float]:
    """Norms of gradients without a policy loss, where all but the first, half, or few tokens are trained on."""
    batch, norms = make_batch(lengths=(20,) * 4), []
    with engine(rendezvous, listener, setting) as made:
        for trained in (19, 10, 1):
            mask = (np.arange(80) % 20 >= 20 - trained).astype(np.float32)
            of_few = replace(batch, fields={**batch.fields, "loss_mask": mask})
            norms.append(made.train(of_few, LossSpec(_nothing), learning_rate=0.0)["grad_norm"])
    return norms


def train_first(rendezvous: Rendezvous, listener: socket.socket | None, setting: Setting) -> None:
    """A step with experts, as the first thing that this process does with them."""
    MoEAuxLossAutoScaler.main_loss_backward_scale = None
    with engine(rendezvous, listener, setting) as made:
        made.train(make_batch(), LossSpec(_nothing))


def _nothing(inputs: LossInputs, parameters: None) -> TokenLoss:
    return 0 * inputs.logprobs, {}


@dataclass(frozen=True)
class BadSteps:
    """What came of steps that are not finite, whether they left the weights alone, and the good step after them."""

    outcomes: list[float | str]
    unchanged: bool
    good: dict[str, float]
    weights: dict[str, np.ndarray]


def bad_steps(rendezvous: Rendezvous, listener: socket.socket | None, setting: Setting, loss: str, n: int) -> BadSteps:
    """n steps with an infinite loss, or with a finite one of infinite slope, then a good step."""
    outcomes: list[float | str] = []
    with engine(rendezvous, listener, setting) as made:
        before = exported(made)
        for _ in range(n):
            try:
                outcomes.append(
                    made.train(make_batch(), LossSpec({"infinite": infinite, "steep": steep}[loss]))["skipped"]
                )
            except NonFiniteError as error:
                outcomes.append(str(error))
        after = exported(made)
        good = made.train(make_batch(1), LossSpec(sft))
        weights = exported(made)
    unchanged = all(np.array_equal(before[name], weight) for name, weight in after.items())
    return BadSteps(outcomes, unchanged, good, weights if rendezvous.rank == 0 else {})


def steps_after_warmup(
    rendezvous: Rendezvous, listener: socket.socket | None, setting: Setting, warms_up: bool
) -> tuple[list[dict[str, float]], dict[str, np.ndarray], bool]:
    """Two steps after a warm-up step with other sequences, or after none; what of the process they and that change."""
    with engine(rendezvous, listener, setting) as made:
        torch.manual_seed(0)
        if warms_up:
            tokens = make_batch(7, (30, 30, 11))
            mask = {"loss_mask": np.ones_like(tokens.fields["loss_mask"])}
            made.warm_up(Batch(tokens.lengths, tokens.tokens, mask))
        loss = LossSpec(squared if setting.role == "critic" else sft)
        steps = [made.train(make_batch(step), loss) for step in range(2)]
        return steps, exported(made), torch.rand(3).numpy()


def save_with_a_mark(
    rendezvous: Rendezvous, listener: socket.socket | None, setting: Setting, folder: Path, mark: str
) -> list[str]:
    """Saves in a process whose children inherit `mark`; returns the children's command lines."""
    os.environ["SAVED_BY"] = mark
    with engine(rendezvous, listener, setting) as made:
        made.save(folder)
        made.finish_save()
    return [" ".join(child.cmdline()) for child in psutil.Process().children(recursive=True)]


def store_addresses(rendezvous: Rendezvous, listener: socket.socket | None, setting: Setting) -> list[str]:
    """The addresses at which this process listens while an engine is up."""
    with engine(rendezvous, listener, setting) as made:
        made.train(make_batch(), LossSpec(sft))
        connections = psutil.Process().net_connections("inet")
        return [c.laddr.ip for c in connections if c.status == psutil.CONN_LISTEN]


def threads_left(rendezvous: Rendezvous, listener: socket.socket | None, setting: Setting) -> int:
    """How many threads this process has after an engine."""
    with engine(rendezvous, listener, setting) as made:
        made.train(make_batch(), LossSpec(sft))
    return psutil.Process().num_threads()


def gathered(
    rendezvous: Rendezvous, listener: socket.socket | None, setting: Setting
) -> tuple[list, list[bytes], dict[str, str]]:
    """What a sender lays out, what it holds of each bucket, of one tensor here, and what the rank itself has of all."""
    from areal_like.backends.transports.collective.rank import CollectiveSender

    with engine(rendezvous, listener, setting) as made:
        sender = CollectiveSender(made, rendezvous.rank, "127.0.0.1")
        buckets, held = sender.layout(bucket_mb=0), []
        for number in range(len(buckets)):
            sender.prepare(number)
            held.append(sender.ready.popleft().numpy().tobytes() if sender.ready else b"")
        whole = {name: sha256(value.tobytes()).hexdigest() for name, value in exported(made).items()}
        return buckets, held, whole


def messages(rendezvous: Rendezvous, listener: socket.socket | None, setting: Setting) -> list[int]:
    """How many objects a rank hands to others, or to itself, while all weights are gathered, and then once more."""
    names, counts, weights = ("all_gather_object", "broadcast_object_list"), [], []
    with engine(rendezvous, listener, setting) as made, contextlib.ExitStack() as patches:
        wrapped = [mock.patch.object(torch.distributed, name, wraps=getattr(torch.distributed, name)) for name in names]
        calls = [patches.enter_context(patch) for patch in wrapped]
        for _ in range(2):
            before = sum(call.call_count for call in calls)
            weights.append(exported(made))
            counts.append(sum(call.call_count for call in calls) - before)
    assert weights[0].keys() == weights[1].keys()
    assert all(np.array_equal(weights[0][name], weights[1][name]) for name in weights[0])
    return counts


def log_probs_and_weights(
    rendezvous: Rendezvous, listener: socket.socket | None, setting: Setting, lengths: tuple[int, ...]
) -> tuple[tuple[np.ndarray, np.ndarray] | None, dict[str, np.ndarray]]:
    """Log-probs of all tokens under the weights as loaded, and these; weights from rank 0 only."""
    batch = make_batch(lengths=lengths)
    del batch.fields["loss_mask"]  # without it no token is left out
    with engine(rendezvous, listener, setting) as made:
        log_probs, weights = made.log_probs(batch), exported(made)
    return log_probs, weights if rendezvous.rank == 0 else {}


def fsdp_gradients(
    rendezvous: Rendezvous, listener: socket.socket | None, setting: Setting, lengths: tuple[int, ...]
) -> dict[str, np.ndarray]:
    """The gradients of a supervised loss under FSDP, by transformers' names; from rank 0 only."""
    with engine(rendezvous, listener, setting) as made:
        made._gradients(make_batch(lengths=lengths), LossSpec(sft), 1.0)
        whole = {name: p.grad.full_tensor().numpy() for name, p in made._model.named_parameters() if p.grad is not None}
    return whole if rendezvous.rank == 0 else {}


def updates(
    rendezvous: Rendezvous, listener: socket.socket | None, setting: Setting, lengths: tuple[int, ...]
) -> dict[str, np.ndarray]:
    """What Adam's first step of a supervised loss subtracts from each weight, by Hugging Face name; rank 0 only."""
    with engine(rendezvous, listener, setting) as made:
        before = exported(made)
        made.train(make_batch(lengths=lengths), LossSpec(sft))
        after = exported(made)
    return {name: before[name] - after[name] for name in before} if rendezvous.rank == 0 else {}


def squared(inputs: LossInputs, parameters: None) -> TokenLoss:
    """Half the squared distance of values from the field `advantages`."""
    assert inputs.values is not None
    distance = inputs.values - inputs.fields["advantages"]
    return distance**2 / 2, {"value": inputs.values.detach()}


@dataclass(frozen=True)
class Valued:
    """What one rank saw of a critic: values before and after two steps, the steps, the weights then (rank 0's)."""

    before: tuple[np.ndarray, np.ndarray] | None
    after: tuple[np.ndarray, np.ndarray] | None
    steps: list[dict[str, float]]
    weights: dict[str, np.ndarray]


def critic_steps(
    rendezvous: Rendezvous,
    listener: socket.socket | None,
    setting: Setting,
    folder: Path | None = None,
    state: Path | None = None,
) -> Valued:
    """Two steps of a critic; with `folder` it is saved there in the end, and with `state` all that goes on from it."""
    with engine(rendezvous, listener, replace(setting, role="critic")) as made:
        before = made.values(make_batch())
        steps = [made.train(make_batch(seed), LossSpec(squared)) for seed in (0, 1)]
        after, weights = made.values(make_batch()), exported(made)
        if folder is not None:
            made.save_hf(folder)
        if state is not None:
            made.save(state)
            made.finish_save()
    return Valued(before, after, steps, weights if rendezvous.rank == 0 else {})


def resumed_critic(
    rendezvous: Rendezvous, listener: socket.socket | None, setting: Setting, state: Path | None
) -> list[dict[str, float]]:
    """The third step of `critic_steps`, from what it saved, or after the first two."""
    with engine(rendezvous, listener, replace(setting, role="critic")) as made:
        if state is not None:
            made.load(state)
        else:
            for seed in (0, 1):
                made.train(make_batch(seed), LossSpec(squared))
        return [made.train(make_batch(2), LossSpec(squared))]


@dataclass(frozen=True)
class Referred:
    """What one rank saw of a reference: log-probs and weights as loaded, and after each update, and what it refuses."""

    log_probs: list[tuple[np.ndarray, np.ndarray] | None]
    weights: list[dict[str, np.ndarray]]
    refused: list[str]
    trainable: int


def reference_updates(
    rendezvous: Rendezvous, listener: socket.socket | None, setting: Setting, updates: list[tuple[Path, float]]
) -> Referred:
    """Log-probs of a reference, and again after each update by a checkpoint and a decay."""
    refused, log_probs, weights = [], [], []
    with engine(rendezvous, listener, replace(setting, role="ref")) as made:
        for update in [None, *updates]:
            if update is not None:
                made.load_hf(*update)
            log_probs.append(made.log_probs(make_batch(), TEMPERATURE))
            weights.append(exported(made))
        for method, *arguments in (("train", make_batch(), LossSpec(sft)), ("values", make_batch())):
            try:
                getattr(made, method)(*arguments)
            except RoleError as error:
                refused.append(str(error))
        trainable = sum(
            hasattr(p, "main_grad") or p.requires_grad or p.grad is not None
            for m in made._wrapped
            for p in m.parameters()
        )
        trainable += sum(part is not None for part in (made._optimizer, made._scheduler))
    return Referred(log_probs, weights if rendezvous.rank == 0 else [], refused, trainable)


def moved_reference(
    rendezvous: Rendezvous, listener: socket.socket | None, setting: Setting, new: Path, folder: Path
) -> tuple[dict[str, np.ndarray], list]:
    """A reference that has given log-probs, moved halfway to `new`, and is saved; its weights and log-probs then."""
    with engine(rendezvous, listener, replace(setting, role="ref")) as made:
        made.log_probs(make_batch())
        made.load_hf(new, 0.5)
        made.save(folder)
        while not made.is_saved():
            time.sleep(0.01)
        made.finish_save()
        return exported(made), made.log_probs(make_batch())


def resumed_reference(
    rendezvous: Rendezvous, listener: socket.socket | None, setting: Setting, folder: Path
) -> tuple[dict[str, np.ndarray], list]:
    """The weights of a new reference that continues from there, and its log-probs."""
    with engine(rendezvous, listener, replace(setting, role="ref")) as made:
        made.load(folder)
        return exported(made), made.log_probs(make_batch())


def _shape_of(model: Path) -> ModelSpec | None:
    """Return the shape of a model, None for a family that only transformers knows."""
    try:
        return load_model(model)
    except ModelError:
        return None
