"""The models for which the installed SGLang has code, and the one that it serves.

Does not import SGLang, which takes long.
"""

import importlib.util
import json
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

# Families with kernels that SGLang 0.5.17 has for GPUs only; tests replace these kernels (`tests/support`)
ON_GPUS_ALONE = frozenset(
    {
        *("deepseek_v2", "deepseek_v3", "kimi_k2", "glm4_moe_lite", "gemma", "gemma2", "gemma3_text", "gpt_oss"),
        *("exaone4", "minimax_m2", "qwen2_moe", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"),
    }
)
# Sequence classifiers whose heads have no bias in transformers and one in SGLang 0.5.17, by SGLang's modules
CLASSES_WITH_BIAS = {
    "qwen2_classification": "Qwen2ForSequenceClassification",
    "qwen3_classification": "Qwen3ForSequenceClassification",
}
CLASSES = ("LlamaForSequenceClassification", "Gemma2ForSequenceClassification", *CLASSES_WITH_BIAS.values())
"""The architectures whose scores are transformers' own, as `config.json` names them."""
_NAMED = re.compile(r"^EntryClass\b[^=\n]*=\s*(\[[^\]]*\]|\w+)", re.MULTILINE)


@cache
def served_architectures() -> frozenset[str]:
    """Return the names that `architectures` in a config.json may have; empty without SGLang."""
    package = importlib.util.find_spec("sglang")
    if package is None or package.origin is None:
        return frozenset()
    modules = Path(package.origin).parent.glob("srt/models/*.py")
    named = (found for file in modules for found in _NAMED.findall(file.read_text()))
    return frozenset(name for found in named for name in re.findall(r"\w+", found))


def read_fields(arguments: Sequence[str]) -> dict[str, Any]:
    """Return config.json of the model in a server's arguments, empty where it is not on disk."""
    return read_config(Path(arguments[arguments.index("--model-path") + 1]))


def read_config(model: Path) -> dict[str, Any]:
    """Return a model's config.json, empty where it is not on disk."""
    config = model / "config.json"
    fields: dict[str, Any] = json.loads(config.read_text()) if config.is_file() else {}
    return fields
