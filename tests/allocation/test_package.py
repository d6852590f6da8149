"""The package itself: light to import, quick, and its page of rules is current."""

import re
import runpy
import subprocess
import sys
import time
from pathlib import Path

import allocation


def test_checking_a_string_imports_nothing_heavy():
    code = (
        "import sys, allocation; allocation.compile('megatron:(attn:d1p4t2c2|ffn:d1p4t1e4)', model='qwen3-30b-a3b');"
        "print({'torch', 'numpy', 'rich', 'typer', 'pydantic', 'transformers'} & set(sys.modules))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "set()"


def test_the_published_string_is_compiled_in_well_under_a_millisecond():
    elapsed = []
    for _ in range(50):
        start = time.process_time()
        allocation.compile("megatron:(attn:d1p4t2c2|ffn:d1p4t1e4)")
        elapsed.append(time.process_time() - start)
    assert min(elapsed) < 0.001


def test_page_of_rules_is_current():
    generator = runpy.run_path(str(Path(__file__).parents[2] / "docs/generate/rules.py"))
    page = generator["page"]()
    assert generator["PAGE"].read_text() == page, "run `python docs/generate/rules.py`"
    assert set(re.findall(r"^\| `([A-Z-]+)`", page, re.MULTILINE)) == set(allocation.RULES)


def test_every_rule_has_a_reason_and_a_source():
    for rule in allocation.RULES.values():
        assert rule.code.startswith(("ALLOC-", "CONVERT-"))
        assert rule.reason.endswith(".")
        assert rule.source
