"""The servers' form of weights in FP8 rollouts."""

import json
from functools import partial

from allocation.memory.fp8 import BLOCK, fp8_layers
from allocation.model_spec import ModelSpec
from allocation.plan import ParallelSizes
from areal_like.capabilities.fp8.quantize import quantize_weights
from areal_like.capabilities.fp8.schema import Fp8Keys
from areal_like.config.keys import with_keys
from areal_like.config.schema import RunConfig
from areal_like.served_form import ServedForm

LAYERS = frozenset({"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "experts"})
# Nats. FP8 rounds weights and activations to 3 bits of mantissa, bfloat16 to 7; not measured on a GPU yet.
LOGPROB_DIFF = 0.3


def server_options(model: ModelSpec, sizes: ParallelSizes) -> dict[str, object]:
    """Return SGLang's options for a server that starts empty, as a checkpoint in FP8, and receives all weights."""
    own: dict[str, object] = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
        "modules_to_not_convert": ["lm_head", *sorted(LAYERS - fp8_layers(model, sizes))],
    }
    return {"load-format": "dummy", "json-model-override-args": json.dumps({"quantization_config": own})}


def make_form(config: RunConfig) -> ServedForm | None:
    """Return the form of weights on servers, None where it is the trainer's."""
    if with_keys(config.rollout, Fp8Keys).dtype != "fp8":
        return None
    return ServedForm(
        logprob_diff=LOGPROB_DIFF,
        memory={"fp8_servers": True},
        options=server_options,
        convert=lambda model, sizes: partial(quantize_weights, layers=fp8_layers(model, sizes)),
    )
