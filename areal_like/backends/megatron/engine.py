"""One rank of the Megatron trainer: each receives the same batch and selects its own share (`trainer/packing.py`)."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from areal_like.backends.megatron.cpu import cuda as cpu
from areal_like.backends.megatron.options import row_multiple, transformer_options
from areal_like.backends.training.base import BaseEngine
from areal_like.backends.training.lora import Adapter
from areal_like.core.trainer import packing
from areal_like.core.trainer.device_batch import DeviceBatch, DeviceBatches
from areal_like.core.trainer.engine import EngineSpec, Part, Rendezvous
from areal_like.core.types import Batch, LossSpec

cpu.install()  # before anything imports megatron.core
# isort: split

from megatron.core import parallel_state  # noqa: E402
from megatron.core.utils import get_model_config  # noqa: E402

from areal_like.backends.megatron import optimizer, parallel  # noqa: E402
from areal_like.backends.megatron.adapter_states import MegatronAdapterStates  # noqa: E402
from areal_like.backends.megatron.bridges import ModelSource, make_bridge  # noqa: E402
from areal_like.backends.megatron.checkpoint import load_checkpoint, make_copies, save_checkpoint  # noqa: E402
from areal_like.backends.megatron.dist_weights import WeightsFrom  # noqa: E402
from areal_like.backends.megatron.forward import Head, forward_backward  # noqa: E402
from areal_like.backends.megatron.images import enable_inputs, freeze_tower  # noqa: E402
from areal_like.backends.megatron.lora import LoRABridge  # noqa: E402
from areal_like.backends.megatron.padding import ignore_padding  # noqa: E402
from areal_like.core.trainer.logprobs import log_probs_and_entropy_of_hidden  # noqa: E402


class MegatronEngine(BaseEngine):
    """A TrainEngine in one layout of Megatron-core."""

    def __init__(self, spec: EngineSpec, rendezvous: Rendezvous) -> None:
        config, sizes = spec.config, spec.sizes
        super().__init__(spec)
        self._rows = row_multiple(config.megatron.override_transformer_config) or 1
        options = transformer_options(config, device=spec.device, pipelined=sizes.pp > 1, interleaved=sizes.vpp > 1)
        dtype = getattr(torch, config.dtype)
        head = {"value_head": self._is_critic, "mtp": spec.trains_mtp}
        source = ModelSource(spec.path, dtype, sizes, options, seed=spec.seed, **head)
        with cpu.cpu_as_cuda():
            parallel.initialize(rendezvous, sizes, self.device, spec.seed)
            bridge = make_bridge(config.megatron.bridge_type, source)
            if spec.weights is not None:
                bridge = WeightsFrom(spec.weights, bridge, source)
            names = source.config.body, source.config.for_bridge.model_type
            self._adapted = LoRABridge(bridge, spec.lora, spec.seed, *names) if spec.lora else None
            self._bridge = self._adapted or bridge
            self._vocab_size, self._cap = source.config.for_bridge.vocab_size, source.config.logit_cap
            self._models = self._bridge.build()
            ignore_padding()
            shared = config.mb_spec.share_prompts
            self._reader = enable_inputs(self._models, spec.path, source.config.axes, shared=shared)
            self._bridge.load(self._models, spec.path)
            if config.freeze_vision_tower:
                freeze_tower(self._models)
            overlap = spec.device == "cuda" and sizes.dp * sizes.cp > 1
            self._scheduler: Any = None
            trained = spec.optimizer is not None
            self._wrapped = optimizer.wrap_models(self._models, config, trained=trained, overlap=overlap)
            if spec.optimizer is not None:
                steps = optimizer.schedule_steps(spec.optimizer, spec.total_steps, spec.role)
                self._optimizer = optimizer.make_optimizer(self._wrapped, config, spec.optimizer)
                self._scheduler = optimizer.make_schedule(self._optimizer, spec.optimizer, steps)
            self._adapter_states = self._make_adapter_states()
        self._manage_memory(self._tensors())
        self._copies = make_copies(spec.adapters, spec.copy_bytes)
        self._add_hooks(self._wrapped)

    def _backward(
        self, micro_batches: DeviceBatches, batch: Batch, loss: LossSpec, temperature: float, trained: int
    ) -> Sequence[Mapping[str, Tensor]]:
        def token_loss(micro_batch: DeviceBatch, output: Tensor) -> tuple:
            output, ahead = output.tensor_split([len(micro_batch.sequences)])
            total, sums = self._loss(loss, batch, micro_batch, (output[:, 0], output[:, 1:2].flatten(), output[:, 2:]))
            if micro_batch.ahead is not None:
                of_mtp = -ahead[:, 0].sum()
                total, sums = total + of_mtp, {**sums, "mtp_loss": of_mtp.detach()}
            return total, micro_batch.count, sums

        micro_batches = replace(micro_batches, looks_ahead=self._spec.trains_mtp)

        # Megatron copies it over its own `[1]`
        scaled = trained / len(batch.tokens) * (self._loss_scale() or 1.0)
        share = torch.tensor([scaled], dtype=torch.float32, device=self.device)
        for model in self._wrapped:
            model.zero_grad_buffer()
            # Megatron sums experts' auxiliary losses over all tokens, and divides by the trained tokens
            get_model_config(model).moe_grad_scale_func = lambda: share
        return forward_backward(self._wrapped, micro_batches, self._head(temperature), self._hooks, token_loss)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        with self._memory.hold("params"):
            optimizer.gather_weights(self._wrapped)
            weights = iter(self._bridge.export(self._models))
            while True:
                with cpu.cpu_as_cuda(), torch.no_grad():  # not active while the caller works
                    item = next(weights, None)
                if item is None:
                    return
                yield item
                del item  # otherwise a gathered weight stays on the device until the next one is gathered

    def _computing(self) -> AbstractContextManager[None]:
        return cpu.cpu_as_cuda()

    def _adapted_layers(self) -> Iterable[torch.nn.Module]:
        return self._adapted.of_layers if self._adapted else ()

    def _adapters(self) -> Iterator[tuple[str, Adapter]]:
        optimizer.gather_weights(self._wrapped)
        return self._adapted.adapters() if self._adapted else iter(())

    def _make_adapter_states(self) -> MegatronAdapterStates | None:
        if not self._spec.adapters:
            return None
        return MegatronAdapterStates(self._spec.adapters, self._wrapped, self._optimizer, self._scheduler)

    def _tensors(self) -> Mapping[Part, Callable[[], Iterable[Tensor]]]:
        """Return the tensors of each part, including adapters that are not in use."""
        found, others = optimizer.tensors(self._wrapped, self._optimizer), self._adapter_states
        if others is None:
            return found
        params, states = found["params"], found["optimizer"]
        return {
            "params": lambda: chain(params(), others.params()),
            "grads": found["grads"],
            "optimizer": lambda: chain(states(), others.states()),
        }

    def _exchange(self, adapter: str, skipped: int) -> int:
        if self._adapter_states is None:
            return super()._exchange(adapter, skipped)
        with cpu.cpu_as_cuda():
            return self._adapter_states.select(adapter, skipped)

    def _take_weights(self, path: Path, decay: float) -> None:
        tensors = (tensor for model in self._models for tensor in (*model.parameters(), *model.buffers()))
        parameters = [tensor.data for tensor in tensors if tensor.is_floating_point()]
        old = [parameter.clone() for parameter in parameters] if decay else []
        self._bridge.load(self._models, path)
        for parameter, before in zip(parameters, old, strict=bool(old)):
            parameter.lerp_(before, decay)

    def _complete_weights(self) -> None:
        optimizer.gather_weights(self._wrapped)

    def save(self, path: Path) -> None:
        with self._memory.hold("params", "optimizer"):
            with cpu.cpu_as_cuda():
                self._complete_weights()
            parts = self._wrapped, self._optimizer, self._scheduler
            adapters = self._each_adapter()
            self._saving = save_checkpoint(
                path, *parts, copies=self._copies, adapters=adapters, group=self._saving_group
            )

    def load(self, path: Path) -> None:
        with self._memory.hold("params", "optimizer"), cpu.cpu_as_cuda():
            for name in self._each_adapter():
                load_checkpoint(path, self._wrapped, self._optimizer, self._scheduler, name)

    def shutdown(self) -> None:
        parallel.forget_last_pass(self._models)
        vars(self).clear()  # process groups end with their last reference
        parallel.shutdown()

    def _outputs(self, micro_batches: DeviceBatches, temperature: float) -> Sequence[Tensor] | None:
        outputs = forward_backward(self._wrapped, micro_batches, self._head(temperature), self._hooks)
        return [output[:, 0] for output in outputs] if parallel.is_data_source() else None

    def _head(self, temperature: float) -> Head:
        """Return the head, which computes log-probs, entropies and log-probs of k choices, or a critic's values.

        The head's output for the n wanted tokens is `[n, 2 + k]`, and a critic's `[n, 1]`.
        """
        group, zeros = parallel_state.get_tensor_model_parallel_group(), optimizer.sends_early(self._wrapped[-1])

        def value_head(micro_batch: DeviceBatch, hidden: Tensor, layer: torch.nn.Module, _: Any) -> Tensor:
            output: Tensor = layer(hidden)[0]
            return micro_batch.of_tokens(output)

        def log_prob_head(micro_batch: DeviceBatch, hidden: Tensor, layer: torch.nn.Module, weight: Tensor) -> Tensor:
            parallel.wait_for_weights(layer)
            made = log_probs_and_entropy_of_hidden(
                hidden,
                weight,
                **micro_batch.head(temperature),
                vocab_size=self._vocab_size,
                group=group,
                zeros=zeros,
                in_fp32=self._spec.config.fp32_head,
                cap=self._cap,
            )
            return micro_batch.of_tokens(torch.column_stack(made))

        return value_head if self._is_critic else log_prob_head

    def _micro_batches(self, batch: Batch, wanted: NDArray[np.bool]) -> DeviceBatches:
        """Return this rank's share, packed identically for every pass, so that equal weights give equal results."""
        batch = self._prepare(batch)
        batch = batch if self._reader is None else self._reader.mark(batch)
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
            model=self._spec.shape,
            meet=packing.ranks_meet("megatron", sizes),
        )
        return DeviceBatches(*packs, batch, wanted, self.device, None if self._reader is None else self._reader.inputs)

    def _sum_over_context(self, tensor: Tensor) -> Tensor:
        return parallel.sum_over_context(tensor)

    def _means(self, parts: Sequence[Mapping[str, Tensor]]) -> dict[str, float]:
        return parallel.means(parts, self.device)

    def _update(self) -> float:
        return optimizer.step_if_finite(self._optimizer)

    def _loss_scale(self) -> float | None:
        state = optimizer.loss_scale(self._optimizer)
        return None if state is None else float(state["scale"])

    def _advance_schedule(self) -> None:
        self._scheduler.step(1)


ENGINE = MegatronEngine
