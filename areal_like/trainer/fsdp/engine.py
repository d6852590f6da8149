"""One rank of the FSDP trainer: any dense model that transformers has, its parameters sharded over all ranks."""

import gc
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as distributed_checkpoint
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed._state_dict_utils import _create_cpu_state_dict
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)

from areal_like.algorithms.losses import LossInputs, Sequences, of_tokens
from areal_like.config.schema import OptimizerConfig
from areal_like.trainer import packing
from areal_like.trainer.device_batch import DeviceBatch, DeviceBatches, generated
from areal_like.trainer.engine import PARTS, EngineSpec, NonFiniteError, Part, Rendezvous, RoleError
from areal_like.trainer.fsdp import attention, lora, optimizer, ulysses
from areal_like.trainer.fsdp.model import sharded_model, take_weights
from areal_like.trainer.hf_checkpoint import save_together
from areal_like.trainer.logprobs import log_probs_and_entropy
from areal_like.trainer.lora import paused, save_adapters_together
from areal_like.trainer.offload import DeviceMemory
from areal_like.trainer.process import join, prepare_process
from areal_like.trainer.saving import Saving
from areal_like.trainer.unchanged import ANYTHING, unchanged
from areal_like.trainer.value_head import HEAD_NAME
from areal_like.types import Batch, Floats, LossSpec

_HEAD = "lm_head.weight"


