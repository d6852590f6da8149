"""The example of an explained RUN- or CONFIG- code gives a finding with that code."""

from __future__ import annotations

from pathlib import Path

import pytest

from areal_like.codes import by_subject
from areal_like.core.config.findings import ConfigError
from areal_like.core.config.load import load
from areal_like.preflight import preflight

WORKFLOW = f"{Path(__file__).parents[2]}/examples/workflows/calculator.py:run"
EXPLANATIONS = {code: entry for entries in by_subject().values() for code, entry in entries.items()}
NOT_OVERRIDES = {"CONFIG-FILE"}
# Of these kinds, on disk
NEEDS_MODELS = {"RUN-IMAGES", "RUN-MODEL-ARCHITECTURES", "RUN-MODEL-QUANTIZED", "RUN-MTP", "RUN-TEACHER-MOVES"}
NEEDS_MODELS |= {"RUN-WEIGHTS", "RUN-WINDOW-SERVER", "RUN-FP8-FAMILY"}
NEEDS_DATA = {"RUN-DATASET-IMAGES", "RUN-WARM-START"}  # or code of a user, on disk
NEEDS_A_RUN = {"RUN-RESUME-CHANGED", "RUN-RESUME-CHECKPOINT", "RUN-RESUME-ENDED"}  # in its directory
NEEDS_A_MACHINE = {"RUN-HOST-MEMORY-TAKEN", "RUN-FP8-GPU"}  # in use, or with a GPU
NEEDS_A_MACHINE |= {"RUN-OPENTELEMETRY", "RUN-PROMETHEUS-ADDRESS"}  # without a package, or with a port in use
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
