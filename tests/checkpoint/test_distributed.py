"""What a checkpoint's pickled description may name."""

from __future__ import annotations

import io
import pickle

import pytest

from areal_like.backends.megatron.distributed import _Reader


def pickled(module: str, name: str) -> bytes:
    """A call of what is named, without arguments, as protocol 4 writes it."""
    parts = b"".join(b"\x8c" + bytes([len(text)]) + text.encode() for text in (module, name))
    return b"\x80\x04" + parts + b"\x93)R."


@pytest.mark.parametrize(
    ("module", "name"),
    [("torch.distributed.checkpoint.filesystem", "os.getcwd"), ("os", "getcwd"), ("torch", "os.getcwd")],
)
def test_a_name_that_leads_elsewhere_is_refused(module, name):
    with pytest.raises(pickle.UnpicklingError, match="getcwd"):
        _Reader(io.BytesIO(pickled(module, name))).load()
