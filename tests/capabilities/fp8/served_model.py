"""Loads updates in FP8 into SGLang's own model, as a server's process on a CPU, and reports how far they arrive.

python tests/capabilities/fp8/served_model.py DIRECTORY, which has a model. Prints JSON: the data types of parameters,
and for each of two updates the parameters that differ from what was sent.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from areal_like.backends.sglang.launcher import prepare_imports
from areal_like.backends.sglang.patches.other_models import leave_out_other_models

prepare_imports(cuda=False)
leave_out_other_models(["Qwen3ForCausalLM", "Qwen3MoeForCausalLM"])

import torch  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from sglang.srt.configs.load_config import LoadConfig  # noqa: E402
from sglang.srt.configs.model_config import ModelConfig  # noqa: E402
from sglang.srt.distributed import init_distributed_environment, initialize_model_parallel  # noqa: E402
from sglang.srt.layers.dp_attention import initialize_dp_attention  # noqa: E402
from sglang.srt.model_loader.loader import _get_quantization_config, get_model_architecture  # noqa: E402
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler  # noqa: E402

from allocation import ParallelSizes, load_model  # noqa: E402
from areal_like.backends.sglang.loading import addresses, load  # noqa: E402
from areal_like.backends.transports.buckets import Buckets  # noqa: E402
from areal_like.capabilities.fp8.quantize import quantize_weights  # noqa: E402
from areal_like.capabilities.fp8.served import server_options  # noqa: E402
from areal_like.runtime.ports import reserve_port  # noqa: E402

TABLES = ("model.embed_tokens.weight", "lm_head.weight")


class Weights:
    """The weights of a directory, each times a factor, in the form of the servers."""

    def __init__(self, directory: Path, layers: frozenset[str]) -> None:
        self._layers, self.factor = layers, 1.0
        self._tensors = {name: tensor.bfloat16() for name, tensor in load_file(directory / "model.safetensors").items()}

    def weights(self) -> Any:
        return quantize_weights(((name, tensor * self.factor) for name, tensor in self._tensors.items()), self._layers)


def build(directory: Path, options: dict[str, Any]) -> Any:
    """SGLang's model with parameters that hold nothing yet, by the options of a server."""
    override = options["json-model-override-args"]
    arguments = ServerArgs(
        model_path=str(directory),
        device="cpu",
        dtype="bfloat16",
        attention_backend="torch_native",
        sampling_backend="pytorch",
        grammar_backend="none",
        load_format=options["load-format"],
        json_model_override_args=override,
        skip_tokenizer_init=True,
        disable_cuda_graph=True,
    )
    set_global_server_args_for_scheduler(arguments)
    config = ModelConfig.from_server_args(arguments)
    init_distributed_environment(1, 0, f"tcp://127.0.0.1:{reserve_port('127.0.0.1').getsockname()[1]}", 0, "gloo")
    initialize_model_parallel(1)
    initialize_dp_attention(arguments, config)
    torch.set_default_dtype(torch.bfloat16)
    quantization = _get_quantization_config(config, LoadConfig(load_format="dummy"))
    return get_model_architecture(config)[0](config=config.hf_config, quant_config=quantization)


def expected(sent: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    """The sent tensors that SGLang joins in one parameter."""
    for joined, parts in {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}.items():
        if joined in name:
            return torch.cat([sent[name.replace(joined, part)] for part in parts])
    if "experts.w" in name:
        before, _, rest = name.partition("experts.")
        place, _, kind = rest.partition("_")
        parts = {"w13": ["gate_proj", "up_proj"], "w2": ["down_proj"]}[place]
        experts = range(sum(each.startswith(before) and each.endswith(f".{parts[0]}.{kind}") for each in sent))
        return torch.stack([torch.cat([sent[f"{before}experts.{i}.{part}.{kind}"] for part in parts]) for i in experts])
    return sent[name]


def main() -> None:
    directory = Path(sys.argv[1])
    spec, sizes = load_model(directory), ParallelSizes()
    options = server_options(spec, sizes)
    from allocation.memory.fp8 import fp8_layers

    model = build(directory, options)
    trainer = Weights(directory, fp8_layers(spec, sizes))
    buckets = Buckets(trainer, 0)  # type: ignore[arg-type]
    layout = buckets.layout(1)
    different: list[list[str]] = []
    for factor in (1.0, 3.0):  # the second is copied by the plan of the first
        trainer.factor = factor
        where = addresses(model)
        for number, bucket in enumerate(layout):
            buckets.prepare(number)
            load(model, buckets.ready.popleft(), [(each.name, each.dtype, each.shape) for each in bucket], where)
        sent = dict(trainer.weights())
        own = dict(model.named_parameters())
        own |= {name: own[name][: len(sent[name])] for name in TABLES if name in sent}  # SGLang adds rows
        bits = {name: value.view(torch.uint8) for name, value in own.items()}
        different.append(
            [name for name, value in bits.items() if not torch.equal(value, expected(sent, name).view(torch.uint8))]
        )
    kinds = {name: str(parameter.dtype).removeprefix("torch.") for name, parameter in model.named_parameters()}
    sizes_of = [each.nbytes for bucket in layout for each in bucket]
    plans = len(model.__dict__.get("plans", {}))
    print(
        json.dumps(
            {"kinds": kinds, "different": different, "bytes": sum(sizes_of), "plans": plans, "buckets": len(layout)}
        )
    )


if __name__ == "__main__":
    main()
