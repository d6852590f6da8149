"""One rank of the Megatron trainer: each is given the same batch and finds its own share (`trainer/packing.py`)."""

import math
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from areal_like.algorithms.losses import LossInputs, Sequences, of_tokens
from areal_like.trainer import packing
from areal_like.trainer.device_batch import DeviceBatch, DeviceBatches, generated
from areal_like.trainer.engine import PARTS, EngineSpec, NonFiniteError, Part, Rendezvous, RoleError
from areal_like.trainer.hf_checkpoint import save_together
from areal_like.trainer.host_copies import HostCopies
from areal_like.trainer.lora import paused, save_adapters_together
from areal_like.trainer.megatron.cpu import cuda as cpu
from areal_like.trainer.megatron.options import row_multiple, transformer_options
from areal_like.trainer.offload import DeviceMemory
from areal_like.trainer.process import prepare_process
from areal_like.trainer.unchanged import ANYTHING, remembered, unchanged
from areal_like.types import Batch, Floats, LossSpec

cpu.install()  # before anything imports megatron.core
# isort: split

from megatron.core import parallel_state  # noqa: E402
from megatron.core.utils import get_model_config  # noqa: E402

from areal_like.trainer.logprobs import log_probs_and_entropy_of_hidden  # noqa: E402
from areal_like.trainer.megatron import optimizer, parallel  # noqa: E402
from areal_like.trainer.megatron.bridges import ModelSource, make_bridge  # noqa: E402
from areal_like.trainer.megatron.checkpoint import load_checkpoint, save_checkpoint  # noqa: E402
from areal_like.trainer.megatron.dist_weights import WeightsFrom  # noqa: E402
from areal_like.trainer.megatron.forward import Head, forward_backward  # noqa: E402
from areal_like.trainer.megatron.lora import LoRABridge  # noqa: E402
from areal_like.trainer.megatron.pack import allow_shared  # noqa: E402
from areal_like.trainer.megatron.statistics import means  # noqa: E402


