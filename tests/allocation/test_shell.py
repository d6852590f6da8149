"""A script's commands are those that Bash would start, or what they depend on is named; no program is started."""

import shutil
import subprocess

import pytest

from allocation.convert.settings import Reading
from allocation.convert.shell import read_script
from allocation.convert.shell_syntax import ShellSyntaxError

SCRIPTS = {
    "branches": 'D=${D:-gpu}; N=8\nif [ "$D" = npu ]; then N=16; elif [ "$D" = tpu ]; then N=4; else M=3; fi\nrun $N $M',
    "case": 'D=gpu\ncase "$D" in npu|tpu) N=16 ;; g*) N=8 ;; *) N=1 ;; esac\nrun $N',
    "quoted pattern": 'D="g*"\ncase gpu in "$D") N=1 ;; "g*") N=2 ;; g?u) N=3 ;; esac\nrun $N',
    "empty default": 'X=${X:-}\nrun ${X:-96} "${X:-}" ${X-7} ${X:+set}',
    "nested braces": "run ${A:-${B:-${C:-8}}}/${D:-a b}",
    "arithmetic": "N=3\nrun $(((1024 + 512) * 2)) $((N * 2 - 7 / 2)) $(( N > 2 ? N ** 2 : 0 )) $((-7 / 2)) $((-7 % 3))",
    "nested arithmetic": "a=5\nrun ${x:-$(((a + 1) * 2))} $(( ${a} << 2 | 1 )) $((0x10 + 1))",
    "increments": "i=1\n((i++)); ((i += 5)); let 'i = i * 2'\nrun $i $((i--)) $i",
    "arrays": 'A=(a "b c" d)\nA+=(--e "f=$((1+1))")\nA[2]=x\nrun "${A[@]}" ${#A[@]} "${A[1]}" ${A[1]} "${A[*]}"',
    "no arguments": 'run "$@" end',
    "loops": "for i in 1 2 3; do [ $i = 2 ] && continue; run $i; done\nn=0\nwhile ((n++ < 2)); do run w$n; done",
    "counted loop": "for ((i = 0; i < 3; i++)); do if [[ $i -eq 2 ]]; then break; fi; run $i; done",
    "functions": 'f() { local n=$1; m=$2; shift; run "$n" "$@"; return 0; run never; }\nn=9\nf a "b c"\nrun $n $m',
    "cut": "P=/a/b.c/model.tar.gz\nrun ${P##*/} ${P%%.*} ${P%.*} ${P#*/} ${P/a/x} ${P//a/x} ${P:3:4} ${#P}",
    "letters": "a=Ab\nrun ${a^^} ${a,,} ${a,}",
    "indirect": "a=b; b=5\nrun ${!a}",
    "quotes": """run 'a $x' "b \\$x \\"q\\"" c\\ d $'e\\tf' '' "" \\
  "g\\
h" '{"k": 1}'""",
    "splitting": 'X="  a=1   b=2 "\nrun x$X"y" "$X"',
    "substitution": 'run $(echo a b) "$(echo "a  b")" `echo c` $(printf %s d) $(f() { echo e; }; f)',
    "sequence": 'N="$(seq 2)"\nrun $(seq 16 8 40) "$N" $(seq 3 -1 1) $(seq 4 2)',
    "tests": '[[ -z "" && ( 3 -gt 2 || x == y ) ]] && run a\n[ ! -n x ] || run b\n[[ abc == a*c ]] && run c\ntest 1 -lt 2 && run d',
    "joined": "X=a; X+=b\nrun ${X}c\nunset X\nrun [$X]",
    "subshell": "X=1\n(X=2; run $X)\nrun $X\n{ X=3; }\nrun $X",
    "eval": "X=5\nC=(run a=\\$X 'b c')\neval \"${C[@]}\"",
    "inner shell": "export X=5\nbash -c \"run $X 'a b'\"",
    "exit": "run a\nif true; then exit 0; fi\nrun b",
    "set": 'set -- p "q r"\nrun "$2" $#',
    "set default": "run ${A:=4} $A",
}


def by_bash(script, tmp_path):
    """The words of each `run` that Bash makes of a script, in an empty environment."""
    program = tmp_path / "run"
    program.write_text("#!/bin/bash\nprintf '%s\\0' \"$@\" && printf '\\1'\n")
    program.chmod(0o755)
    done = subprocess.run(
        ["/bin/bash", "-c", script],
        capture_output=True,
        text=True,
        env={"PATH": f"{tmp_path}:/usr/bin:/bin"},
        check=False,
    )
    return [call.split("\0")[:-1] for call in done.stdout.split("\1")[:-1]]


