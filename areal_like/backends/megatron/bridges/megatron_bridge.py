"""Megatron Bridge (https://github.com/NVIDIA-NeMo/Megatron-Bridge) behind the Bridge protocol."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import logging
import os
import re
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import megatron.core.models.gpt  # noqa: F401  # before the placeholder: it settles whether Transformer Engine is there
import torch
import torch.nn.functional as F
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.process_groups_config import ProcessGroupCollection
from safetensors import safe_open
from torch import Tensor

from areal_like.backends.fsdp.checkpoint_names import PACKED_EXPERTS
from areal_like.backends.megatron.bridges.chunks import build_chunks
from areal_like.backends.megatron.bridges.own_layers import OWN_LAYERS
from areal_like.backends.megatron.bridges.packed_experts import find_packed, part_of, unpacked_names
from areal_like.backends.megatron.bridges.protocol import ModelSource
from areal_like.backends.megatron.options import layout_options

_NAME = "transformer_engine"


@contextlib.contextmanager
def placeholder_transformer_engine() -> Iterator[None]:
    """Provide placeholders for `import transformer_engine` in the body, unless the library is installed.

    Their classes can be named, subclassed and annotated with, but not instantiated. Import megatron.core first: it
    asks whether the library is there, and needs the true answer.
    """
    if importlib.util.find_spec(_NAME) is not None:
        yield
        return
    finder = _Finder()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name, module in sys.modules.items() if isinstance(module, _Placeholder)]:
            del sys.modules[name]


@contextlib.contextmanager
def root_logging_kept() -> Iterator[None]:
    """Undo an import's changes of the root logger (Megatron's training package gives it a handler and a level)."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    logging.disable(logging.INFO)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)
        root.handlers[:] = handlers
        root.setLevel(level)


class _Placeholder(ModuleType):
    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []
        self.__version__ = "0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if name[0].isupper():
            value: Any = type(name, (_NotInstalled,), {})
        else:
            value = importlib.import_module(f"{self.__name__}.{name}")
        setattr(self, name, value)
        return value


class _NotInstalled:
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise ModuleNotFoundError(f"{type(self).__name__} needs Transformer Engine, which is not installed", name=_NAME)


