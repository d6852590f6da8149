"""Megatron's layout strings of pipelines (core/transformer/pipeline_parallel_layer_layout.py)."""

import re

# Written out in this order and once each, so that a repetition may stand in parentheses but not the other way round.
_REPEATS = re.compile(r"\(([^)]++)\)\*([0-9]{1,3})(?![0-9])"), re.compile(r"(.)\*([0-9]{1,3})(?![0-9])")
_LONGEST = 10_000


def pipeline_stages(text: str) -> list[str] | None:
    """The stages of a layout string with all repetitions written out, None when it is malformed or absurd."""
    text = text.replace(",", "")
    for repeat in _REPEATS:
        if len(text) <= _LONGEST:
            text = repeat.sub(lambda match: match[1] * int(match[2]), text)
    return text.split("|") if len(text) <= _LONGEST and re.fullmatch(r"[EtmL|]*", text) else None
