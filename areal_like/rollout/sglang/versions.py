"""Version labels of tokens, and other parts that SGLang 0.5.17 lacks for weight updates under running requests.

SGLang can pause between two passes (`/pause_generation`), load new weights and continue the same requests. Added:
- a version for each token, in `meta_info`: a pass runs under one version, and labels change only at the first pass of
  another version, so that a pass and a token cost nothing;
- a separate prefix cache for each version, and for each time that a restarted trainer sends a version again; embeddings
  of images are removed;
- a pause that lasts until the GPU is idle on every rank, and that no watchdog takes for a hang;
- weights that one request brings, or that a trainer rank exports by IPC handles (`receiving.py`), and GPU memory that
  is given back while requests wait (`memory.py`);
- one prefill for requests that wait together (`one_prefill.py`).

It needs one label per pass, so no speculative decoding, and no pipeline stages, which do not pause. SGLang from 0.5.19
on labels tokens itself, as `weight_versions`: then `run_scheduler` goes and `columns.with_columns` takes those.
"""

from __future__ import annotations

import os
from functools import partial
from typing import Any
from weakref import WeakSet

from areal_like.cluster.lifetime import GLOO_VARIABLE
from areal_like.registry import find_modules
from areal_like.rollout.sglang import WEIGHTS_INTERFACE_VARIABLE
from areal_like.rollout.sglang.images import add_positions, forget_images
from areal_like.rollout.sglang.labels import LABELS, TokenLabels


def run_scheduler(*arguments: Any, **options: Any) -> None:
    """Run SGLang's scheduler process with labels; for `launch_server(run_scheduler_process_func=...)`.

    It replaces SGLang's classes in the process that it runs in, be that forked or spawned.
    """
    from sglang.srt.managers import scheduler

    for _, module in find_modules("sglang"):
        module.prepare_scheduler(arguments[0])
    scheduler.Scheduler = updating_scheduler()
    scheduler.SchedulerWeightUpdaterManager = labelling_updater()
    scheduler.run_scheduler_process(*arguments, **options)


def labelling_scheduler() -> type:
    """Return SGLang's Scheduler, which knows the version that it runs, `version`, and labels tokens with it."""
    from areal_like.rollout.sglang.one_prefill import prefilling_once

    class LabellingScheduler(prefilling_once()):  # type: ignore[misc]
        def init_weight_updater(self) -> None:
            super().init_weight_updater()
            self.version = self.server_args.weight_version
            self.labelling = self.version  # of the pass whose tokens were collected last
            self.labelled: WeakSet[Any] = WeakSet()  # requests

        def run_batch(self, batch: Any, *arguments: Any, **options: Any) -> Any:
            # Passes and updates alternate here, but the overlap schedule collects a pass's tokens after the start of
            # the next one, and maybe after an update.
            result = super().run_batch(batch, *arguments, **options)
            result.weight_version = self.version
            return result

        def process_batch_result(self, batch: Any, result: Any) -> None:
            version = getattr(result, "weight_version", self.labelling)
            if version != self.labelling:
                self.labelling = version
                for request in self.labelled:
                    request.customized_info[LABELS].begin(len(request.output_ids), version)
            super().process_batch_result(batch, result)

        def _add_request_to_queue(self, request: Any, *arguments: Any, **options: Any) -> None:
            if request.customized_info is None:  # a retracted request has labels
                request.customized_info = {LABELS: TokenLabels(self.labelling)}
                self.labelled.add(request)
            super()._add_request_to_queue(request, *arguments, **options)

    return LabellingScheduler


def updating_scheduler() -> type:
    """Return SGLang's Scheduler, which labels tokens and whose weights change under running requests."""
    import torch

    class UpdatingScheduler(labelling_scheduler()):  # type: ignore[misc]
        version: str
        rewinds = 0  # times that a version followed a later one

        def process_input_requests(self, requests: Any) -> None:
            super().process_input_requests(requests)
            if self._engine_paused and not requests:
                self.maybe_sleep_on_idle()  # SGLang's loop would use a whole core until it continues

        def pause_generation(self, request: Any) -> None:
            super().pause_generation(request)
            # The last pass may still run, on another stream than an update's: it would read new weights, and its
            # collectives and the update's could wait for each other (sgl-project/sglang pull requests 22620, 27886).
            torch.get_device_module(self.device).synchronize()
            torch.distributed.barrier(group=self.tp_cpu_group)
            self.cur_batch_for_debug = None  # the watchdog ends a server that is long in a batch

        def begin(self, version: str) -> None:
            if self.version.isdigit() and version.isdigit() and int(version) < int(self.version):
                self.rewinds += 1
            self.version = version
            forget_images()
            for request in self.waiting_queue:
                self._keep_apart(request)

        def _add_request_to_queue(self, request: Any, *arguments: Any, **options: Any) -> None:
            self._keep_apart(request)
            add_positions(request)
            super()._add_request_to_queue(request, *arguments, **options)

        def _keep_apart(self, request: Any) -> None:
            """Restrict a request to prefixes of this version; it waits, so it holds none yet."""
            if not hasattr(request, "key_of_caller"):
                request.key_of_caller = request.extra_key or ""
            request.extra_key = f"{request.key_of_caller}@{self.rewinds}.{self.version}"

    return UpdatingScheduler


def labelling_updater() -> type:
    """Return SGLang's weight updater, which reports a version to the scheduler once all of its weights are loaded."""
    from sglang.srt.managers import io_struct

    from areal_like.rollout.sglang.loading import renew_copies
    from areal_like.rollout.sglang.memory import updater_with_requests
    from areal_like.rollout.sglang.receiving import receive_broadcast, receive_checkpoint, receive_exported

    class LabellingUpdater(updater_with_requests()):  # type: ignore[misc]
        def init_weights_update_group(self, request: Any) -> Any:
            if interface := os.environ.get(WEIGHTS_INTERFACE_VARIABLE):
                os.environ[GLOO_VARIABLE] = interface  # of this group alone: all others exist
            return super().init_weights_update_group(request)

        def update_weights_from_disk(self, request: Any) -> Any:
            done, told = receive_checkpoint(partial(super().update_weights_from_disk, request), self.tp_cpu_group)
            return io_struct.UpdateWeightFromDiskReqOutput(success=done, message=told, num_paused_requests=0)

        def update_weights_from_ipc(self, request: Any) -> Any:
            done, told = receive_exported(self.tp_worker.model_runner, request.zmq_handles, self.tp_cpu_group)
            if done:
                self.flush_cache_after_weight_update(request)
            return io_struct.UpdateWeightsFromIPCReqOutput(success=done, message=told)

        def update_weights_from_distributed(self, request: Any) -> Any:
            done, told = receive_broadcast(self.tp_worker.model_runner, request, self.tp_cpu_group)
            if done:
                self.flush_cache_after_weight_update(request)
            return io_struct.UpdateWeightsFromDistributedReqOutput(success=done, message=told)

        def flush_cache_after_weight_update(self, request: Any) -> None:
            super().flush_cache_after_weight_update(request)
            renew_copies(self.tp_worker.model_runner.model)
            if request.weight_version is not None:  # the last of an update's requests, whichever kind they are
                self.scheduler.begin(request.weight_version)

    return LabellingUpdater
