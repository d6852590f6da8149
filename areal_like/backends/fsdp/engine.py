"""One rank of the FSDP trainer: any language model that transformers has, its parameters sharded over all ranks."""

import gc
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
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
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from areal_like.backends.fsdp import attention, lora, optimizer
from areal_like.backends.fsdp.adapter_states import FSDPAdapterStates
from areal_like.backends.fsdp.checkpoint_names import has_tower, head_name, in_checkpoint, kept_tensors
from areal_like.backends.fsdp.grid import make_grid
from areal_like.backends.fsdp.model import sharded_model, take_weights
from areal_like.backends.fsdp.probe import check_packing
from areal_like.backends.fsdp.vision import Vision
from areal_like.backends.training.base import BaseEngine
from areal_like.backends.training.means import global_means
from areal_like.backends.training.process import join
from areal_like.backends.training.saving import Saving
from areal_like.backends.training.value_head import HEAD_NAME
from areal_like.core.trainer import packing
from areal_like.core.trainer.device_batch import DeviceBatch, DeviceBatches
from areal_like.core.trainer.engine import EngineSpec, Rendezvous
from areal_like.core.trainer.logprobs import log_probs_and_entropy
from areal_like.core.types import Batch, LossSpec


class FSDPEngine(BaseEngine):
    """A TrainEngine over torch's FSDP2; ranks may share sequences, and split matrices (`fsdp/grid.py`)."""

    def __init__(self, spec: EngineSpec, rendezvous: Rendezvous) -> None:
        super().__init__(spec)
        join(rendezvous, self.device, from_host=spec.config.fsdp.offload_params)
        self._grid = make_grid(spec.sizes, self.device.type, rendezvous.timeout_s)
        torch.manual_seed(spec.seed)
        self._model = sharded_model(spec, self.device, self._grid)
        self._models = [self._model]
        self._vision = Vision(self._model, spec.path) if has_tower(self._model) else None
        check_packing(self._model, self._vision, spec, self._grid, self.device)
        self._add_hooks(self._models)
        if spec.optimizer is not None:
            self._optimizer = optimizer.make_optimizer(self._model, spec.optimizer)
            self._schedule = optimizer.make_schedule(self._optimizer, spec.optimizer, spec.total_steps or 1)
            self._clip = spec.optimizer.gradient_clipping
            self._scaler = optimizer.make_scaler(spec.config.dtype, self.device)
        self._adapter_states = self._make_adapter_states()
        self._manage_memory({"params": self._parameters, "grads": tuple, "optimizer": self._states})
        self._stagers = {name: BlockingAsyncStager(cache_staged_state_dict=True) for name in spec.adapters or ("",)}

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        adapted = lora.adapted_layers(self._model)
        with self._memory.hold("params"):
            for name, kept in kept_tensors(self._model):
                if name.rpartition(".")[2] not in lora.MATRICES:
                    yield from self._export(name, kept.detach(), adapted)

    def _export(self, name: str, kept: Tensor, adapted: Mapping[str, torch.nn.Module]) -> Iterator[tuple[str, Tensor]]:
        """Yield a tensor of the model under its names in a checkpoint; all ranks gather it together."""
        if not isinstance(kept, DTensor):  # a buffer, in the data type that it computes with
            yield from in_checkpoint(self._model, name, kept).items()
            return
        weight = kept.to(self.device).full_tensor()
        if self._is_critic and name == head_name(self._model):
            yield HEAD_NAME, weight
            return
        weight = weight.to(getattr(torch, self._spec.config.dtype))
        if self._spec.lora:
            yield from lora.merge(self._model, adapted, name, weight, self._spec.lora.scale).items()
        else:
            yield from in_checkpoint(self._model, name, weight).items()

    def _computing(self) -> AbstractContextManager[None]:
        return nullcontext()

    def _complete_weights(self) -> None:
        """Return: FSDP gathers weights when they are used."""

    def _adapted_layers(self) -> Iterable[torch.nn.Module]:
        return lora.adapted_layers(self._model).values()

    def _adapters(self) -> Iterator[tuple[str, lora.Adapter]]:
        return lora.adapters_in_files(self._model)

    def _make_adapter_states(self) -> FSDPAdapterStates | None:
        if not self._spec.adapters:
            return None
        trained = [p for group in self._optimizer.param_groups for p in group["params"]]
        return FSDPAdapterStates(self._spec.adapters, trained, self._optimizer, self._schedule, self._scaler)

    def _exchange(self, adapter: str, skipped: int) -> int:
        if self._adapter_states is None:
            return super()._exchange(adapter, skipped)
        return self._adapter_states.select(adapter, skipped)

    def _take_weights(self, path: Path, decay: float) -> None:
        take_weights(self._model, path, decay)

    def save(self, path: Path) -> None:
        with self._memory.hold("params", "optimizer"):
            staged = {name: self._stage(name) for name in self._each_adapter()}
            state = staged.get("", staged)  # of several adapters each one's below its name
            group = self._saving_group
            self._saving = Saving(
                path, partial(distributed_checkpoint.save, state, checkpoint_id=path, process_group=group)
            )
            if self._exceeds_limit(staged.get("", {})):
                self._saving.wait()

    def _stage(self, adapter: str) -> dict[str, Any]:
        """Copy the state to host memory, for each adapter always the same, as new memory costs more than the copy."""
        state, stager = self._state(), self._stagers[adapter]
        if not adapter and self._exceeds_limit(state):
            return state
        if stager.state_dict_cache is None:  # it would pin memory where there is no GPU too
            stager.state_dict_cache = _create_cpu_state_dict(state, pin_memory=self.device.type == "cuda")
        return stager.stage(state)

    def _exceeds_limit(self, state: dict[str, Any]) -> bool:
        """Return whether a copy of this rank's share needs more memory than `recover.host_copy_gb`."""
        if self._spec.copy_bytes is None:
            return False
        tensors = (leaf for leaf in tree_leaves(state) if isinstance(leaf, torch.Tensor))
        local = (leaf.to_local() if isinstance(leaf, DTensor) else leaf for leaf in tensors)
        return sum(tensor.nbytes for tensor in local) > self._spec.copy_bytes

    def load(self, path: Path) -> None:
        if not (path / ".metadata").exists():
            raise FileNotFoundError(f"{path} is not a trainer checkpoint (it has no .metadata)")
        with self._memory.hold("params", "optimizer"):
            for name in self._each_adapter():
                state = self._state()
                distributed_checkpoint.load({name: state} if name else state, checkpoint_id=path)
                self._take_state(state)

    def _take_state(self, state: dict[str, Any]) -> None:
        """Load the state that `_state` returned, after a checkpoint filled it."""
        if self._spec.optimizer is None:
            set_model_state_dict(self._model, state["model"])
            return
        options = StateDictOptions(strict=self._spec.lora is None)  # weights that stay are not in it
        model, optimized, groups = state["model"], state["optimizer"], self._optimizer.param_groups
        settings = [{name: value for name, value in group.items() if name != "params"} for group in groups]
        rates = self._schedule.base_lrs
        set_state_dict(
            self._model, self._optimizer, model_state_dict=model, optim_state_dict=optimized, options=options
        )
        for group, own in zip(self._optimizer.param_groups, settings, strict=True):
            group.update(own)  # settings come from the configuration, as Megatron's
        saved = {**state["schedule"], "lr_lambdas": [None] * len(settings), "base_lrs": rates}
        self._schedule.load_state_dict(saved)
        optimizer.set_rates(self._schedule)
        if self._scaler.is_enabled():
            self._scaler.load_state_dict(state["loss_scale"])

    def shutdown(self) -> None:
        vars(self).clear()  # process groups end with all that holds them
        dist.destroy_process_group()
        gc.collect()

    def _state(self) -> dict[str, Any]:
        """Return the state that `save` writes; only weights for a reference."""
        if self._spec.optimizer is None:
            return {"model": get_model_state_dict(self._model)}
        if not self._optimizer.state:
            get_optimizer_state_dict(self._model, self._optimizer)  # makes it by a step without gradients,
            for state in self._optimizer.state.values():
                state["step"].zero_()  # which is none of the run's
        options = StateDictOptions(ignore_frozen_params=self._spec.lora is not None)
        model, optimized = get_state_dict(self._model, self._optimizer, options=options)
        schedule = {name: value for name, value in self._schedule.state_dict().items() if name != "lr_lambdas"}
        scale = {"loss_scale": self._scaler.state_dict()} if self._scaler.is_enabled() else {}
        return {"model": model, "optimizer": optimized, "schedule": schedule, **scale}

    def _parameters(self) -> Iterator[Tensor]:
        """Return the parameters of the model and of all adapters."""
        yield from self._model.parameters()
        if self._adapter_states is not None:
            yield from self._adapter_states.values()

    def _states(self) -> Iterator[Tensor]:
        """Return the optimizer state of the parameters, or nothing without an optimizer."""
        if self._spec.optimizer is not None:
            others = () if self._adapter_states is None else self._adapter_states.states()
            for state in (*self._optimizer.state.values(), *others):
                yield from filter(torch.is_tensor, state.values())

    def _backward(
        self, micro_batches: DeviceBatches, batch: Batch, loss: LossSpec, temperature: float, trained: int
    ) -> Sequence[Mapping[str, Tensor]]:
        def sums_of(micro_batch: DeviceBatch) -> dict[str, Tensor]:
            total, sums = self._loss(loss, batch, micro_batch, self._columns(micro_batch, temperature))
            self._scaler.scale(total).backward()  # a sum, as Megatron's: a mean over many tokens would underflow
            return sums

        with self._hooks.during_pass():
            parts = [sums_of(micro_batch) for micro_batch in micro_batches]
        self._grid.finish_gradients(self._model)
        for gradient in (p.grad for p in self._model.parameters() if p.grad is not None):
            gradient.mul_(dist.get_world_size() / trained)  # FSDP averages over ranks
        return parts

    def _micro_batches(self, batch: Batch, wanted: NDArray[np.bool]) -> DeviceBatches:
        """Return this rank's share."""
        batch = self._prepare(batch)
        sizes = self._spec.sizes
        reader = None if self._vision is None else self._vision.reader
        batch = batch if reader is None else reader.mark(batch)
        count, pack = packing.packs(
            batch,
            self._spec.config.mb_spec,
            dp=sizes.dp,
            dp_rank=self._grid.dp_rank,
            alignment=sizes.cp,
            model=self._spec.shape,
        )
        part = cache(lambda i: self._grid.part(pack(i)))
        return DeviceBatches(count, part, batch, wanted, self.device, None if reader is None else reader.inputs)

    def _outputs(self, micro_batches: DeviceBatches, temperature: float) -> Sequence[Tensor]:
        with torch.no_grad(), self._hooks.during_pass():
            outputs = [self._columns(micro_batch, temperature)[0] for micro_batch in micro_batches]
            self._model.reshard()  # otherwise only a backward pass does
        return outputs

    def _columns(self, micro_batch: DeviceBatch, temperature: float) -> Sequence[Tensor]:
        """Return log-probs and entropies, or a critic's values, of the wanted tokens, each `[n]`; and of k choices."""
        logits = self._logits(micro_batch)
        if self._is_critic:
            return (micro_batch.of_tokens(logits[:, 0]),)
        made = log_probs_and_entropy(logits, **micro_batch.head(temperature), vocab_size=logits.shape[1], group=None)
        return [micro_batch.of_tokens(each) for each in made]

    def _logits(self, micro_batch: DeviceBatch) -> Tensor:
        """Return logits of the predicting places only: `[rows, vocabulary]`, or `[rows, 1]` for a critic."""
        self._hooks.prepare_forward(self._model, micro_batch, trains=torch.is_grad_enabled())
        images = {} if self._vision is None else self._vision.arguments(micro_batch)
        logits: Tensor = self._model(
            input_ids=micro_batch.tokens,
            position_ids=micro_batch.positions,
            use_cache=False,
            logits_to_keep=micro_batch.rows,
            **attention.arguments(micro_batch, self._grid.context),
            **images,
        ).logits.squeeze(0)  # whose gradient is a view, too
        return logits

    def _sum_over_context(self, tensor: Tensor) -> Tensor:
        return self._grid.sum_over_sequences(tensor)

    def _means(self, parts: Sequence[Mapping[str, Tensor]]) -> dict[str, float]:
        return global_means(parts, self.device)

    def _update(self) -> float:
        return optimizer.step_if_finite(self._optimizer, self._clip, self._scaler)

    def _loss_scale(self) -> float | None:
        return self._scaler.get_scale() if self._scaler.is_enabled() else None

    def _advance_schedule(self) -> None:
        self._schedule.step()


ENGINE = FSDPEngine
