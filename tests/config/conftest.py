import textwrap

import pytest

MINIMAL = """
experiment_name: demo
trial_name: first
device: cpu
cluster: {n_gpus_per_node: 3, fileroot: FILEROOT}
train_dataset:
  path: arithmetic
  batch_size: 4
  max_prompt_length: 32
  arithmetic: {size: 16}
valid_dataset: {path: arithmetic, max_prompt_length: 32, arithmetic: {size: 4}}
gconfig: {n_samples: 2, max_new_tokens: 8}
actor:
  backend: megatron:d2
  dtype: float32
  init_model: {max_position_embeddings: 64}
rollout: {backend: "sglang:d1"}
"""


@pytest.fixture
def write(tmp_path):
    """Writes YAML to a file and returns its path; without text a run that passes every check."""

    def write(text: str = MINIMAL):
        file = tmp_path / "run.yaml"
        file.write_text(textwrap.dedent(text).replace("FILEROOT", str(tmp_path / "runs")))
        return file

    return write
