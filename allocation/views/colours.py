"""The colours of groups, the same in every view: light enough for black text, told apart by colour-blind eyes."""

GROUP_COLOURS = ("#8ecae6", "#ffd166", "#a3d9a5", "#f4a7b9", "#cdb4db", "#f7b267", "#b8c0cc", "#e6e08c")


def colour(group: int) -> str:
    """The colour of group number `group`; after eight they start again."""
    return GROUP_COLOURS[group % len(GROUP_COLOURS)]