class MegatronEngine:
    """A TrainEngine in one layout of Megatron-core."""

    def __init__(self, spec: EngineSpec, rendezvous: Rendezvous) -> None:
        config, sizes = spec.config, spec.sizes
        self._spec, self._is_critic = spec, spec.role == "critic"
        self._rows = row_multiple(config.megatron.override_transformer_config) or 1
        self.device = prepare_process(spec)
        options = transformer_options(config, device=spec.device, pipelined=sizes.pp > 1, interleaved=sizes.vpp > 1)
        dtype = getattr(torch, config.dtype)
        source = ModelSource(spec.path, dtype, sizes, options, value_head=self._is_critic, seed=spec.seed)
        with cpu.cpu_as_cuda():
            parallel.initialize(rendezvous, sizes, self.device, spec.seed)
            bridge = make_bridge(config.megatron.bridge_type, source)
            if spec.weights is not None:
                bridge = WeightsFrom(spec.weights, bridge, source)
            self._adapted = LoRABridge(bridge, spec.lora, spec.seed) if spec.lora else None
            self._bridge = self._adapted or bridge
            self._vocab_size = source.config.for_bridge.vocab_size
            self._models = self._bridge.build()
            if spec.config.mb_spec.share_prompts:
                allow_shared(self._models)
            self._bridge.load(self._models, spec.path)
            overlap = spec.device == "cuda" and sizes.dp * sizes.cp > 1
            self._optimizer: Any = None
            self._scheduler: Any = None
            trained = spec.optimizer is not None
            self._wrapped = optimizer.wrap_models(self._models, config, trained=trained, overlap=overlap)
            if spec.optimizer is not None:
                steps = optimizer.schedule_steps(spec.optimizer, spec.total_steps, spec.role)
                self._optimizer = optimizer.make_optimizer(self._wrapped, config, spec.optimizer)
                self._scheduler = optimizer.make_schedule(self._optimizer, spec.optimizer, steps)
        tensors = optimizer.tensors(self._wrapped, self._optimizer)
        self._memory = DeviceMemory(self.device, tensors, resting=spec.resting)
        self._copies = HostCopies()
        self._saving_group = dist.new_group(backend="gloo")  # of its own: it is used while others train
        self._skipped = 0  # steps in a row

    def log_probs(
        self, batch: Batch, temperature: float = 1.0, adapted: bool = True
    ) -> tuple[NDArray[np.int64], Floats] | None:
        if self._is_critic:
            raise RoleError("a critic has values, not log-probs")
        with paused(self._adapted.of_layers if self._adapted else (), not adapted):
            return self._read(batch, generated(batch), temperature)

    def values(self, batch: Batch) -> tuple[NDArray[np.int64], Floats] | None:
        if not self._is_critic:
            raise RoleError(f"a critic has values, the {self._spec.role} has log-probs")
        return self._read(batch, np.ones(len(batch.tokens), bool))

    def train(
        self, batch: Batch, loss: LossSpec, temperature: float = 1.0, learning_rate: float | None = None
    ) -> dict[str, float]:
        if self._spec.optimizer is None:
            raise RoleError(f"the {self._spec.role} has no optimizer")
        with self._memory.needed("params", "grads"), cpu.cpu_as_cuda():
            put_back = remembered(self._models)  # with gradients Megatron moves the routers' biases
            parts = self._gradients(batch, loss, temperature)
            with self._memory.needed("optimizer"):
                step = self._step(learning_rate, put_back)
            return {**means(parts, self.device), **step}  # read before the step, they would leave the device idle

    def warm_up(self, batch: Batch) -> None:
        with unchanged(self._models, self.device):
            self.values(batch) if self._is_critic else self.log_probs(batch)
            if self._spec.optimizer is not None:
                with self._memory.needed("params", "grads"), cpu.cpu_as_cuda():
                    self._gradients(batch, ANYTHING, 1.0)

    def _gradients(self, batch: Batch, loss: LossSpec, temperature: float) -> list[dict[str, torch.Tensor]]:
        """Compute those of the batch's loss; returns sums of each micro-batch for `means`."""
        trained = batch.fields["loss_mask"] > 0
        trained[np.cumsum(batch.lengths) - batch.lengths] = False  # nothing predicts a sequence's first token
        if not trained.any():
            raise ValueError("no token of the batch is trained on: loss_mask is 0 wherever a token can be predicted")
        micro_batches = self._micro_batches(batch, trained)

        def token_loss(micro_batch: DeviceBatch, output: torch.Tensor) -> tuple:
            sequences = Sequences(micro_batch.sequences, len(batch.lengths), parallel.sum_over_context)
            per_token, stats = of_tokens(loss, self._loss_inputs(micro_batch, output, sequences))
            weights = micro_batch.fields.get("loss_weights")
            total, count = (per_token if weights is None else per_token * weights).sum(), micro_batch.count
            sums = {"loss": total.detach(), **{name: value.detach().sum() for name, value in stats.items()}}
            return total, count, {"loss_tokens": count, **sums}

        # Megatron copies it in place of its own `[1]`
        share = torch.tensor([trained.mean()], dtype=torch.float32, device=self.device)
        for model in self._wrapped:
            model.zero_grad_buffer()
            # Megatron sums experts' auxiliary losses over all tokens, and divides by those that are trained on
            get_model_config(model).moe_grad_scale_func = lambda: share
        return forward_backward(self._wrapped, micro_batches, self._head(temperature), token_loss)

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        with self._memory.needed("params"):
            optimizer.gather_weights(self._wrapped)
            weights = iter(self._bridge.export(self._models))
            while True:
                with cpu.cpu_as_cuda(), torch.no_grad():  # not open while the caller works
                    item = next(weights, None)
                if item is None:
                    return
                yield item
                del item  # a gathered weight lives on the device until the next one is made

    def save_hf(self, path: Path) -> None:
        save_together(path, self.weights(), self._spec)

    def save_adapters(self, path: Path) -> None:
        if self._adapted is None or self._spec.lora is None:
            raise RoleError(f"the {self._spec.role} has no adapters")
        with self._memory.needed("params"):
            optimizer.gather_weights(self._wrapped)
            with cpu.cpu_as_cuda():
                save_adapters_together(path, self._adapted.adapters(), self._spec, self._spec.lora)

    def load_hf(self, path: Path, decay: float) -> None:
        if self._spec.optimizer is not None:
            raise RoleError(f"the {self._spec.role} has an optimizer")
        with self._memory.needed("params"):
            tensors = (tensor for model in self._models for tensor in (*model.parameters(), *model.buffers()))
            parameters = [tensor.data for tensor in tensors if tensor.is_floating_point()]
            old = [parameter.clone() for parameter in parameters] if decay else []
            with cpu.cpu_as_cuda():
                self._bridge.load(self._models, path)
            for parameter, before in zip(parameters, old, strict=bool(old)):
                parameter.lerp_(before, decay)

    def save(self, path: Path) -> None:
        with self._memory.needed("params", "optimizer"):
            with cpu.cpu_as_cuda():
                optimizer.gather_weights(self._wrapped)
            parts = self._wrapped, self._optimizer, self._scheduler
            self._saving = save_checkpoint(path, *parts, copies=self._copies, group=self._saving_group)

    def is_saved(self) -> bool:
        return self._saving.is_written()

    def finish_save(self) -> None:
        self._saving.finish()
        del self._saving

    def load(self, path: Path) -> None:
        with self._memory.needed("params", "optimizer"), cpu.cpu_as_cuda():
            load_checkpoint(path, self._wrapped, self._optimizer, self._scheduler)

    def offload(self, parts: Collection[Part] = PARTS) -> None:
        self._memory.offload(parts)

    def onload(self, parts: Collection[Part] = PARTS) -> None:
        self._memory.onload(parts)

    def shutdown(self) -> None:
        parallel.forget_last_pass(self._models)
        vars(self).clear()  # process groups end with all that holds them
        parallel.shutdown()

    def _read(
        self, batch: Batch, wanted: NDArray[np.bool], temperature: float = 1.0
    ) -> tuple[NDArray[np.int64], Floats] | None:
        """Log-probs or values where they are wanted, without gradients."""
        micro_batches = self._micro_batches(batch, wanted)
        with self._memory.needed("params"), cpu.cpu_as_cuda():
            outputs = forward_backward(self._wrapped, micro_batches, self._head(temperature))
            if not parallel.is_data_source():
                return None
        return micro_batches.targets, torch.cat(outputs)[:, 0].cpu().numpy()

    def _loss_inputs(self, micro_batch: DeviceBatch, output: torch.Tensor, sequences: Sequences) -> LossInputs:
        """`output` is what the head gives."""
        if self._is_critic:
            nothing = output.new_empty(0)
            return LossInputs(nothing, nothing, micro_batch.fields, sequences, output[:, 0])
        return LossInputs(output[:, 0], output[:, 1], micro_batch.fields, sequences)

    def _head(self, temperature: float) -> Head:
        """Return the head: log-probs and entropies `[rows, 2]` of hidden states, or a critic's values `[rows, 1]`."""
        group, zeros = parallel_state.get_tensor_model_parallel_group(), optimizer.sends_early(self._wrapped[-1])

        def values(micro_batch: DeviceBatch, hidden: torch.Tensor, layer: torch.nn.Module, _: Any) -> torch.Tensor:
            output: torch.Tensor = layer(hidden)[0]
            return output

        def words(
            micro_batch: DeviceBatch, hidden: torch.Tensor, layer: torch.nn.Module, weight: torch.Tensor
        ) -> torch.Tensor:
            parallel.wait_for_weights(layer)
            made = log_probs_and_entropy_of_hidden(
                hidden,
                weight,
                micro_batch.labels,
                temperature=temperature,
                vocab_size=self._vocab_size,
                group=group,
                zeros=zeros,
            )
            return torch.stack(made, 1)

        return values if self._is_critic else words

    def _micro_batches(self, batch: Batch, wanted: NDArray[np.bool]) -> DeviceBatches:
        """This rank's share, cut alike for every pass: with the same weights they compute the same to the last bit."""
        sizes, overrides = self._spec.sizes, self._spec.config.megatron.override_transformer_config
        at_once = overrides.get("microbatch_group_size_per_vp_stage") or sizes.pp
        packs = packing.packs(
            batch,
            self._spec.config.mb_spec,
            dp=sizes.dp,
            dp_rank=parallel_state.get_data_parallel_rank(),
            alignment=packing.sequence_alignment(sizes.tp, sizes.cp, self._rows),
            multiple=at_once if sizes.vpp > 1 else 1,
            cp=sizes.cp,
            cp_rank=parallel_state.get_context_parallel_rank(),
        )
        return DeviceBatches(*packs, batch, wanted, self.device)

    def _step(self, learning_rate: float | None, put_back: Callable[[], None]) -> dict[str, float]:
        """The update, and what is known of it; every rank sees the same numbers and decides alike."""
        if learning_rate is not None:
            for group in self._optimizer.param_groups:
                group["lr"] = learning_rate
        lr = float(self._optimizer.param_groups[0]["lr"])
        grad_norm = optimizer.step_if_finite(self._optimizer)
        self._optimizer.zero_grad()
        if not (finite := math.isfinite(grad_norm)):
            put_back()
        self._scheduler.step(1 if finite and learning_rate is None else 0)
        self._skipped = 0 if finite else self._skipped + 1
        if self._spec.optimizer and self._skipped > (limit := self._spec.optimizer.max_skipped_steps):
            raise NonFiniteError(
                f"the gradient norm is {grad_norm}; more than {limit} steps in a row were skipped "
                f"({self._spec.role}.optimizer.max_skipped_steps)"
            )
        return {"grad_norm": grad_norm, "lr": lr, "skipped": float(not finite)}
