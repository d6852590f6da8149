"""Megatron's layout strings of pipelines (core/transformer/pipeline_parallel_layer_layout.py)."""

import re

_REPEAT = re.compile(r"(?:\(([^()]*)\)|([EtmL]))\*([0-9]{1,3})")


def pipeline_stages(text: str) -> list[str] | None:
    """The stages of a layout string with all repetitions written out, None when it is malformed or absurd."""
    while match := _REPEAT.search(text):
        text = text[: match.start()] + (match[1] or match[2] or "") * int(match[3]) + text[match.end() :]
        if len(text) > 10_000:
            return None
    text = re.sub(r"[,\s]", "", text)
    return text.split("|") if re.fullmatch(r"[EtmL|]*", text) else None
