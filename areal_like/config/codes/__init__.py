"""Explanations of the RUN- and CONFIG- codes, one file of them for each subject, and those of the compiler's rules."""

from pathlib import Path

from allocation import codes
from allocation.codes import Explanation

SUBJECTS = {
    "configuration": "Keys and files",
    "layout": "Layout, machine and servers",
    "models": "Models, weights and tokenizers",
    "data": "Data, rewards and workflows",
    "training": "Algorithms",
    "megatron": "Megatron options",
    "resume": "Directories and resuming",
}


def by_subject() -> dict[str, dict[str, Explanation]]:
    """Return the explanations of RUN- and CONFIG- codes, by the subject's title and by code."""
    folder = Path(__file__).parent
    return {
        title: {
            code: Explanation(code, **{name: text.strip() for name, text in entry.items()})
            for code, entry in codes.read_entries(folder / f"{name}.toml").items()
        }
        for name, title in SUBJECTS.items()
    }


def explanations() -> dict[str, Explanation]:
    """Return every explanation, those of the compiler's rules included, by code."""
    own = {code: entry for entries in by_subject().values() for code, entry in entries.items()}
    return {**own, **codes.explanations()}
