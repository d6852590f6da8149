"""Count the published example files of other systems that `areal-like migrate` translates with an equal meaning.

A file counts as equal if it is read, changes nothing that trains (values only the user knows become `???`), and its
YAML loads; each other file is listed with its reasons. Kinds: `text` (RL on text, agents included), `images` (models of
images, video, sound or actions), `offline` (SFT, DPO, reward models: no responses are sampled).

    git clone https://github.com/alibaba/ROLL peers/ROLL      # and AReaL, verl, slime, siiRL
    python -m benchmarks.published_configs peers [--reasons] [--save]
"""

from __future__ import annotations

import argparse
import re
import subprocess
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import yaml

from areal_like.core.config.findings import ConfigError
from areal_like.core.config.load import load
from areal_like.interop.completion import fill_placeholders
from areal_like.interop.migrate import migrate
from areal_like.interop.rules.translation import Translation
from benchmarks.report import save

SYSTEMS = {  # repository: its name here, its example files, and what only a file that starts a run contains
    "AReaL": ("areal", "examples/**/*.yaml", r"(?m)^(actor|gconfig|rollout|allocation_mode):"),
    "verl": ("verl", "examples/**/*.sh", r"main_ppo\b|fsdp_sft_trainer|sft_trainer\b|main_generation"),
    "slime": ("slime", "{scripts,examples}/**/*.sh", r"--(hf-checkpoint|rollout-batch-size)\b"),
    "siiRL": ("siirl", "examples/**/*.sh", r"siirl\.(\w+\.)*(main|client)\w*"),
    "ROLL": ("roll", "examples/**/*.yaml", r"(?m)^(actor_train|actor_infer|sft_train|student|pretrain):"),
}
IMAGES = re.compile(
    r"(?i)[-_./]vl\b|[-_]vl[-_./\d]|vision|omni|video|openvla|embodied|multi_?modal|geo3k|image_key|\bclevr"
)
OFFLINE = re.compile(
    r"(?i)\bsft_train\b|sft_trainer|dpo_config|--loss-type sft|\bsft_loss\b|main_generation|distill_loss_weight"
)
FOLDERS = re.compile(r"""(?<=[\s"'])/\S+/""")  # of a path in a script: names are kept, no paths


def files_of(folder: Path, pattern: str) -> list[Path]:
    """Return the files that match a glob pattern with one choice in braces."""
    choice = re.search(r"\{(.*?)\}", pattern)
    patterns = [pattern.replace(choice[0], one) for one in choice[1].split(",")] if choice else [pattern]
    return sorted(path for one in patterns for path in folder.glob(one))


def kind_of(path: str, text: str) -> str:
    """Return whether a file trains on text, on images, or without sampling."""
    if OFFLINE.search(text) or re.search(r"(?i)[-_/](sft|dpo|rw|alignment)[-_/.]", path):
        return "offline"
    return "images" if IMAGES.search(path) or IMAGES.search(text) else "text"


def reasons_of(done: Translation) -> list[str]:
    """Return what keeps a translation from an equal meaning."""
    if not done.same:
        return [*done.problems, *(f"{key}: {note}" for key, note in done.changes.items())]
    try:
        load(yaml.safe_load(fill_placeholders(done.yaml)))
    except ConfigError as error:
        return [f"does not load: {found}" for found in error.findings]
    return []


def commit_of(folder: Path) -> str | None:
    """Return the commit of a checkout."""
    done = subprocess.run(["git", "-C", folder, "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 and (folder / ".git").exists() else None


def count(folder: Path, name: str) -> dict[str, Any]:
    """Return the counts of a repository by kind, and the reasons of each file that is not equal."""
    system, pattern, telling = SYSTEMS[name]
    kinds: dict[str, Counter[str]] = defaultdict(Counter)
    others: dict[str, list[str]] = {}
    for path in files_of(folder, pattern):
        text, place = path.read_text(), str(path.relative_to(folder))
        if not re.search(telling, text):
            continue
        reasons = [FOLDERS.sub("", told) for told in reasons_of(migrate(text, system))]
        kind = kind_of(place, text)
        kinds[kind]["files"] += 1
        kinds[kind]["equal"] += not reasons
        if reasons:
            others[f"{kind}: {place}"] = reasons
    return {"commit": commit_of(folder), "kinds": {k: dict(v) for k, v in sorted(kinds.items())}, "others": others}


def main() -> None:
    """Count every repository that is there, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peers", type=Path, help="folder of the checkouts")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/published_configs.json")
    parser.add_argument("--reasons", action="store_true", help="print the reasons of every file that is not equal")
    args = parser.parse_args()
    result = {name: count(args.peers / name, name) for name in SYSTEMS if (args.peers / name).is_dir()}
    for name, found in result.items():
        print(name, *(f"{kind} {c['equal']} of {c['files']}" for kind, c in found["kinds"].items()), sep="  ")
        for place, reasons in found["others"].items() if args.reasons else ():
            print(f"  {place}", *(f"    {reason[:160]}" for reason in reasons), sep="\n")
    if args.save:
        save("published_configs", {"systems": result})


if __name__ == "__main__":
    main()
