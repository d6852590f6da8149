"""Backends and roles of engines: their dimensions, default roles and order."""

from __future__ import annotations

from dataclasses import dataclass

TRAINER = "trainer"
SERVER = "server"


@dataclass(frozen=True, slots=True)
class Backend:
    """Software that runs an engine: `letters` are its dimensions, `folds` whether it supports `(attn:…|ffn:…)`."""

    name: str
    kind: str
    letters: str
    folds: bool = False


_BACKENDS = (
    Backend("megatron", TRAINER, "dptcev", folds=True),
    Backend("fsdp", TRAINER, "dtc"),
    Backend("sglang", SERVER, "dtpe"),
    Backend("vllm", SERVER, "dtp"),
)
BACKENDS = {backend.name: backend for backend in _BACKENDS}
UNKNOWN_BACKEND = Backend("", TRAINER, "dptcev", folds=True)
SIZE_OF = {
    "attn": {"d": "dp", "t": "tp", "p": "pp", "c": "cp", "e": "ep", "v": "vpp"},
    "ffn": {"d": "ffn_dp", "t": "etp", "p": "ffn_pp", "e": "ep"},
}
DEFAULT_ROLE = {TRAINER: "actor", SERVER: "rollout"}
ROLE_ORDER = ("rollout", "actor", "critic", "ref")
