import re
import runpy
from pathlib import Path

from areal_like.capabilities.mcp.schema import McpServerConfig
from areal_like.config.keys import all_keys
from areal_like.config.schema import AdapterConfig, EvaluationConfig, MixtureConfig, RewardPartConfig

GENERATOR = runpy.run_path(str(Path(__file__).parents[2] / "docs/generate/configuration.py"))
PAGE, page = GENERATOR["PAGE"], GENERATOR["page"]


def test_the_page_is_current():
    assert PAGE.read_text() == page(), "run `python docs/generate/configuration.py`"


def test_every_key_is_there_once_and_has_a_meaning():
    _, _, run, *sections = page().split("\n## ")
    keys = re.findall(r"^\| `(\w+)` .*\w", run, re.MULTILINE)
    rows = {}
    for section in sections:
        prefix = section.partition("\n")[0].strip("`")
        rows[prefix] = re.findall(r"^\| `(\w+)` ", section, re.MULTILINE)
        for names, other in re.findall(r"^(.*) are described in \[`(.*)`\]", section, re.MULTILINE):
            described = re.findall(r"`(\w+)`", names) or rows[other]
            assert set(described) <= {*rows[other]}
            rows[prefix] = rows[prefix] + described
        keys += [prefix, *(f"{prefix}.{name}" for name in rows[prefix])]
    by_name = {
        "train_dataset.mixture.NAME": MixtureConfig,
        "adapters.NAME": AdapterConfig,
        "evaluator.datasets.NAME": EvaluationConfig,
        "reward.parts.NAME": RewardPartConfig,
        "episode.mcp_servers.NAME": McpServerConfig,
    }
    entries = [key for name, section in by_name.items() for key in (name, *all_keys(section, f"{name}."))]
    assert sorted(keys) == sorted([*all_keys(), *entries])
    assert not re.findall(r"^.*\|  \|$", page(), re.MULTILINE)


def test_no_row_is_repeated_but_those_of_the_keys_used_most():
    *_, chapters = page().partition("\n## The run\n")
    rows = re.findall(r"^\| `.*", chapters, re.MULTILINE)
    assert len(rows) - len(set(rows)) < 3
    assert "All keys are described in [`actor.megatron`](#actormegatron)." in chapters


def test_conditions_of_a_key_are_there_once_and_can_hold():
    rows = [re.findall(r"Ignored if [^.|]*(?:\.\w[^.|]*)*", line) for line in page().splitlines()]
    assert all(len(conditions) == len(set(conditions)) for conditions in rows)
    parts = page().partition("## `reward.parts.NAME`")[2].partition("\n## ")[0]
    assert "Ignored if `function` is set." in parts
    assert "`reward.parts` is set" not in parts
    assert "Ignored if `reward.parts` is set." in page()
