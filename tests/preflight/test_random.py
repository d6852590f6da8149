"""Random configurations end in findings or pass; AREAL_LIKE_RANDOM_CONFIGURATIONS=10000 tries more of them."""

import os
import random
import time

import pytest
import yaml
from limits import HUNG_S

from areal_like.core.config.findings import ConfigError
from areal_like.core.config.keys import all_keys, annotation_of, mask, members, section_of
from areal_like.core.config.load import dump, load
from areal_like.preflight import preflight

COUNT = int(os.environ.get("AREAL_LIKE_RANDOM_CONFIGURATIONS", "150"))
BATCHES, SHORT = 10, 3  # `make test` tries the first three batches
KEYS = [key for key in all_keys() if section_of(annotation_of(key)) is None]
WORDS = [
    *("", "null", "x", "é" * 200, "n" * 400, "a/b", "..", "~", "/", "/dev/null", "/nowhere/x", "${seed}", "${nothing}"),
    *("${", "???", "true", "[1, 2]", "{a: 1}", "{", "\x00", "\x1b[0m", "arithmetic", "none.jsonl", "1e400", ".nan"),
    *("megatron:d2", "sglang:d1", "megatron:d1t2", "sglang:d1t2@0-1", "megatron:d*", "fsdp:d2", "vllm:d1", "megatron:"),
    *("sglang:d1|megatron:d1", "sglang:d1+megatron:d2", "megatron:(attn:d1t2|ffn:e2)", "sglang:d999999999999"),
]
NUMBERS = ["0", "1", "2", "3", "7", "16", "-1", "1.5", "1000", "999999", str(2**31), str(2**64), "1" + "0" * 39]
SECTIONS = {
    "sglang.extra_args": ["schedule_policy", "page-size", "quantization", "no_such", "tp", "log_level", "a.b"],
    "actor.megatron.override_transformer_config": ["fp8", "moe_z_loss_coeff", "num_layers", "no_such", "cp_comm_type"],
}


def override(rng):
    """One `key=value`, right or wrong."""
    if rng.random() < 0.2:
        section = rng.choice(list(SECTIONS))
        return f"{section}.{rng.choice(SECTIONS[section])}={rng.choice(WORDS + NUMBERS)}"
    key = rng.choice(KEYS)
    if rng.random() < 0.05:
        key = key[:-1]
    kinds = members(annotation_of(key))
    if rng.random() < 0.7 and (int in kinds or float in kinds):
        return f"{key}={rng.choice(NUMBERS)}"
    if rng.random() < 0.5 and bool in kinds:
        return f"{key}={rng.choice(['true', 'false'])}"
    return f"{key}={rng.choice(WORDS + NUMBERS)}"


@pytest.mark.parametrize(
    "batch", [pytest.param(batch, marks=[] if batch < SHORT else pytest.mark.long) for batch in range(BATCHES)]
)
@pytest.mark.timeout(300 + COUNT)
def test_a_random_configuration_ends_in_findings_or_passes(write, tmp_path, batch):
    file, resolved = write(), tmp_path / "resolved.yaml"
    for number in range(batch, COUNT, BATCHES):
        rng = random.Random(number)
        overrides = [override(rng) for _ in range(rng.choice([1, 1, 2, 3, 6]))]
        start = time.monotonic()
        try:
            loaded = load(file, overrides)
            resolved.write_text(dump(loaded.config))
            assert yaml.safe_load(resolved.read_text()) == mask(loaded.config.model_dump()), overrides
            findings = preflight(loaded, dry_run=True).findings
        except ConfigError as error:
            findings = error.findings
            assert findings
        except Exception as error:  # noqa: BLE001  (the configuration is what has to be seen)
            pytest.fail(f"configuration {number}, {overrides!r}: {type(error).__name__}: {error}")
        assert all(str(found) for found in findings)
        assert time.monotonic() - start < HUNG_S, (number, overrides)
