"""The colours of groups, the same in every view: light enough for black text, distinguishable by colour-blind
readers."""

GROUP_COLOURS = ("#8ecae6", "#ffd166", "#a3d9a5", "#f4a7b9", "#cdb4db", "#f7b267", "#b8c0cc", "#e6e08c")


def colour(group: int) -> str:
    """Return the colour of group number `group`; colours repeat after eight."""
    return GROUP_COLOURS[group % len(GROUP_COLOURS)]
