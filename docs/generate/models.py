"""Write `docs/models.md` from the checks before a start and the models of `tests/models`.

python docs/generate/models.py
"""

from __future__ import annotations

import re
import runpy
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import allocation
from allocation.adapters import attention_layers
from allocation.diagnostics import Finding, has_errors
from allocation.families import FAMILIES, TRAINED
from allocation.model_spec import ModelSpec, from_config
from areal_like.backends.fsdp.support import SPLIT, WITH_IMAGES
from areal_like.backends.megatron.bridges.support import BRIDGES, architecture_of, converting_bridges
from areal_like.core.config.schema import ALL_LINEAR, RunConfig
from areal_like.preflight.images import DEEPSTACK_SERVED
from areal_like.preflight.lora import check_lora
from areal_like.preflight.trainable import check_layout, find_servers

PAGE = Path(__file__).parents[1] / "models.md"
MODELS = runpy.run_path(str(Path(__file__).parents[2] / "tests/models/tiny_models.py"))
UNDER_FSDP = (*MODELS["FSDP_DENSE"], *MODELS["FSDP_EXPERTS"], *MODELS["FSDP_OTHERS"])
# The layouts with which the checks are asked, by parallel dimension
DENSE = {"TP": "t2", "PP": "p2", "CP": "c2"}
EXPERTS = {"TP": "(attn:t2|ffn:t2)", "PP": "p2", "CP": "c2", "EP": "(attn:d2|ffn:e2)"}
TRAINERS = {
    "mbridge": ("megatron", BRIDGES[0]),
    "Megatron Bridge": ("megatron", BRIDGES[1]),
    "FSDP": ("fsdp", BRIDGES[0]),
}
HEAD = """# Models

- [Which family trains where](#which-family-trains-where)
- [Reasons](#reasons)
- [Other families](#other-families)
- [Vision-language models](#vision-language-models)

`areal-like check --model NAME_OR_DIRECTORY` gives the same answers for one model, with all fields of its `config.json`
([examples](bridges.md#supported-models)). Fields that a family trains with, and fields that are rejected, are listed in
[Bridges](bridges.md#supported-models). All tests use tiny models.

## Which family trains where

- **tested**: log-probs equal those of transformers up to the rounding of float32 (`tests/tolerance.py`), every exported tensor equals
  the loaded one, and a whole run with default keys ends as it should on a CPU (`tests/models`). For servers: the log-probs of
  sampled tokens equal those of transformers, on GPUs up to the rounding of bfloat16 (`test_servers_gpu.py`). If SGLang has a family's
  kernels for GPUs only, these tests replace them in the CPU server (`tests/support`).
- **converts**: the bridge converts every tensor to Megatron's format and back, bit for bit, and a run is rejected.
- **rejected**: the checks before a run reject the family, for the numbered [reason](#reasons).
- **accepted**: nothing rejects the family, but no test shows the result.
- Layouts: the parallel dimensions that the checks accept with two ranks. Bold: tested for this family. FSDP always shards over
  data-parallel ranks, so its column says whether ranks can split matrices (TP) and share sequences (CP).
- LoRA: the [modules](lora.md) that can have adapters. The first entry is Megatron's, the second FSDP's. Tests compare adapters of
  every family with merged weights (`tests/models/test_family_adapters.py`).
- Critics are tested for every family that trains: values and gradients equal those of transformers
  (`tests/models/test_family_critics.py`).
- Shared prompts (`mb_spec.share_prompts`) are tested for every family that trains (`tests/models/test_family_prompts.py`), except
  those with gated delta nets, for which they are rejected. On Megatron they are also rejected for families with latent attention.

"""
TAIL = """
## Other families

A family that is not in the table is rejected on Megatron. FSDP accepts it if transformers has a causal language model of it and SGLang has code
for its architecture: its parameters are counted from transformers' model, and the ranks test at the start whether it can be packed
([details](bridges.md#without-a-bridge-fsdp)). Tested this way: COUNTED.

## Vision-language models

`config.json` of these models has a `vision_config`. Teachers do not see images; the drift check and the evaluation do
([details](vision.md)). On Megatron they need `megatron.bridge_type=megatron-bridge`.

"""
SEEING = sorted(WITH_IMAGES)
COLUMNS = (*TRAINERS, "SGLang on CPU", "SGLang on GPUs", "Megatron layouts", "FSDP layouts", "LoRA")


