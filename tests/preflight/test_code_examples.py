"""The example of an explained RUN- or CONFIG- code gives a finding with that code."""

from __future__ import annotations

from pathlib import Path

import pytest

from areal_like.core.config.codes import by_subject
from areal_like.core.config.findings import ConfigError
from areal_like.core.config.load import load
from areal_like.preflight import preflight

WORKFLOW = f"{Path(__file__).parents[2]}/examples/workflows/calculator.py:run"
EXPLANATIONS = {code: entry for entries in by_subject().values() for code, entry in entries.items()}
NOT_OVERRIDES = {
    "CONFIG-CONTENT",
    "CONFIG-DOTTED-KEY",
    "CONFIG-FILE",
    "CONFIG-MAPPING",
    "CONFIG-YAML",
    "RUN-BRIDGE-NAME",
}
NEEDS_MODELS = {  # of these kinds, on disk
    *("RUN-ADAPTERS-DENSE-LAYERS", "RUN-ADAPTERS-FAMILY", "RUN-ADAPTERS-LATENT"),
    *("RUN-BRIDGE-ARCHITECTURE", "RUN-BRIDGE-FAMILY", "RUN-BRIDGE-MSCALE", "RUN-BRIDGE-ROPE", "RUN-BRIDGE-TENSOR"),
    *("RUN-BRIDGE-WINDOW", "RUN-CPU-FAMILY"),
    *("RUN-MEGATRON-LATENT-ROPE", "RUN-WINDOW-SERVER"),
    *(
        "RUN-FSDP-BIDIRECTIONAL",
        "RUN-FSDP-ARCHITECTURE",
        "RUN-FSDP-CONTEXT",
        "RUN-FSDP-FAMILY",
        "RUN-FSDP-FIELD",
    ),
    *(
        "RUN-FSDP-LANGUAGE-MODEL",
        "RUN-IMAGES-ADAPTERS",
        "RUN-IMAGES-ATTENTION",
        "RUN-IMAGES-DEEPSTACK",
        "RUN-IMAGES-FAMILY",
        "RUN-IMAGES-MEGATRON",
        "RUN-IMAGES-PROCESSOR",
        "RUN-FSDP-PACKING",
        "RUN-FSDP-ROPE",
        "RUN-FSDP-SERVER",
        "RUN-FSDP-UNTIED",
        "RUN-MODEL-ARCHITECTURES",
        "RUN-MODEL-QUANTIZED",
    ),
    *("RUN-MTP", "RUN-MTP-UNSUPPORTED", "RUN-REPLAY-FSDP", "RUN-REWARD-MODEL-CLASS", "RUN-REWARD-MODEL-LABELS"),
    "RUN-REWARD-MODEL-TEMPLATE",
    *("RUN-REWARD-JUDGE-TOKENIZER", "RUN-REWARD-JUDGE-TEMPLATE", "RUN-REWARD-JUDGE-POSITIONS"),
    *("RUN-REWARD-MODEL-TOKENIZER", "RUN-SHARED-PROMPTS-FSDP", "RUN-SHARED-PROMPTS-LATENT"),
    *(
        "RUN-SHARED-PROMPTS-LINEAR",
        "RUN-START-MODEL",
        "RUN-TEACHER-HINT-LENGTH",
        "RUN-TEACHER-MOVES",
        "RUN-TEACHER-POSITIONS",
        "RUN-TEACHER-TOKENIZER",
        "RUN-TOKENIZER-ROLE",
        "RUN-TOKENIZER-TEMPLATE",
        "RUN-TOKENIZER-TURN-END",
    ),
    *("RUN-TOKENIZER-VOCABULARY", "RUN-WEIGHTS-EMBEDDING", "RUN-WEIGHTS-FAMILY", "RUN-WEIGHTS-INDEX"),
    *("RUN-WEIGHTS-MISMATCH", "RUN-WEIGHTS-MISSING", "RUN-WEIGHTS-TORN"),
}
NEEDS_DATA = {  # or code of a user, on disk
    *("RUN-DATASET-COLUMNS", "RUN-DATASET-EMPTY", "RUN-DATASET-FILE", "RUN-DATASET-TOKENS", "RUN-REWARD-FUNCTION"),
    *(
        "RUN-DATASET-ASSISTANT",
        "RUN-DATASET-IMAGES",
        "RUN-DATASET-IMAGES-MODEL",
        "RUN-DATASET-NULLS",
        "RUN-SANDBOX-NEEDED",
        "RUN-TEACHER-IMAGES",
        "RUN-WARM-START-ANSWER",
        "RUN-WARM-START-LENGTH",
    ),
}
NEEDS_A_RUN = {  # in its directory
    *("RUN-DIRECTORY-FILES", "RUN-DIRECTORY-TAKEN", "RUN-RESUME-BACKEND", "RUN-RESUME-CHANGED", "RUN-RESUME-DATA"),
    *("RUN-RESUME-FINISHED", "RUN-RESUME-LOST", "RUN-RESUME-NO-CHECKPOINT", "RUN-RESUME-STOPPED"),
    "RUN-RESUME-UNREADABLE",
}
NEEDS_A_MACHINE = {  # whose port is taken, whose cluster is silent, or whose process fails
    *(
        "RUN-HOST-MEMORY-TAKEN",
        "RUN-MACHINE-RAY-ANSWER",
        "RUN-MEGATRON-UNTRIED",
        "RUN-PORT-TAKEN",
        "RUN-SANDBOX-MISSING",
        "RUN-SANDBOX-START",
    ),
}
EXEMPT = NOT_OVERRIDES | NEEDS_MODELS | NEEDS_DATA | NEEDS_A_RUN | NEEDS_A_MACHINE


def codes(file: Path, overrides: list[str]) -> set[str]:
    """The codes of all findings about a run."""
    try:
        return {finding.code for finding in preflight(load(file, overrides)).findings}
    except ConfigError as error:
        return {finding.code for finding in error.findings}


@pytest.mark.parametrize("code", sorted(set(EXPLANATIONS) - EXEMPT))
def test_the_example_gives_the_code(write, code: str) -> None:
    overrides = EXPLANATIONS[code].example.replace("WORKFLOW", WORKFLOW).splitlines()
    assert code in codes(write(), overrides)


def test_only_explained_codes_are_exempt() -> None:
    assert set(EXPLANATIONS) >= EXEMPT
