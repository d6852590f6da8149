"""Tests of the random generators of trainer ranks."""

import torch
from megatron.core import parallel_state, tensor_parallel

from allocation import ParallelSizes
from areal_like.backends.megatron import parallel
from areal_like.core.trainer.engine import Rendezvous


def test_the_hosts_generator_has_the_runs_seed(monkeypatch):
    """On a GPU, Megatron seeds the GPU's generator alone; a replay compares the host's seed with the run's."""
    monkeypatch.setattr(parallel, "join", lambda *arguments: None)
    monkeypatch.setattr(parallel_state, "initialize_model_parallel", lambda **options: None)
    monkeypatch.setattr(tensor_parallel, "model_parallel_cuda_manual_seed", lambda *arguments, **options: None)
    torch.seed()
    parallel.initialize(Rendezvous(0, 1, "127.0.0.1", 1, 1.0), ParallelSizes(), torch.device("cpu"), seed=7)
    assert torch.initial_seed() == 7