def here(script):
    return [
        [word.text for word in command.words[1:]]
        for command in read_script(script).commands
        if command.words[0].text == "run" and not any(word.unknown for word in command.words)
    ]


@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)
def test_a_script_has_the_words_that_bash_gives_it(script, tmp_path):
    assert by_bash(script, tmp_path)
    assert here(script) == by_bash(script, tmp_path)


@pytest.mark.parametrize(
    ("script", "named"),
    [
        ("run a=$DATA/x", "$DATA"),
        ("run a=$(date +%s)", "date +%s"),
        ("N=8\nif [ -f x ]; then N=16; fi\nrun a=$N", "[ -f x ]"),
        ("N=8\n[ -d y ] && N=16\nrun a=$N", "[ -d y ]"),
        ("if [ -f x ]; then N=8; else N=4; fi\nrun a=$((N * 2))", "[ -f x ]"),
        ('case "$HOST" in a*) N=1 ;; *) N=2 ;; esac\nrun a=$N', '"$HOST"'),
        ("N=0\nfor f in *.sh $FILES; do N=$((N + 1)); done\nrun a=$N", "for f in"),
        ("N=0\nwhile read -r l; do N=$((N + 1)); done\nrun a=$N", "read -r l"),
        ("read N\nrun a=$N", "read N"),
        ("if grep -q x y; then A=(--a 1); else A=(--b 2); fi\nrun ${A[@]}", "grep -q x y"),
        ("N=$(nproc)\nrun a=$N", "nproc"),
        ("run a={1,2}", "{1,2}"),
        ("declare -A m=([a]=1)\nrun a=${m[a]}", "$m"),
        ("run a=$((1 / 0))", "1 / 0"),
        ("run a=${1}", "$1"),
    ],
)
def test_a_value_that_the_script_alone_does_not_give_names_what_it_depends_on(script, named):
    (words,) = [command.words for command in read_script(script).commands if command.words[0].text == "run"]
    reasons = {reason for word in words for reason in word.unknown}
    assert any(named in reason for reason in reasons), reasons


def test_what_both_branches_agree_on_is_known():
    script = 'if [ -f x ]; then N=8; A=(a b=1); else N=8; A=(a b=2); fi\nrun $N "${A[@]}"'
    (words,) = [command.words for command in read_script(script).commands if command.words[0].text == "run"]
    assert [word.text for word in words if not word.unknown] == ["run", "8", "a"]
    assert [word.text for word in words if word.unknown] == ["b=1", "b=2"]


def test_a_branch_that_ends_the_script_is_not_the_one_that_trains():
    assert here("N=8\nif [ ! -f x ]; then N=1; exit 1; fi\nrun $N") == [["8"]]


def test_a_search_for_npus_finds_none():
    probe = "D=${D:-$(python3 -c 'import torch_npu' 2>/dev/null && echo npu || echo gpu)}"
    script = f'{probe}\nN=8\nif [ "$D" = npu ]; then N=16; fi\nrun $N'
    assert here(script) == [["8"]]


@pytest.mark.parametrize(
    "script", ["if x; then", "a=(1", "echo 'open\n--lr 1", "x $((1+", "f() { f; }; f", "while :; do a=1; done"]
)
def test_text_that_is_no_script_is_refused(script):
    with pytest.raises(ShellSyntaxError):
        read_script(script)


def test_nothing_of_a_script_is_run(tmp_path):
    mark = tmp_path / "mark"
    read_script(
        f"touch {mark}; X=$(touch {mark}); eval 'touch {mark}'; [ -f $(touch {mark}) ]; : > {mark}; source {mark}"
    )
    assert not mark.exists() and shutil.which("touch")


def test_a_command_of_several_and_its_place_are_those_of_the_training():
    script = "# settings\nN=2\nray start --head --lr 5\npython3 prepare.py --lr 3\nA=(\n --lr 1e-6\n)\npython3 train.py ${A[@]}\n"
    read = Reading.of_command(script)
    assert read.value("lr") == "1e-6" and read.trainings == []
    assert read.settings["lr"].source.text.strip() == "--lr 1e-6"
    two = Reading.of_command(f"{script}python3 train.py --lr 2\n")
    assert two.trainings == [8, 9]


def test_words_that_may_hold_settings_are_named():
    (unread,) = Reading.of_config('python3 -m verl.x a.b=1 $EXTRA --name $NAME "$@"').unread
    assert (unread.text, unread.line) == ("$EXTRA", 1)


def test_a_branch_of_case_may_be_taken_where_only_one_of_its_patterns_is_unknown():
    script = "case b in\n  $UNSET|c) run 1;;\n  b) run 2;;\nesac"
    assert [command.words[1].text for command in read_script(script).commands] == ["1", "2"]