class FSDPEngine:
    """A TrainEngine over torch's FSDP2, of d groups of ranks; each group shares its sequences (`fsdp/ulysses.py`)."""

    def __init__(self, spec: EngineSpec, rendezvous: Rendezvous) -> None:
        self._spec, self._is_critic = spec, spec.role == "critic"
        self.device = prepare_process(spec)
        join(rendezvous, self.device, from_host=spec.config.fsdp.offload_params)
        self._group = ulysses.make_group(spec.sizes.cp, rendezvous.timeout_s)
        torch.manual_seed(spec.seed)
        self._model = sharded_model(spec, self.device)
        if spec.optimizer is not None:
            self._optimizer = optimizer.make_optimizer(self._model, spec.optimizer)
            self._schedule = optimizer.make_schedule(self._optimizer, spec.optimizer, spec.total_steps or 1)
        tensors: Mapping[Part, Callable[[], Iterable[Tensor]]] = {
            "params": self._model.parameters,
            "grads": tuple,
            "optimizer": self._states,
        }
        self._memory = DeviceMemory(self.device, tensors, resting=spec.resting)
        self._saving_group = dist.new_group(backend="gloo")  # of its own: it is used while others train
        self._stager = BlockingAsyncStager(cache_staged_state_dict=True)  # new memory costs more than the copy
        self._skipped = 0  # steps in a row

    def log_probs(
        self, batch: Batch, temperature: float = 1.0, adapted: bool = True
    ) -> tuple[NDArray[np.int64], Floats] | None:
        if self._is_critic:
            raise RoleError("a critic has values, not log-probs")
        with paused(lora.adapted_layers(self._model).values(), not adapted):
            wanted = generated(batch)
            return self._read(batch, wanted, lambda micro_batch: self._log_probs_at(micro_batch, temperature)[0])

    def values(self, batch: Batch) -> tuple[NDArray[np.int64], Floats] | None:
        if not self._is_critic:
            raise RoleError(f"a critic has values, the {self._spec.role} has log-probs")
        return self._read(batch, np.ones(len(batch.tokens), bool), self._values_at)

    def train(
        self, batch: Batch, loss: LossSpec, temperature: float = 1.0, learning_rate: float | None = None
    ) -> dict[str, float]:
        if self._spec.optimizer is None:
            raise RoleError(f"the {self._spec.role} has no optimizer")
        with self._memory.needed("params"):
            parts, count = self._gradients(batch, loss, temperature)
            with self._memory.needed("optimizer"):
                step = self._step(self._spec.optimizer, learning_rate)
            return {**self._means(parts, count), **step}  # read before the step, they would leave the device idle

    def warm_up(self, batch: Batch) -> None:
        with unchanged([self._model], self.device):
            self.values(batch) if self._is_critic else self.log_probs(batch)
            if self._spec.optimizer is not None:
                with self._memory.needed("params"):
                    self._gradients(batch, ANYTHING, 1.0)
                self._optimizer.zero_grad()

    def _gradients(self, batch: Batch, loss: LossSpec, temperature: float) -> tuple[list[dict[str, Tensor]], int]:
        """Compute those of the batch's loss; returns sums of each micro-batch, and the number of trained tokens."""
        trained = batch.fields["loss_mask"] > 0
        trained[np.cumsum(batch.lengths) - batch.lengths] = False  # nothing predicts a sequence's first token
        if not (count := int(trained.sum())):
            raise ValueError("no token of the batch is trained on: loss_mask is 0 wherever a token can be predicted")
        parts = [
            self._backward(micro_batch, batch, loss, temperature, count)
            for micro_batch in self._micro_batches(batch, trained)
        ]
        return parts, count

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        dtype, adapted = getattr(torch, self._spec.config.dtype), lora.adapted_layers(self._model)
        with self._memory.needed("params"):
            for name, parameter in self._model.named_parameters():
                layer, _, kind = name.rpartition(".")
                if kind in lora.MATRICES:
                    continue
                weight = parameter.detach().to(self.device).full_tensor()
                if self._is_critic and name == _HEAD:
                    yield HEAD_NAME, weight
                    continue
                weight = weight.to(dtype)
                if kind == "weight" and layer in adapted and self._spec.lora:
                    weight = lora.whole_adapter(adapted[layer]).merged(weight, self._spec.lora.scale)
                yield name, weight
                del weight

    def save_hf(self, path: Path) -> None:
        save_together(path, self.weights(), self._spec)

    def save_adapters(self, path: Path) -> None:
        if self._spec.lora is None:
            raise RoleError(f"the {self._spec.role} has no adapters")
        adapted = lora.adapted_layers(self._model)
        adapters = ((name, lora.whole_adapter(layer)) for name, layer in adapted.items())
        with self._memory.needed("params"):
            save_adapters_together(path, adapters, self._spec, self._spec.lora)

    def load_hf(self, path: Path, decay: float) -> None:
        if self._spec.optimizer is not None:
            raise RoleError(f"the {self._spec.role} has an optimizer")
        with self._memory.needed("params"):
            take_weights(self._model, path, decay)

    def save(self, path: Path) -> None:
        with self._memory.needed("params", "optimizer"):
            state = self._state()
            if self._stager.state_dict_cache is None:  # it would pin memory where there is no GPU too
                self._stager.state_dict_cache = _create_cpu_state_dict(state, pin_memory=self.device.type == "cuda")
            state = self._stager.stage(state)
        group = self._saving_group
        self._saving = Saving(
            path, partial(distributed_checkpoint.save, state, checkpoint_id=path, process_group=group)
        )

    def is_saved(self) -> bool:
        return self._saving.is_written()

    def finish_save(self) -> None:
        self._saving.finish()
        del self._saving

    def load(self, path: Path) -> None:
        if not (path / ".metadata").exists():
            raise FileNotFoundError(f"{path} holds no trainer checkpoint (it has no .metadata)")
        options = StateDictOptions(strict=self._spec.lora is None)  # weights that stay are not in it
        with self._memory.needed("params", "optimizer"):
            state = self._state()
            distributed_checkpoint.load(state, checkpoint_id=path)
            if self._spec.optimizer is None:
                set_model_state_dict(self._model, state["model"])
                return
            model, optimized = state["model"], state["optimizer"]
            set_state_dict(
                self._model, self._optimizer, model_state_dict=model, optim_state_dict=optimized, options=options
            )
        self._schedule.load_state_dict({**state["schedule"], "lr_lambdas": [None] * len(self._optimizer.param_groups)})
        optimizer.set_rates(self._schedule)

    def offload(self, parts: Collection[Part] = PARTS) -> None:
        self._memory.offload(parts)

    def onload(self, parts: Collection[Part] = PARTS) -> None:
        self._memory.onload(parts)

    def shutdown(self) -> None:
        vars(self).clear()  # process groups end with all that holds them
        dist.destroy_process_group()
        gc.collect()

    def _state(self) -> dict[str, Any]:
        """Return what `save` writes; only weights for a reference."""
        if self._spec.optimizer is None:
            return {"model": get_model_state_dict(self._model)}
        if not self._optimizer.state:
            get_optimizer_state_dict(self._model, self._optimizer)  # makes it by a step without gradients,
            for state in self._optimizer.state.values():
                state["step"].zero_()  # which is none of the run's
        options = StateDictOptions(ignore_frozen_params=True)
        model, optimized = get_state_dict(self._model, self._optimizer, options=options)
        schedule = {name: value for name, value in self._schedule.state_dict().items() if name != "lr_lambdas"}
        return {"model": model, "optimizer": optimized, "schedule": schedule}

    def _states(self) -> Iterator[Tensor]:
        """Return the optimizer state of the parameters, or nothing without an optimizer."""
        if self._spec.optimizer is not None:
            for state in self._optimizer.state.values():
                yield from filter(torch.is_tensor, state.values())

    def _backward(
        self, micro_batch: DeviceBatch, batch: Batch, loss: LossSpec, temperature: float, count: int
    ) -> dict[str, Tensor]:
        """Add the gradients of a micro-batch's loss; returns its sums of loss and statistics."""
        over_ranks = partial(ulysses.sum_over, self._group)
        sequences = Sequences(micro_batch.sequences, len(batch.lengths), over_ranks)
        per_token, stats = of_tokens(loss, self._loss_inputs(micro_batch, temperature, sequences))
        weights = micro_batch.fields.get("loss_weights")
        total = (per_token if weights is None else per_token * weights).sum()
        (total * (dist.get_world_size() / count)).backward()  # FSDP averages gradients over ranks
        return {"loss": total.detach(), **{name: value.detach().sum() for name, value in stats.items()}}

    def _micro_batches(self, batch: Batch, wanted: NDArray[np.bool]) -> DeviceBatches:
        """This rank's share."""
        sizes = self._spec.sizes
        dp_rank, cp_rank = divmod(dist.get_rank(), sizes.cp)
        count, pack = packing.packs(batch, self._spec.config.mb_spec, dp=sizes.dp, dp_rank=dp_rank, alignment=sizes.cp)
        part = cache(lambda i: ulysses.part(pack(i), sizes.cp, cp_rank))
        return DeviceBatches(count, part, batch, wanted, self.device)

    def _read(
        self, batch: Batch, wanted: NDArray[np.bool], at: Callable[[DeviceBatch], Tensor]
    ) -> tuple[NDArray[np.int64], Floats]:
        """Apply `at` to every micro-batch, without gradients."""
        micro_batches = self._micro_batches(batch, wanted)
        with self._memory.needed("params"), torch.no_grad():
            values = [at(micro_batch) for micro_batch in micro_batches]
            self._model.reshard()  # what only a backward pass would do
        return micro_batches.targets, torch.cat(values).cpu().numpy()

    def _loss_inputs(self, micro_batch: DeviceBatch, temperature: float, sequences: Sequences) -> LossInputs:
        if self._is_critic:
            values = self._values_at(micro_batch)
            nothing = values.new_empty(0)
            return LossInputs(nothing, nothing, micro_batch.fields, sequences, values)
        log_probs, entropy = self._log_probs_at(micro_batch, temperature)
        return LossInputs(log_probs, entropy, micro_batch.fields, sequences)

    def _values_at(self, micro_batch: DeviceBatch) -> Tensor:
        """A value for every label, from the place that predicts it, `[rows]`."""
        return self._logits(micro_batch)[:, 0]

    def _log_probs_at(self, micro_batch: DeviceBatch, temperature: float) -> tuple[Tensor, Tensor]:
        logits = self._logits(micro_batch)
        return log_probs_and_entropy(
            logits, micro_batch.labels, temperature=temperature, vocab_size=logits.shape[1], group=None
        )

    def _logits(self, micro_batch: DeviceBatch) -> Tensor:
        """Return logits of the predicting places only: `[rows, vocabulary]`, or `[rows, 1]` for a critic."""
        logits: Tensor = self._model(
            input_ids=micro_batch.tokens,
            position_ids=micro_batch.positions,
            use_cache=False,
            logits_to_keep=micro_batch.rows,
            **attention.arguments(micro_batch, self._group),
        ).logits.squeeze(0)  # whose gradient is a view, too
        return logits

    def _means(self, parts: list[dict[str, Tensor]], count: int) -> dict[str, float]:
        """Loss and statistics, the same on every rank."""
        names = list(parts[0])
        sums = torch.stack([sum(part[name] for part in parts).double() for name in names])
        dist.all_reduce(sums)
        means = {name: total / count for name, total in zip(names, sums.tolist(), strict=True)}
        return {**means, "loss_tokens": float(count)}

    def _step(self, section: OptimizerConfig, learning_rate: float | None) -> dict[str, float]:
        """The update, and what is known of it; every rank sees the same numbers and decides alike."""
        scheduled = [group["lr"] for group in self._optimizer.param_groups]
        for group in self._optimizer.param_groups:
            group["lr"] = group["lr"] if learning_rate is None else learning_rate
        lr = float(self._optimizer.param_groups[0]["lr"])
        grad_norm = optimizer.step_if_finite(self._optimizer, section.gradient_clipping)
        self._optimizer.zero_grad()
        for group, rate in zip(self._optimizer.param_groups, scheduled, strict=True):
            group["lr"] = rate
        finite = math.isfinite(grad_norm)
        if finite and learning_rate is None:
            self._schedule.step()
        self._skipped = 0 if finite else self._skipped + 1
        if self._skipped > (limit := section.max_skipped_steps):
            raise NonFiniteError(
                f"the gradient norm is {grad_norm}; more than {limit} steps in a row were skipped "
                f"({self._spec.role}.optimizer.max_skipped_steps)"
            )
        return {"grad_norm": grad_norm, "lr": lr, "skipped": float(not finite)}
