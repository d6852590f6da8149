"""`sglang.extra_args` against the options of the installed SGLang."""

import importlib.util
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from allocation import ParallelSizes
from areal_like.backends.sglang.options import (
    ALLOWED,
    TABLE,
    check_server_options,
    is_on,
    read_options,
    server_arguments,
)
from areal_like.core.config.load import load

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("library", ["sglang", "megatron"])
def test_the_tables_are_those_of_the_installed_libraries(library):
    code = (
        "import sys; sys.path.insert(0, 'requirements'); import option_tables as tables; import json;"
        f"table, options = tables.{library.upper()}, tables.{library}_options();"
        "sys.exit(json.loads(table.read_text()) != json.loads(json.dumps(options)))"
    )
    shown = subprocess.run([sys.executable, "-W", "ignore", "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert shown.returncode == 0, f"run `python requirements/option_tables.py`\n{shown.stderr[-2000:]}"


def problems(options, device="cuda"):
    return list(check_server_options(options, device=device))


def test_reading_names_imports_nothing_of_sglang():
    code = (
        "import sys; from areal_like.backends.sglang.options import TABLE, read_options as o; assert len(o(TABLE)) > 300;"
        "assert not {'torch', 'sglang'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tp-size", 4),
        ("tp_size", 4),
        ("tensor_parallel_size", 2),
        ("tensor-parallel-size", 2),
        ("model", "/nowhere"),
        ("ep", 2),
        ("weight_version", 9),
        ("nccl-init-addr", "10.0.0.1:1"),
        ("config", "other.yaml"),
        ("api-key", "x"),
    ],
)
def test_what_the_run_sets_is_refused_in_every_spelling(name, value):
    (problem,) = problems({name: value})
    assert (problem.name, problem.message) == (name, f"{name} is set by the run itself")


@pytest.mark.parametrize(
    ("name", "value", "problem", "nearest"),
    [
        ("no_such_option", 1, "SGLang's server has no option no_such_option", None),
        ("schedule-polcy", "lpm", "SGLang's server has no option schedule-polcy", ["schedule_policy"]),
        ("tensor-parallel", 2, "SGLang's server has no option tensor-parallel", None),  # argparse would complete it
        ("chunked_prefill_size", "many", "'many' should be a whole number", []),
        (
            "schedule_policy",
            True,
            "True should be one of lpm, random, fcfs, dfs-weight, lof, priority, routing-key",
            None,
        ),
        ("disable_radix_cache", "yes", "'yes' should be true or false", []),
        (
            "schedule_policy",
            "lpn",
            "'lpn' should be one of lpm, random, fcfs, dfs-weight, lof, priority, routing-key",
            ["lpm"],
        ),
        ("log_requests_level", 4, "4 should be one of 0, 1, 2, 3", []),
        ("page_size", 0, "0 should be positive", []),
        ("page-size", -1, "-1 should be positive", []),
    ],
)
def test_what_the_server_does_not_take_is_refused(name, value, problem, nearest):
    (found,) = problems({name: value})
    assert found.name == name
    assert problem is None or found.message == problem
    assert nearest is None or [*found.names, *found.values] == nearest


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("quantization", "fp8", "weight updates are not quantized"),
        ("torchao_config", "int8wo", "weight updates are not quantized"),
        ("kv-cache-dtype", "fp8_e5m2", "a rounded cache"),
        ("speculative_algorithm", "EAGLE", "weight updates do not reach the draft model"),
        ("enable_hierarchical_cache", True, "older weights"),
        ("enable-lora", True, "weight updates already contain the adapters"),
        ("num_continuous_decode_steps", 4, "SGLang 0.5.17 ignores it"),
        ("enable_eplb", True, ""),
        ("enable_torch_compile", True, ""),
        ("trust_remote_code", True, ""),
    ],
)
def test_what_does_not_survive_a_weight_update_is_refused(name, value, why):
    (found,) = problems({name: value})
    assert found.message.startswith(f"{name} is not supported with weight updates")
    assert why in found.message
    assert found.help == f"leave out {name}"


def test_what_is_allowed_exists():
    assert {option.field for option in read_options(TABLE).values()} >= ALLOWED


def test_what_is_allowed_does_something():
    """SGLang has fields that none of its code reads."""
    package = Path(importlib.util.find_spec("sglang").origin).parent  # type: ignore[union-attr, arg-type]
    words = Counter(re.findall(r"\w+", "\n".join(file.read_text() for file in package.rglob("*.py"))))
    assert [field for field in ALLOWED if words[field] < 2] == []


@pytest.mark.parametrize(
    ("options", "on"), [({"disable-radix-cache": True}, True), ({"disable_radix_cache": False}, False), ({}, False)]
)
def test_a_flag_is_on_in_either_spelling(options, on):
    assert is_on(options, "disable_radix_cache") is on


@pytest.mark.parametrize(
    ("extra", "disabled"), [([], True), (["sglang.extra_args.flashinfer_allreduce_fusion_backend=auto"], False)]
)
def test_all_reduce_is_fused_only_where_it_is_asked_for(write, extra, disabled):
    arguments = server_arguments(load(write(), extra).config, Path("model"), ParallelSizes(tp=2), "cuda")
    assert ("--enforce-disable-flashinfer-allreduce-fusion" in arguments) is disabled
    assert "enforce_disable_flashinfer_allreduce_fusion" in read_options(TABLE)


def test_what_the_server_takes_passes():
    options = {
        "schedule_policy": "lpm",
        "chunked-prefill-size": 4096,
        "disable_radix_cache": True,
        "disable-cuda-graph": True,
        "sleep_on_idle": False,
        "schedule_conservativeness": 1,
        "cuda_graph_bs_decode": 8,
        "watchdog_timeout": 300.0,
        "log_level": "warning",
        "disable_prefill_cuda_graph": True,
        "log_requests_level": 2,
        "page_size": 16,
        "max_total_tokens": "1k",
        "mm_attention_backend": "triton_attn",
    }
    assert problems(options) == []


def test_no_chunks_are_a_size_of_minus_one():
    assert problems({"chunked_prefill_size": -1}) == []


@pytest.mark.parametrize(("name", "value"), [("max-total-tokens", 64), ("mm_attention_backend", "sdpa")])
@pytest.mark.parametrize(("device", "refused"), [("cpu", True), ("cuda", False)])
def test_the_run_sets_the_cache_and_the_attention_of_images_on_cpu(device, refused, name, value):
    wanted = [f"{name} is set by the run itself on CPU"] if refused else []
    assert [problem.message for problem in problems({name: value}, device)] == wanted
