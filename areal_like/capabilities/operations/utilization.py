"""MFU, and tokens per GPU-second, of trainer and servers. docs/operations.md has the formula."""

from collections.abc import Mapping
from dataclasses import dataclass

from allocation.model_spec import ModelSpec
from allocation.parameters import flops_per_token
from areal_like.job import Job
from areal_like.preflight.memory import gpu_bytes
from areal_like.preflight.step_time import find_gpu

TRAINED, GENERATED = 3, 1  # passes of a token: forward, and a backward pass that is two; forward alone


@dataclass(frozen=True)
class Utilization:
    """The GPUs of trainer and servers, the FLOP/s of each, None if unknown, and the model that they compute."""

    trainer: int
    servers: int
    model: ModelSpec | None
    flops: float | None

    def of_step(self, scalars: Mapping[str, float], prompt: float) -> dict[str, float]:
        """Return the metrics of a step whose prompts have `prompt` tokens in the mean."""
        seconds, response = scalars["seconds/step"], scalars.get("rollout/response_length", 0.0)
        trained = scalars.get("train/tokens", 0.0) / seconds / self.trainer
        generated = scalars.get("throughput/rollout_tokens_per_second", 0.0) / self.servers
        found = {
            "throughput/train_tokens_per_gpu_second": trained,
            "throughput/rollout_tokens_per_gpu_second": generated,
        }
        if self.model is None or self.flops is None or not response:
            return found
        share = response / (prompt + response)  # of tokens that need the output layer
        train = 2 * TRAINED * flops_per_token(self.model, prompt + response, share)
        serve = 2 * GENERATED * flops_per_token(self.model, 2 * prompt + response, 1.0)  # mean context of a response
        return found | {"mfu/trainer": trained * train / self.flops, "mfu/servers": generated * serve / self.flops}


def make_utilization(job: Job) -> Utilization | None:
    """Return the GPUs of a run, None on a CPU."""
    if job.device == "cpu":
        return None
    size = gpu_bytes()
    trainer, servers = (len({*job.plan.engine(role).devices}) for role in ("actor", "rollout"))
    return Utilization(trainer, servers, job.models.get("actor"), find_gpu(size).flops if size else None)