class Reasons:
    """The numbered reasons of a page: one number for each text."""

    def __init__(self) -> None:
        self._texts: list[str] = []

    def number(self, text: str) -> int:
        """Return the number of a text, a new one for a new text."""
        if text not in self._texts:
            self._texts.append(text)
        return self._texts.index(text) + 1

    def __str__(self) -> str:
        return "".join(f"{number}. {text}\n" for number, text in enumerate(self._texts, 1))


def page() -> str:
    """Return the page."""
    reasons = Reasons()
    lines = ["| Family | " + " | ".join(COLUMNS) + " |", "|---" * (len(COLUMNS) + 1) + "|"]
    counted = ", ".join(f"`{family}`" for family in sorted(MODELS["COUNTED"]))
    lines += [f"| `{family}` | " + " | ".join(_cells(family, reasons)) + " |" for family in sorted(FAMILIES)]
    head = HEAD + "\n".join(lines) + f"\n\n## Reasons\n\n{reasons}"
    return head + TAIL.replace("COUNTED", counted) + _seeing()


def _seeing() -> str:
    """Return the table of models of text and images, and the reasons of it."""
    lines, reasons = ["| Family | Megatron | FSDP | SGLang on CPU | SGLang on GPUs |", "|---" * 5 + "|"], Reasons()
    for family in SEEING:
        text = "gemma3_text" if family == "gemma3" else f"{family}_text"
        config = {"architectures": [architecture_of(text)], "model_type": family}
        config["vision_config"] = {
            "deepstack_visual_indexes": [0] * DEEPSTACK_SERVED.get(family, 1)
        }  # of a small model
        config["text_config"] = dict(_model(text)[1])
        if family == "qwen3_vl_moe":
            config["text_config"] |= {"moe_intermediate_size": 24, "num_hidden_layers": 3}  # no square matrices
        spec = from_config(config, family)
        cells = []
        for backend in ("megatron", "fsdp"):
            errors = [
                each for each in check_layout("model", spec, config, backend, BRIDGES[1]) if each.severity == "error"
            ]
            cells.append(f"rejected ({reasons.number(_sentence(family, errors[0].message))})" if errors else "tested")
        for served in find_servers(family).values():
            no = served.startswith("no: ")
            reason = f"rejected ({reasons.number(_sentence(family, served.removeprefix('no: ')))})" if no else ""
            cells.append(reason or ("tested" if served == "yes" else "accepted"))
        lines.append(f"| `{family}` | " + " | ".join(cells) + " |")
    return "\n".join(lines) + f"\n\n{reasons}"


def _cells(family: str, reasons: Reasons) -> Iterator[str]:
    """Yield the cells of a family, in the order of COLUMNS."""
    trains = {}
    for name, how in TRAINERS.items():
        errors = list(_find_errors(family, *how, "d1"))
        trains[name] = not errors
        yield _trainer_cell(family, name, how, errors, reasons)
    for served in find_servers(family).values():
        if served == "yes":
            yield "tested" if family in MODELS["SERVED"] else "accepted"
        else:
            yield f"rejected ({reasons.number(_sentence(family, served.removeprefix('no: ')))})"
    bridges = [bridge for name, (_, bridge) in TRAINERS.items() if trains[name] and name != "FSDP"]
    on_fsdp = trains["FSDP"] and family in TRAINED["fsdp"]
    yield _layouts(family, "megatron", bridges) if bridges else "–"
    yield _layouts(family, "fsdp", BRIDGES[:1]) or "DP only" if on_fsdp else "–"
    yield " / ".join(
        _adapters(family, backend) if can else "–" for backend, can in (("megatron", bool(bridges)), ("fsdp", on_fsdp))
    )