class _Finder(MetaPathFinder, Loader):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(fullname, self, is_package=True) if fullname.split(".")[0] == _NAME else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Placeholder(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: a placeholder has nothing to run."""


with placeholder_transformer_engine(), root_logging_kept():
    from megatron.bridge import AutoBridge
    from megatron.bridge.models.gpt_provider import GPTModelProvider
    from megatron.bridge.models.hf_pretrained.causal_lm import PreTrainedCausalLM
    from megatron.bridge.models.hf_pretrained.state import SafeTensorsStateSource, StateDict, StateSource

_VOCABULARY_WEIGHTS = ("model.embed_tokens.weight", "lm_head.weight")
# It copies them into GLM-4.7-Flash's layer for multi-token prediction, also where the model has no such layer
_COPIED_VOCABULARY = re.compile(r"model\.layers\.\d+\.(?:embed_tokens|shared_head\.head)\.weight")


# A tensor of a language model in a checkpoint of text and images
_LANGUAGE = re.compile(r"(?:model\.)?language_model\.(?:model\.)?|model\.(?!visual\.)")


class LanguageTensors(StateSource):
    """The tensors of the language model in a checkpoint of text and images, named as in one of text alone.

    With a number of `experts`, each of them is a tensor, not packed with the others.
    """

    def __init__(self, path: str, experts: int = 0) -> None:
        self._files = SafeTensorsStateSource(path)
        names = {_LANGUAGE.sub("model.", stored, count=1): stored for stored in self._files.get_all_keys()}
        self._stored = {name: stored for name, stored in names.items() if name.startswith(("model.", "lm_head."))}
        for packed in [name for name in self._stored if experts and name.endswith(PACKED_EXPERTS)]:
            self._stored |= dict.fromkeys(unpacked_names(packed, experts), self._stored.pop(packed))

    def get_all_keys(self) -> list[str]:
        return sorted(self._stored)

    def load_tensors(self, keys: list[str]) -> dict[str, Tensor]:
        loaded = {key: self._load_expert(key) for key in keys if self._is_packed(key)}
        whole = self._files.load_tensors([self._stored[key] for key in keys if key not in loaded])
        return {key: loaded[key] if key in loaded else whole[self._stored[key]] for key in keys}

    def _is_packed(self, key: str) -> bool:
        return find_packed(key) is not None and self._stored[key].endswith(PACKED_EXPERTS)

    def _load_expert(self, key: str) -> Tensor:
        """Read the matrix of one expert from the tensor of all."""
        _, number, part = find_packed(key) or ("", 0, "")
        stored = self._stored[key]
        with safe_open(self._files.path / self._files.key_to_filename_map[stored], "pt") as tensors:
            return part_of(tensors.get_slice(stored)[number], part).T


class LanguageCheckpoint(PreTrainedCausalLM):
    """A checkpoint of text and images that a bridge reads as one of text alone."""

    @property
    def state(self) -> StateDict:
        packed = self.config.model_type == "qwen3_moe"
        return StateDict(LanguageTensors(str(self.model_name_or_path), self.config.num_experts if packed else 0))


class MegatronBridge:
    """Builds, loads and exports models of the families that Megatron Bridge registers."""

    def __init__(self, source: ModelSource) -> None:
        self._source = source
        config = source.config.for_bridge
        if any(source.path.glob("*.safetensors")):
            self._bridge = AutoBridge.from_hf_pretrained(str(source.path), torch_dtype=source.dtype)
            self._bridge.hf_pretrained.config = config
            self._open_language(source.path)
        else:  # weights come from elsewhere
            self._bridge = AutoBridge.from_hf_config(config)
        self._provider = self._configure()

    def build(self) -> list[torch.nn.Module]:
        self._provider._pg_collection = ProcessGroupCollection.use_mpu_process_groups()
        config = self._source.config
        own = OWN_LAYERS.get(config.for_bridge.model_type)
        if own is None:
            return build_chunks(self._provider.provide, self._source)
        self._provider.transformer_layer_spec = own.spec
        chunks = build_chunks(partial(GPTModelProvider.provide, self._provider), self._source)
        for chunk in chunks:
            own.finish(chunk, config)
        return chunks

    def load(self, models: list[torch.nn.Module], path: Path) -> None:
        other = None if self._open_language(path) or path == self._source.path else str(path)
        with open(os.devnull, "w") as null, contextlib.redirect_stdout(null):  # it draws a progress bar
            self._bridge.load_hf_weights(models, other)

    def export(self, models: list[torch.nn.Module]) -> Iterator[tuple[str, Tensor]]:
        config = self._source.config.for_bridge
        for name, weight in self._bridge.export_hf_weights(models, show_progress=False):
            tied = config.tie_word_embeddings and name == "lm_head.weight"  # it copies the embedding if asked
            if not tied and not _COPIED_VOCABULARY.fullmatch(name):
                yield name, weight[: config.vocab_size] if name in _VOCABULARY_WEIGHTS else weight

    def _open_language(self, path: Path) -> bool:
        """Make a checkpoint the one that is read, if the model has images; return whether it has."""
        config = self._source.config
        if config.axes is not None:
            self._bridge.hf_pretrained = LanguageCheckpoint.from_pretrained(str(path))
            self._bridge.hf_pretrained.config = config.for_bridge
        return config.axes is not None

    def _configure(self) -> GPTModelProvider:
        """Return a provider with the layers, sizes and types that mbridge reads from the config by itself."""
        provider = self._bridge.to_megatron_provider(load_weights=False)
        source = self._source
        settings = {
            **layout_options(source.sizes, source.dtype),
            "make_vocab_size_divisible_by": 1,
            "should_pad_vocab": True,
            "perform_initialization": False,
            **source.options,
        }
        for name, value in settings.items():
            setattr(provider, name, value)
        if provider.activation_func not in (F.gelu, F.silu, quick_gelu):  # the only ones that Megatron-core fuses
            provider.bias_activation_fusion = False
        provider.finalize()
        return provider
