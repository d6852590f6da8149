"""Explanations of the RUN- and CONFIG- codes, one file for each subject and capability, and of the compiler's rules."""

from pathlib import Path

from allocation import codes
from allocation.codes import Explanation
from areal_like.core.registry import find_files

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
    files = {title: Path(__file__).with_name(f"{name}.toml") for name, title in SUBJECTS.items()}
    files |= {name.replace("_", " ").capitalize(): file for name, file in find_files("codes.toml")}
    return {
        title: {
            code: Explanation(code, **{name: text.strip() for name, text in entry.items()})
            for code, entry in codes.read_entries(file).items()
        }
        for title, file in files.items()
    }


def explanations() -> dict[str, Explanation]:
    """Return every explanation, including the compiler's rules, by code."""
    own = {code: entry for entries in by_subject().values() for code, entry in entries.items()}
    return {**own, **codes.explanations()}
