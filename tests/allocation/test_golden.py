"""Wrong strings with their exact output. `python -m tests.allocation.test_golden` rewrites the outputs.

`golden.txt` holds blocks that start with `=== ` and a string, or JSON of `check`'s arguments.
"""

import contextlib
import json
from pathlib import Path

import pytest

import allocation

GOLDEN = Path(__file__).with_name("golden.txt")


def blocks():
    for block in GOLDEN.read_text().split("=== ")[1:]:
        question, _, answer = block.partition("\n")
        yield question, answer.strip("\n")


def answer(question):
    arguments = json.loads(question) if question.startswith("{") else {"spec": question}
    for name, kind in (("batch", allocation.BatchSpec), ("megatron", allocation.MegatronSettings),
                       ("memory", allocation.MemorySettings)):  # fmt: skip
        if name in arguments:
            arguments[name] = kind(**arguments[name])
    if "cluster" in arguments:
        arguments["cluster"] = allocation.Cluster.parse(arguments["cluster"])
    spec = arguments.pop("spec")
    with contextlib.chdir(GOLDEN.parent):
        result = allocation.check(spec, **arguments)
        for nearest, key in {(n, finding.key) for finding in result.findings for n in finding.nearest}:
            offered = {**spec, key.removesuffix(".backend"): nearest} if isinstance(spec, dict) else nearest
            found = allocation.check(offered, **arguments).findings
            assert not any(f.severity == "error" and f.key == key for f in found), f"{nearest} is not valid"
    return "\n".join(map(str, result.findings))


@pytest.mark.parametrize(("question", "expected"), blocks())
def test_wrong_string(question, expected):
    assert answer(question) == expected


def test_every_rule_is_shown():
    shown = {code for code in allocation.RULES if f"[{code}]" in GOLDEN.read_text()}
    # A text that is too long to read is too long for this file; see test_bad_input.py.
    # Other systems' settings: test_convert.py.
    elsewhere = {code for code in allocation.RULES if code.startswith("CONVERT-")} | {"ALLOC-TOO-LONG"}
    assert set(allocation.RULES) == shown | elsewhere
    assert len(list(blocks())) >= 80


if __name__ == "__main__":
    GOLDEN.write_text("\n\n".join(f"=== {question}\n{answer(question)}" for question, _ in blocks()) + "\n")