def _trainer_cell(family: str, name: str, how: tuple[str, str], errors: list[Finding], reasons: Reasons) -> str:
    backend, bridge = how
    if errors:
        reason = reasons.number(_sentence(family, errors[0].message))
        converts = backend == "megatron" and bridge in converting_bridges({"model_type": family})
        return f"converts ({reason})" if converts else f"rejected ({reason})"
    variants = MODELS["VARIANTS"].values()
    if backend == "fsdp":
        shown = any(MODELS["VARIANTS"][name].family == family for name in UNDER_FSDP)
    else:
        shown = any(variant.family == family and bridge in variant.bridges for variant in variants)
    return "tested" if shown else "accepted"


def _sentence(family: str, text: str) -> str:
    """Return a reason as a sentence that holds for other families too."""
    text = re.sub(r"^config\.json, \w+: ", "", text)
    text = re.sub(rf"\bis an? {family}\b", "is of this family", text)
    text = re.sub(rf"\ban? {family}\b", "this family", text)
    return text[0].upper() + text[1:].rstrip(".") + "."


def _layouts(family: str, backend: str, bridges: tuple[str, ...] | list[str]) -> str:
    """Return the parallel dimensions that a backend accepts with at least one of its bridges, tested ones in bold."""
    asked = {"TP": "t2", "CP": "c2"} if backend == "fsdp" else EXPERTS if _model(family)[0].experts else DENSE
    found = [
        name for name, sizes in asked.items() if any(not [*_find_errors(family, backend, b, sizes)] for b in bridges)
    ]
    return ", ".join(f"**{name}**" if name in _tested(family, backend) else name for name in found)


def _tested(family: str, backend: str) -> set[str]:
    """Return the parallel dimensions of the layouts in which tests compare a family with transformers."""
    layouts = MODELS["LAYOUTS" if backend == "megatron" else "FSDP_LAYOUTS"]
    sizes = [sizes for name, sizes in layouts if MODELS["VARIANTS"][name].family == family]
    split = {"TP"} if backend == "fsdp" and family in SPLIT else set()  # `tests/models/test_fsdp_families.py`
    return split | {name for name in EXPERTS for each in sizes if getattr(each, name.lower()) > 1}


def _adapters(family: str, backend: str) -> str:
    """Return the most modules that the checks accept for adapters."""
    plan = allocation.check(f"{backend}:d1+sglang:d1").plan
    spec = _model(family)[0]
    targets = {"all linear layers": [ALL_LINEAR], "attention": list(attention_layers(spec))}
    for words, names in targets.items():
        run = _run(f"{backend}:d1", use_lora=True, target_modules=names)
        if not has_errors(list(check_lora(run, spec, plan))):
            return words
    return "no"


def _run(backend: str, **actor: Any) -> RunConfig:
    data = {"path": "data.jsonl", "batch_size": 1}
    settings = {"path": "model", "backend": backend, **actor}
    return RunConfig.model_validate({"experiment_name": "page", "train_dataset": data, "actor": settings})


def _find_errors(family: str, backend: str, bridge: str, sizes: str) -> Iterator[Finding]:
    spec, config = _model(family)
    for found in check_layout("model", spec, config, backend, bridge, sizes):
        if found.severity == "error":
            yield found


@cache
def _model(family: str) -> tuple[ModelSpec, Mapping[str, Any]]:
    """Return the tiny model of a family; where the tests have none, that of a relative."""
    known = FAMILIES[family]
    relative = "deepseek_v3" if known.latent_attention else "qwen3_moe" if known.experts else "qwen3"
    tiny = family if family in MODELS["FAMILIES"] else relative
    config = MODELS["config_of"](MODELS["Variant"](tiny, MODELS["TIED"].get(family, {}))).to_dict()
    if known.experts in config:
        config.pop("num_experts" if known.experts != "num_experts" else "", None)  # written twice, with a default
    config |= {"model_type": family, "architectures": [architecture_of(family)]}
    return from_config(config, family), config


if __name__ == "__main__":
    PAGE.write_text(page())
