"""`sglang.extra_args` against the options of the installed SGLang."""

import subprocess
import sys

import pytest

from areal_like.rollout.sglang.options import check_server_options, server_options

DUMP = """
import argparse
from sglang.srt.server_args import ServerArgs
parser = argparse.ArgumentParser()
ServerArgs.add_cli_args(parser)
for action in parser._actions:
    for option in action.option_strings:
        if action.dest != "help":
            print(option.lstrip("-").replace("-", "_"), action.dest, *(action.choices or ()))
"""


def test_names_and_choices_are_those_of_the_installed_server():
    shown = subprocess.run([sys.executable, "-W", "ignore", "-c", DUMP], capture_output=True, text=True, check=True)
    theirs = {name: field for name, field, *_ in map(str.split, shown.stdout.splitlines())}
    ours = {name: option.field for name, option in server_options().items()}
    assert ours.keys() == theirs.keys()
    redirected = {name for name in ours if ours[name] != theirs[name]}
    assert not redirected, {name: (ours[name], theirs[name]) for name in redirected}
    choices = {name: set(rest) for name, _, *rest in map(str.split, shown.stdout.splitlines())}
    read = {name: set(option.choices) for name, option in server_options().items() if option.choices}
    assert read == {name: choices[name] for name in read}
    assert len(read) > 50


def test_reading_names_imports_nothing_of_sglang():
    code = (
        "import sys; from areal_like.rollout.sglang.options import server_options as o; assert len(o()) > 300;"
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
    assert list(check_server_options({name: value}, device="cuda")) == [(name, f"{name} is set by the run itself", [])]


@pytest.mark.parametrize(
    ("name", "value", "problem", "nearest"),
    [
        ("no_such_option", 1, "SGLang's server has no option no_such_option", None),
        ("schedule-polcy", "lpm", "SGLang's server has no option schedule-polcy", ["schedule_policy"]),
        ("tensor-parallel", 2, "SGLang's server has no option tensor-parallel", None),  # argparse would complete it
        ("chunked_prefill_size", "many", "'many' should be a whole number or null", []),
        ("schedule_policy", True, "True should be text", []),
        ("disable_radix_cache", "yes", "'yes' should be true or false", []),
        (
            "schedule_policy",
            "lpn",
            "'lpn' should be one of lpm, random, fcfs, dfs-weight, lof, priority, routing-key",
            ["lpm"],
        ),
        ("tokenizer-mode", "fast", "'fast' should be one of auto, slow", []),
        ("load_format", "safetensor", None, ["safetensors"]),  # a named constant
        ("sampling_backend", "torch", "'torch' should be one of ascend, flashinfer, pytorch", ["pytorch"]),
        ("nsa-decode-backend", "fa2", None, ["fa3"]),
        ("log_requests_level", 4, "4 should be one of 0, 1, 2, 3", []),
        ("page_size", 0, "0 should be positive", []),
        ("page-size", -1, "-1 should be positive", []),
        ("stream_interval", 0, "0 should be positive", []),
    ],
)
def test_what_the_server_does_not_take_is_refused(name, value, problem, nearest):
    ((found, message, near),) = check_server_options({name: value}, device="cuda")
    assert found == name
    assert problem is None or message == problem
    assert nearest is None or near == nearest


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
        "tokenizer_mode": "slow",
        "max_total_tokens": "1k",
    }
    assert list(check_server_options(options, device="cuda")) == []


def test_no_chunks_are_a_size_of_minus_one():
    assert list(check_server_options({"chunked_prefill_size": -1}, device="cuda")) == []


@pytest.mark.parametrize(("device", "refused"), [("cpu", True), ("cuda", False), (None, False)])
def test_the_run_sizes_the_cache_on_cpu(device, refused):
    wanted = [("max-total-tokens", "max-total-tokens is set by the run itself on CPU", [])] if refused else []
    assert list(check_server_options({"max-total-tokens": 64}, device=device)) == wanted
