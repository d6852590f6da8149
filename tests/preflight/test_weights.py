import json
import shutil

import pytest

from allocation.model_spec import load_model
from areal_like.backends.training.hf_checkpoint import copy_descriptions
from areal_like.core.config.findings import ConfigError
from areal_like.core.config.load import load
from areal_like.core.config.schema import InitModelConfig
from areal_like.demo.init_model import write_init_model
from areal_like.preflight import preflight
from areal_like.preflight.weights import check_weights


@pytest.fixture
def model(tmp_path):
    write_init_model(InitModelConfig(num_hidden_layers=2), tmp_path / "model", seed=0)
    return tmp_path / "model"


def edit(model, **changes):
    file = model / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def problem(model):
    with pytest.raises(ConfigError) as raised:
        check_weights(model, load_model(model))
    return raised.value.findings[0].message


def test_a_whole_model_passes(model):
    check_weights(model, load_model(model))


@pytest.mark.parametrize("size", [0, 4, 1000, -1])
def test_a_torn_file_is_named(model, size):
    file = model / "model.safetensors"
    file.write_bytes(file.read_bytes()[:size])
    assert f"{file} is truncated" in problem(model)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"hidden_size": 64},
            "model.embed_tokens.weight is 50 x 128, but config.json has vocab_size x hidden_size = 50 x 64",
        ),
        ({"vocab_size": 56}, "= 56 x 128"),
        ({"num_hidden_layers": 3}, "the weights have 2 layers, but config.json has num_hidden_layers = 3"),
        ({"num_hidden_layers": 1}, "num_hidden_layers = 1"),
    ],
)
def test_another_models_config_is_refused(model, changes, words):
    edit(model, **changes)
    assert words in problem(model)


def test_layers_that_predict_further_tokens_may_be_there(model):
    edit(model, num_hidden_layers=1, num_nextn_predict_layers=1)
    check_weights(model, load_model(model))


def test_layers_that_predict_further_tokens_are_said_to_be_left_out(write, model, tmp_path):
    edit(model, num_hidden_layers=1, num_nextn_predict_layers=1)
    checked = preflight(load(write(), [f"actor.path={model}"]))
    assert checked.ok
    (found,) = checked.findings
    assert found.code == "RUN-MTP" and "multi-token prediction (1) are ignored" in found.message
    (tmp_path / "saved").mkdir()
    copy_descriptions(model, model, tmp_path / "saved", "float32")
    assert json.loads((tmp_path / "saved/config.json").read_text())["num_nextn_predict_layers"] == 0
    assert load_model(tmp_path / "saved").mtp_layers == 0


def test_only_the_files_of_the_index_count(model):
    file = model / "model.safetensors"
    shutil.copy(file, model / "first.safetensors")
    file.write_bytes(b"")
    (model / "model.safetensors.index.json").write_text('{"weight_map": {"a": "first.safetensors"}}')
    check_weights(model, load_model(model))


def test_weights_without_an_embedding_are_no_whole_model(model):
    file = model / "model.safetensors"
    file.write_bytes(file.read_bytes().replace(b"model.embed_tokens.weight", b"model.embed_somehow.weigh"))
    assert "no embed_tokens.weight" in problem(model)


def test_a_run_of_torn_weights_does_not_start(write, model):
    assert preflight(load(write(), [f"actor.path={model}"])).ok
    (model / "model.safetensors").write_bytes(b"x" * 1000)
    (finding,) = preflight(load(write(), [f"actor.path={model}"])).findings
    assert (finding.code, finding.where) == ("RUN-WEIGHTS", "actor.path (command line)")
    assert finding.help == "copy or download it again"
