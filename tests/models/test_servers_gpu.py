"""Servers of every family on a GPU: as exact as transformers in bfloat16, also after an update in place."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import batched
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_models import FAMILIES, TIED, VARIANTS, Variant, hugging_face_log_probs, write_tiny
from tiny_servers import Measure, Post, change, distance, score, served, update
from transformers import AutoModelForCausalLM

from allocation.families import TRAINED

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
AT_ONCE = 6  # servers on the GPU
# Times transformers' distance from float32: rounding changes the experts of some tokens, on both sides
BOUNDS: Mapping[Measure, float] = {np.nanmean: 2}
WAVES = list(batched(sorted(set(TRAINED["fsdp"]) | set(TRAINED["megatron"])), AT_ONCE))
# Sizes that the kernels of GPUs take; those of latent keys are the published ones
WIDE = {"hidden_size": 256, "intermediate_size": 256, "moe_intermediate_size": 128, "head_dim": 64}
WIDE |= {"shared_expert_intermediate_size": 128, "linear_key_head_dim": 128, "linear_value_head_dim": 128}
WIDE |= {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}


def write_model(family: str, path: Path) -> torch.nn.Module:
    """Write a tiny model in bfloat16, and return it."""
    own = FAMILIES[family][0]
    wide = {key: size for key, size in WIDE.items() if key in own or key in ("hidden_size", "intermediate_size")}
    network = write_tiny(Variant(family, {**VARIANTS[family].fields, **wide, **TIED.get(family, {})}), path)
    network.to(torch.bfloat16).save_pretrained(path)
    return network


def compare(family: str, model: Path, post: Post, bounds: Mapping[Measure, float] = BOUNDS) -> str:
    """Return what is wrong with a server's log-probs, whose distance from float32 is about that of transformers'."""
    exact, rounded = (
        AutoModelForCausalLM.from_pretrained(model, dtype=dtype, attn_implementation="eager").eval()
        for dtype in (torch.float32, torch.bfloat16)
    )
    scored = score(post)
    recomputed = [(batch, hugging_face_log_probs(rounded, batch)[-len(found) :]) for batch, found in scored]
    wrong = []
    for measure, times in bounds.items():
        apart, of_rounding = (np.mean(distance(exact, each, measure)) for each in (scored, recomputed))
        told = f"{family}, {model.name}: {apart:.3g} nats from float32, transformers {of_rounding:.3g}"
        print(f"{told} ({measure.__name__})")
        if not apart <= times * of_rounding:
            wrong.append(f"{told} ({measure.__name__})")
    return "\n".join(wrong)


@pytest.mark.parametrize("families", WAVES, ids="-".join)
def test_servers_score_before_and_after_an_update(tmp_path: Path, families: tuple[str, ...]) -> None:
    networks = {family: write_model(family, tmp_path / family / "first") for family in families}
    wrong: list[str] = []
    with ExitStack() as stack, ThreadPoolExecutor(len(families)) as threads:
        starting = [threads.submit(stack.enter_context, served(tmp_path / each / "first", "cuda")) for each in families]
        for family, server in zip(families, starting, strict=True):
            try:
                post, updated = server.result(), tmp_path / family / "updated"
            except pytest.fail.Exception as error:  # the others are compared all the same
                wrong.append(f"{family}: {error}")
                continue
            wrong.append(compare(family, tmp_path / family / "first", post))
            change(networks[family]).save_pretrained(updated)
            update(post, updated, "cuda")
            wrong.append(compare(family, updated, post))
    assert not [told for told in wrong if told], "\n".join(told for told in wrong if told)
