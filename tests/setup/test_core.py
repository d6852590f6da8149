"""The core's README walks through its files: every name is a link to the file that defines it."""

import re
from pathlib import Path

import pytest

CORE = Path(__file__).parents[2] / "areal_like/core"
README = (CORE / "README.md").read_text()
LINKS = re.findall(r"\[`([^`]+)`\]\(([\w/]+\.py)\)", README)
MOST_LINES = 300
MOST_FILES, MOST_CODE = 75, 8_950  # of Python: files, and lines that are not blank


@pytest.mark.parametrize(("name", "file"), LINKS)
def test_a_name_is_defined_in_the_file_that_it_links_to(name, file):
    text = (CORE / file).read_text()
    module = file.rpartition("/")[2] == f"{name.replace(' ', '_')}.py"
    assert module or re.search(rf"^(class|def|async def) {name}\b|^{name}\b.*=", text, re.MULTILINE)


def test_every_name_in_code_type_is_a_link_or_a_key():
    names = re.findall(r"`([^`]+)`", re.sub(r"\[`[^`]+`\]", "", README))
    assert [name for name in names if not re.fullmatch(r"[a-z_]+(\.[a-z_]+)+|\[tokens\]|key=value", name)] == []


def test_it_names_most_files_and_fits_in_a_few_screens():
    named = {file for _, file in LINKS}
    files = {str(file.relative_to(CORE)) for file in CORE.rglob("*.py")}
    assert len(README.splitlines()) <= MOST_LINES
    assert len(named) >= 35 and named <= files


def test_the_core_can_be_read_in_a_day():
    texts = [file.read_text() for file in CORE.rglob("*.py")]
    lines = sum(bool(line.strip()) for text in texts for line in text.splitlines())
    print(f"core: {len(texts)} files of {MOST_FILES}, {lines:,} lines of {MOST_CODE:,}")
    assert len(texts) <= MOST_FILES and lines <= MOST_CODE
