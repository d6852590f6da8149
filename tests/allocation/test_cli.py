"""The command `allocation`: in one process through typer's runner, and where it matters as a process."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import allocation
from allocation.cli import app

ROOT = Path(__file__).parents[2]
FOLDED = "megatron:(attn:d1p4t2c2|ffn:d1p4t1e4)"
MOE = str(ROOT / "examples/math/gsm8k_grpo_moe.yaml")


def ask(*words, stdin=None, **environment):
    return CliRunner(env={"COLUMNS": "80", "NO_COLOR": None, **environment}).invoke(
        app, words, input=stdin, prog_name="allocation"
    )


def test_count_prints_the_number_alone():
    result = ask("count", FOLDED)
    assert (result.exit_code, result.stdout, result.stderr) == (0, "16\n", "")
    assert ask("count", "sglang:d4t4", "megatron:d*t2", "--cluster", "4x8").stdout == "16\n32\n"
    assert ask("count", "-", stdin="sglang:d1\n\nmegatron:d4\n").stdout == "1\n4\n"


def test_count_of_a_wrong_string_is_no_number():
    result = ask("count", "d4")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith("error[ALLOC-BACKEND-MISSING]: `d4` has no backend\n    d4\n    ^^\n")


def test_check_shows_every_finding_of_every_string():
    result = ask("check", "megatron:d1p2t2e4", "sglang:d4t4", "fsdp:d2d4")
    assert result.exit_code == 1
    for words in ("invalid: megatron:d1p2t2e4", "ALLOC-EP-DIVIDES", "nearest valid: megatron:d1p2t2e2"):
        assert words in result.stdout
    assert "valid: sglang:d4t4, 16 GPUs\n" in result.stdout
    assert "ALLOC-LETTER-TWICE" in result.stdout


def test_check_knows_model_cluster_and_batch():
    assert ask("check", "megatron:d4t3").exit_code == 0
    assert "ALLOC-HEADS" in ask("check", "megatron:d4t3", "--model", "qwen3-0.6b").stdout
    assert "ALLOC-CLUSTER-SIZE" in ask("check", "megatron:d8t2", "--cluster", "1x8").stdout
    assert "ALLOC-BATCH-DP" in ask("check", "megatron:d64", "--batch", "2x8").stdout
    assert ask("check", "megatron:d4", "--order", "tp-dp").exit_code == 1


def test_warnings_are_valid():
    result = ask("check", "megatron:d4", "--cluster", "1x8")
    assert result.exit_code == 0
    assert "note[ALLOC-CLUSTER-IDLE]" in result.stdout


def test_check_as_json():
    result = ask("check", "sglang:d4", "megatron:d3e2", "--json")
    assert result.exit_code == 1
    good, bad = json.loads(result.stdout)
    assert (good["valid"], good["n_gpus"], good["findings"]) == (True, 4, [])
    assert allocation.Plan.from_json(good["plan"]) == allocation.compile("sglang:d4")
    assert (bad["allocation"], bad["valid"], bad["plan"]) == ("megatron:d3e2", False, None)
    assert bad["findings"][0]["code"] == "ALLOC-EP-DIVIDES"
    assert bad["findings"][0]["nearest"]


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["check"], "Missing argument"),
        (["check", "a=1"], "overrides a run's YAML"),
        (["check", "sglang:d1", "--cluster", "8"], "NODESxGPUS"),
        (["check", "sglang:d1", "--batch", "8"], "PROMPTSxSAMPLES"),
        (["check", "sglang:d1", "--colour"], "No such option"),
        (["check", "sglang:d1", "--gpu", "h200"], "add --model"),
        (["explain", "sglang:d1", "fsdp:d1"], "takes one allocation, not 2"),
        (["explain", "sglang:d1", "--by", "xp"], "unknown group xp"),
        (["explain", "megatron:d1000000"], "too many to list"),
        (["explain", "sglang:d1", "--svg", "/no/such/folder/a.svg"], "cannot be written"),
        (["groups", "sglang:d1", "--rank", "1"], "no engine has a rank 1"),
        (["groups", "sglang:d1", "--role", "actor"], "unknown role actor"),
        (["groups", "sglang:d1", "--name", "tp"], "unknown group tp"),
        (["convert", "sglang:d1"], "write --from"),
        (["convert", "sglang:d1", "--to", "megatorn"], "unknown system 'megatorn'"),
        (["convert", "none.yaml", "--from", "roll"], "none.yaml cannot be read"),
        (["convert", "none.sh", "--from", "megatron"], "none.sh cannot be read"),
        (["convert", "/", "--from", "roll"], "/ cannot be read: [Errno 21] Is a directory"),
        (["format", MOE], "format takes strings"),
        (["memory", MOE, "--model", "qwen3-0.6b"], "memory takes strings, not files"),
        (["chekc"], "No such command"),
    ],
)
def test_wrong_usage_is_2(words, problem):
    result = ask(*words)
    assert result.exit_code == 2
    assert problem in " ".join(re.sub("[│╭╮╰╯─]", " ", result.stderr).split())


@pytest.mark.parametrize("command", ["check", "explain", "count", "groups", "format"])
@pytest.mark.parametrize("stdin", ["", "\n \n"])
def test_an_empty_pipe_is_wrong_usage(command, stdin):
    result = ask(command, "-", stdin=stdin)
    assert result.exit_code == 2
    assert "standard input contains no allocation" in result.stderr


def test_settings_that_end_like_a_file_name_are_no_path():
    for text in ("model.config=none.yaml", "python main.py --config none.yaml"):
        assert "cannot be read" not in ask("convert", text, "--from", "verl").stderr


def test_explain_says_what_each_gpu_does():
    text = ask("explain", FOLDED.replace("t1e4", "e4")).stdout
    assert "actor: megatron trainer with 16 ranks, GPU ids 0-15" in text
    assert "not written: 1" in text and "default is TP (2)" in " ".join(text.split())
    assert re.search(r"node 1 +8 +9 +10 +11 +12 +13 +14 +15\s+t0c0p2", text)
    assert re.search(r"pp +4 +4 +across nodes +activations between stages", text)
    assert re.search(r"ep +4 +4 +same node", text)


def test_explain_writes_the_picture(tmp_path):
    file = tmp_path / "plan.svg"
    assert ask("explain", FOLDED, "--svg", str(file)).exit_code == 0
    assert file.read_text().startswith("<svg ")


@pytest.mark.parametrize(
    "words", [["explain", FOLDED], ["explain", "sglang:d9t8+megatron:d72t2"], ["groups", "megatron:d128t2"]]
)
def test_views_fit_80_columns_and_have_no_colour_when_piped(words):
    text = ask(*words).stdout
    assert "\x1b" not in text
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize("columns", [80, 60, 40, 24])
def test_no_rank_is_cut_off_in_a_narrow_terminal(columns):
    text = ask("explain", FOLDED, COLUMNS=str(columns)).stdout
    shown = text.partition("dense grid")[2].partition("expert grid")[0]
    assert set(re.findall(r"t\dc\dp\d", shown)) == {
        f"t{t}c{c}p{p}" for t in range(2) for c in range(2) for p in range(4)
    }
    assert max(map(len, text.splitlines())) <= columns


def test_colour_where_it_is_wanted_and_not_with_no_color():
    assert "\x1b[" in ask("explain", FOLDED, FORCE_COLOR="1").stdout
    plain = ask("explain", FOLDED, FORCE_COLOR="1", NO_COLOR="1").stdout
    assert not re.search(r"\x1b\[[0-9;]*(3[0-7]|4[0-7]|38|48)[;m]", plain)


def test_groups_of_a_rank():
    text = ask("groups", FOLDED, "--rank", "13").stdout
    assert text.startswith("actor rank 13: node 1, GPU 5, tp 1, cp 0, dp 0, pp 3, etp 0, ep 1, edp 0\n")
    assert re.search(r"pp +1 5 9 13 +2 nodes", text)
    assert json.loads(ask("groups", FOLDED, "--rank", "13", "--name", "cp", "--json").stdout) == {
        "actor": {"cp": [13, 15]}
    }


def test_groups_by_name_and_role():
    assert "actor tp: 8 groups of 2 ranks\n  0: 0 1\n" in ask("groups", FOLDED, "--name", "tp").stdout
    both = "sglang:d2t2+megatron:d4"
    assert list(json.loads(ask("groups", both, "--json").stdout)) == ["rollout", "actor"]
    found = json.loads(ask("groups", both, "--role", "actor", "--json").stdout)
    assert found["actor"] == {k: v.tolist() for k, v in allocation.compile(both).engine("actor").all_groups().items()}
    order = json.loads(ask("groups", "megatron:p2d2", "--name", "pp", "--order", "tp-pp-cp-ep-dp", "--json").stdout)
    assert order == {"actor": {"pp": [[0, 1], [2, 3]]}}


def test_format():
    assert ask("format", "megatron : t2d4").stdout == "megatron:d4t2\n"
    assert ask("format", "--shell", FOLDED).stdout == "megatron:attn:d1p4t2c2/ffn:d1p4t1e4\n"
    wrong = ask("format", "d4")
    assert (wrong.exit_code, wrong.stdout) == (1, "")


def test_convert_both_ways(tmp_path):
    arguments = ask("convert", FOLDED, "--to", "megatron").stdout
    assert "--expert-tensor-parallel-size 1" in arguments
    file = tmp_path / "run.sh"
    file.write_text(arguments)
    for words, stdin in (([str(file)], None), (["-"], arguments)):
        back = ask("convert", *words, "--from", "megatron", stdin=stdin).stdout.strip()
        assert allocation.compile(back).engines[0].sizes == allocation.compile(FOLDED).engines[0].sizes


def test_convert_tells_of_losses_beside_the_settings():
    result = ask("convert", "sglang.d4p1t1+d2p2t1", "--from", "areal-legacy", "--to", "verl")
    assert result.exit_code == 0
    assert "pipeline_model_parallel_size=2" in result.stdout
    assert "warning[" in result.stderr and "warning[" not in result.stdout


def test_help_teaches_by_example(tmp_path, monkeypatch):
    """Every example in every --help is a command that works; those with files get one."""
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text((ROOT / "examples/math/gsm8k_grpo_cpu.yaml").read_text())
    Path("run.sh").write_text(ask("convert", FOLDED, "--to", "megatron").stdout)
    for command in ("check", "explain", "memory", "plan", "count", "groups", "convert", "format"):
        text = ask(command, "--help").stdout
        examples = re.findall(r"^ +allocation (.+?) *$", text.partition("Examples:")[2].partition("╭")[0], re.MULTILINE)
        assert len(examples) >= 2, text
        for example in examples:
            result = ask(*shlex.split(example))
            assert result.exit_code == 0, (example, result.output)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("check megatron:d4 --model nosuch", "nosuch is neither a file nor the name of a model"),
        ("check megatron:d4 --model qwen3-8", "did you mean qwen3-8b"),
        ("check megatron:d4 --model ./none.json", "./none.json is neither a file"),
        ("check megatron:d4 --model models/none.json", "models/none.json is neither a file"),
        ("check megatron:d4 --model half.json", "half.json cannot be read as JSON"),
        ("check megatron:d4 --model nosuch/model", "HF_HUB_OFFLINE"),
        ("memory megatron:d4 --model nosuch --svg new.svg", "nosuch is neither a file"),
        ("plan --model nosuch --cluster 1x8", "nosuch is neither a file"),
        ("plan --model qwen3-0.6b --cluster 99999999x8", "the planner supports at most 131,072"),
        ("plan --model qwen3-0.6b --cluster 0x8", "a cluster has at least one node with one GPU, not 0x8"),
        (
            "plan --model qwen3-0.6b --cluster 1x8 --batch 0x8",
            "a batch has at least one prompt with one sample, not 0x8",
        ),
        ("check megatron:d4 --cluster 4xx", "a cluster is written NODESxGPUS"),
        ("explain megatron:d4 --cluster -1x8 --svg new.svg", "a cluster is written NODESxGPUS"),
        ("explain megatron:d4 --svg none/new.svg", "none/new.svg cannot be written"),
        ("memory megatron:d4 --model qwen3-8b --gpu foo", "unknown GPU 'foo'"),
        ("check none.yaml", "none.yaml cannot be read"),
        ("convert none.sh --from megatron", "none.sh cannot be read"),
    ],
)
def test_what_makes_no_sense_is_one_message_and_writes_nothing(tmp_path, monkeypatch, words, said):
    monkeypatch.chdir(tmp_path)
    Path("half.json").write_text('{"hidden_size": 10')
    result = ask(*shlex.split(words), HF_HUB_OFFLINE="1")
    assert (result.exit_code, result.stdout) == (2, "")
    assert said in re.sub(r"[\s│]+", " ", result.stderr)
    assert os.listdir() == ["half.json"]


def test_completion():
    names = ask(_ALLOCATION_COMPLETE="complete_bash", COMP_WORDS="allocation c", COMP_CWORD="1").stdout.split()
    assert names == ["check", "count", "convert"]
    for typed, completed in (("qwen3-30", "qwen3-30b-a3b"), ("Qwen/Qwen3-30", "Qwen/Qwen3-30B-A3B")):
        words = f"allocation check x --model {typed}"
        assert completed in ask(_ALLOCATION_COMPLETE="complete_bash", COMP_WORDS=words, COMP_CWORD="4").stdout
    words = "allocation convert x --to meg"
    assert ask(_ALLOCATION_COMPLETE="complete_bash", COMP_WORDS=words, COMP_CWORD="4").stdout.split() == ["megatron"]


def run(code, *words):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, *code, *words], capture_output=True, text=True, env=environment, cwd="/")


def test_count_imports_only_what_it_needs():
    heavy = "{'rich', 'numpy', 'yaml', 'torch', 'allocation.convert', 'allocation.views.facts'}"
    code = (
        "import sys; sys.argv = ['allocation', 'count', 'sglang:d4']; from allocation.cli import app\n"
        f"try: app()\nfinally: print({heavy} & set(sys.modules))"
    )
    assert run(["-c", code]).stdout == "4\nset()\n"


def test_control_characters_do_not_reach_the_terminal():
    assert "\x1b" not in ask("check", "sg\x1b[31mlang:d4").stdout


def test_a_terminal_without_unicode():
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "ascii"}
    code = [sys.executable, "-m", "allocation", "check", "megatron:d1p2t2e4"]
    result = subprocess.run(code, capture_output=True, text=True, env=environment)
    assert (result.returncode, result.stderr) == (1, "")
    assert "e?t?p = 4?1?2 = 8" in result.stdout


def test_as_a_process():
    assert run(["-m", "allocation"], "count", FOLDED).stdout == "16\n"


def test_a_reader_that_stops_early_is_no_error():
    code = [sys.executable, "-m", "allocation", "groups", "megatron:d4096t8"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(code, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment) as process:
        assert process.stdout.readline() == b"actor tp: 4,096 groups of 8 ranks\n"
        process.stdout.close()
        assert b"Traceback" not in process.stderr.read()
