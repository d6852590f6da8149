import subprocess
import sys

import pytest
from pydantic import ValidationError

from areal_like.core.config.keys import all_keys, annotation_of, section_of
from areal_like.core.config.schema import RunConfig, Section


def sections(section=RunConfig):
    yield section
    for field in section.model_fields.values():
        inner = section_of(field.annotation)
        if inner is not None:
            yield from sections(inner)


@pytest.mark.parametrize("section", {s.__name__: s for s in sections()}.values(), ids=lambda s: s.__name__)
def test_every_field_says_what_it_is(section):
    assert issubclass(section, Section)
    assert section.__doc__
    for name, field in section.model_fields.items():
        assert field.description, name
        assert field.description.endswith("."), name


def test_every_key_has_a_type():
    assert all(annotation_of(key) is not None for key in all_keys())
    assert annotation_of("actor.nothing") is None
    assert annotation_of("seed.nothing") is None
    assert annotation_of("sglang.extra_args.anything") is not None


def test_a_configuration_does_not_change():
    config = RunConfig.model_validate({"experiment_name": "a", "train_dataset": {"path": "b"}, "actor": {"path": "c"}})
    with pytest.raises(ValidationError):
        config.seed = 3


def test_neither_configuration_nor_checks_import_torch():
    code = "import sys, areal_like.preflight; assert not {'torch', 'transformers', 'ray'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
