"""Layers of pipeline stages: Megatron's layout strings, and splits with a separate first and last stage."""

import re

# Written out in this order and once each, so that a repetition may stand in parentheses but not the other way round.
_REPEATS = re.compile(r"\(([^)]++)\)\*([0-9]{1,3})(?![0-9])"), re.compile(r"(.)\*([0-9]{1,3})(?![0-9])")
_LONGEST = 10_000


Ends = tuple[int | None, int | None]
"""Layers of the first and of the last stage; None: as many as each stage between them has."""
EVEN: Ends = (None, None)


def pipeline_stages(text: str) -> list[str] | None:
    """Return the stages of a layout string with all repetitions written out, None when it is malformed or absurd.

    Megatron-LM core/transformer/pipeline_parallel_layer_layout.py.
    """
    text = text.replace(",", "")
    for repeat in _REPEATS:
        if len(text) <= _LONGEST:
            text = repeat.sub(lambda match: match[1] * int(match[2]), text)
    return text.split("|") if len(text) <= _LONGEST and re.fullmatch(r"[EtmL|]*", text) else None


def uneven_ends(layers: int, stages: int, chunks: int = 1) -> Ends | None:
    """Return the layers of the first and the last stage that leave equally many for each stage between them.

    None where no split exists. The longest stage is as short as possible, then the first one; the last has at most as
    many layers as the first, as it has the output layer, too. A stage has `chunks` equal virtual stages.
    """
    units, rest = divmod(layers, chunks)
    if rest or units < stages:
        return None
    if units % stages == 0:
        return EVEN
    splits = []
    for middle in (units // stages, -(-units // stages)):
        left = units - (stages - 2) * middle
        if left >= 2:
            first, last = -(-left // 2), left // 2
            splits.append((max(first, middle), first, last, middle))
    _, first, last, middle = min(splits)
    return first * chunks if first != middle else None, last * chunks if last != middle else None


def split_words(layers: int, stages: int, ends: Ends) -> str:
    """Return the layers of all stages as a sum: `7 + 10·8 + 7`."""
    given = [end for end in ends if end is not None]
    middle = stages - len(given)
    each = (layers - sum(given)) // max(1, middle)
    between = [f"{middle}·{each}" if middle > 1 else str(each)] if middle else []
    first, last = ([str(end)] if end is not None else [] for end in ends)
    return " + ".join([*first, *between, *last])
