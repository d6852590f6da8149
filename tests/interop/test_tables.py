"""The tables of other systems' keys are TOML files: each key has one meaning, and every included file exists."""

import tomllib
from collections import Counter
from itertools import chain
from pathlib import Path

import pytest

from areal_like.interop import keys
from areal_like.interop.keys.entries import Entry, table

FILES = sorted(Path(keys.__file__).parent.glob("*.toml"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_key_stands_in_one_group_of_its_file(file):
    content = tomllib.loads(file.read_text())
    lists = chain(*(content.get(group, {}).values() for group in ("together", "unneeded")))
    named = Counter([*content.get("ours", ()), *content.get("changes", ()), *chain.from_iterable(lists)])
    assert [key for key, times in named.items() if times > 1] == []


def test_included_rows_have_the_key_and_the_section_of_their_role():
    rows = table("verl")
    assert rows["critic.optim.lr"] == Entry(ours="critic.optimizer.lr")
    assert rows["actor_rollout_ref.ref.fsdp_config.param_offload"] == Entry(ours="ref.offload")
    precise = rows["actor_rollout_ref.actor.optim.override_optimizer_config.use_precision_aware_optimizer"]
    assert precise == Entry(ours="actor.megatron.use_precision_aware_optimizer")


def test_a_files_own_row_replaces_an_included_one():
    assert table("verl_engine")["megatron"] == table("verl")["critic.megatron"]
    own = table("trinity")["actor_rollout_ref.actor.clip_ratio_low"]
    assert own != table("verl")["actor_rollout_ref.actor.clip_ratio_low"]
    assert own.unneeded == "Trinity-RFT reads this key in the section algorithm"
