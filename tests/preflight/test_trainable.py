"""`areal-like check --model`: which trainers support a model, and where it is served."""

import json

import pytest
from typer.testing import CliRunner

from allocation.families import TRAINED
from allocation.model_spec import from_config, known_models
from areal_like.__main__ import app
from areal_like.core.config.load import load
from areal_like.core.config.schema import InitModelConfig
from areal_like.demo.init_model import write_init_model
from areal_like.preflight import preflight
from areal_like.preflight.trainable import check_trainable

RUNNER = CliRunner()


@pytest.fixture
def tiny(tmp_path):
    """A tiny qwen3 and a function that changes fields of its config.json; None removes a field."""
    write_init_model(InitModelConfig(), tmp_path / "model", seed=0)
    file = tmp_path / "model/config.json"

    def change(**fields):
        config = json.loads(file.read_text()) | fields
        file.write_text(json.dumps({name: value for name, value in config.items() if value is not None}))
        return tmp_path / "model"

    return change


def check(*arguments):
    """Return the exit code, the standard output and the findings, on one line each."""
    result = RUNNER.invoke(app, ["check", *map(str, arguments)], env={"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": "http://["})
    return result.exit_code, result.stdout, result.stderr


def test_a_directory_that_trains_has_exit_code_0_and_every_trainer(tiny):
    code, out, err = check("--model", tiny())
    assert (code, err) == (0, "")
    assert "Megatron (mbridge): trains\nMegatron (megatron-bridge): trains\nFSDP: trains\n" in out
    assert "SGLang on CPU: yes\nSGLang on GPUs: yes" in out


def test_a_name_is_answered_without_a_network():
    code, out, _ = check("--model", "qwen3-8b", "--backend", "fsdp")
    assert code == 0
    assert "sizes from the offline table" in out
    assert "Megatron" not in out
    code, _, err = check("--model", "nobody/nothing")
    assert code == 1
    assert "neither in the offline table nor in the Hugging Face cache" in err


@pytest.mark.parametrize("name", known_models())
def test_a_known_model_trains_where_its_family_does(name):
    spec = from_config(known_models()[name])
    for backend, families in TRAINED.items():
        unproven = spec.latent_attention and (spec.family == "deepseek_v2" or not spec.q_rank)  # docs/bridges.md
        trains = spec.family in families and not (backend == "megatron" and unproven)
        assert check_trainable(name, backend).trains == trains


def test_a_model_of_another_trainer_has_exit_code_1_and_a_trainer_that_will_do(tmp_path):
    config = {"model_type": "olmo2", "architectures": ["Olmo2ForCausalLM"], "hidden_size": 64, "num_hidden_layers": 2}
    config |= {"num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 96, "vocab_size": 200}
    (tmp_path / "config.json").write_text(json.dumps(config))
    code, out, err = check("--model", tmp_path, "--backend", "megatron")
    assert code == 1
    assert "Another trainer supports the model: --backend fsdp" in out
    assert "SGLang on CPU: yes" in out
    assert "SGLang on CPU: no: " in check("--model", "deepseek-v3")[1]
    assert "RUN-BRIDGE" in err
    assert check("--model", tmp_path, "--backend", "fsdp")[0] == 0


@pytest.mark.parametrize("flat", [False, True], ids=["text_config", "as published"])
def test_a_model_of_text_and_images_is_named_with_the_trainer_and_the_servers_that_take_it(tmp_path, flat):
    text = {"model_type": "qwen2_5_vl_text", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    text |= {"num_key_value_heads": 2, "intermediate_size": 96, "vocab_size": 200}
    config = {**text} if flat else {"text_config": text}
    config |= {"model_type": "qwen2_5_vl", "architectures": ["Qwen2_5_VLForConditionalGeneration"], "vision_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "preprocessor_config.json").write_text("{}")
    code, out, err = check("--model", tmp_path, "--backend", "fsdp")
    assert (code, err.count("error[")) == (0, 0)
    assert f"{tmp_path}: qwen2_5_vl\nFSDP: trains\nSGLang on CPU: yes\n" in out
    code, out, err = check("--model", tmp_path, "--backend", "megatron")
    assert (code, err.count("RUN-IMAGES")) == (0, 1)
    assert "Megatron (megatron-bridge): trains" in out
    config["model_type"] = "gemma3"
    (tmp_path / "config.json").write_text(json.dumps({**config, "text_config": {**text, "model_type": "gemma3_text"}}))
    code, out, err = check("--model", tmp_path)
    assert code == 0 and "\nFSDP: trains\nSGLang on CPU: no: " in out
    assert "SGLang on GPUs: yes\n" in out
    code, out, err = check("--model", tmp_path, "--backend", "megatron")
    assert code == 1 and "error[RUN-IMAGES]" in err


def test_a_directory_without_weights_is_answered_with_a_note(tiny):
    directory = tiny()
    for file in directory.glob("*.safetensors"):
        file.unlink()
    code, _, err = check("--model", directory)
    assert code == 0
    assert "note[RUN-WEIGHTS]" in err


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"model_type": "qwen33", "num_key_value_heads": None}, "unknown model_type 'qwen33'; did you mean"),
        ({"num_key_value_heads": 3}, "num_key_value_heads = 3 does not divide num_attention_heads"),
        ({"num_key_value_heads": None, "num_key_value_head": 2}, "(is 'num_key_value_heads' meant?)"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings must be true or false, not 'no'"),
        ({"rope_scaling": ["yarn"], "text_config": 3}, "rope_scaling must be an object"),
        ({"layer_types": ["full_attention"]}, "layer_types must be a list of 3 kinds of layers, not 1"),
        ({"architectures": 5}, "architectures must be a list of names, not 5"),
        ({"hidden_size": 256}, "but config.json has vocab_size x hidden_size"),
    ],
)
def test_a_bad_config_is_one_error_with_field_and_fix_here_and_in_a_run(write, tiny, fields, message):
    directory = tiny(**fields)
    code, out, err = check("--model", directory)
    assert (code, out) == (1, "")
    assert message in err
    assert (err.count("error["), err.count("help: ")) == (1, 1)
    checked = preflight(load(write(), ["actor.init_model=null", f"actor.path={directory}"]))
    errors = [found for found in checked.findings if found.severity == "error"]
    assert [found.key.split(" ")[0] for found in errors] == ["actor.path"]
    assert message in errors[0].message
    assert errors[0].help


def test_a_config_that_is_not_an_object_is_one_error(tiny):
    directory = tiny()
    for text in ("[]", "{", '"text"', "null"):
        (directory / "config.json").write_text(text)
        code, out, err = check("--model", directory)
        assert (code, out, err.count("error[RUN-MODEL-CONFIG]")) == (1, "", 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "check needs the YAML file of a run, or --model"),
        (["run.yaml", "--model", "qwen3-8b"], "FILE or --model, not both"),
        (["run.yaml", "--backend", "fsdp"], "--backend needs --model"),
    ],
)
def test_arguments_that_exclude_each_other_are_refused(arguments, message):
    code, _, err = check(*arguments)
    assert code == 2
    assert message in err
