"""Corrections of SGLang 0.5.17 where it computes a model differently from transformers."""

from collections.abc import Callable, Collection
from functools import wraps
from typing import Any

from areal_like.backends.sglang import image_masks
from areal_like.backends.sglang.expert_adapters import measure_feed_forward


def run_corrected(architectures: Collection[str], run: Callable[..., None], server: Any, *others: Any) -> None:
    """Run a scheduler process with the corrections: a spawned one has nothing that the launcher's has changed."""
    if server.device == "cuda":
        complete_windows()
    if "Gemma3ForConditionalGeneration" in architectures:
        activate_towers_as_configured()
        if server.device == "cuda":
            image_masks.see_whole_images()
    if "Exaone4ForCausalLM" in architectures:
        read_epsilon()
    if "GlmForCausalLM" in architectures:
        know_new_styles()
    if server.enable_lora:
        measure_feed_forward()
    run(server, *others)


def complete_windows() -> None:
    """Include the oldest token of a sliding window when Triton attention decodes, as in a prefill.

    A model's `sliding_window_size` is the number of tokens before the current one. Buffers of decoding steps hold so
    many tokens, the current one included (https://github.com/sgl-project/sglang/pull/32087).
    """
    from sglang.srt.layers.attention.triton_backend import TritonAttnBackend

    for name in ("init_cuda_graph_state", "_update_decode_kv_buffers"):
        setattr(TritonAttnBackend, name, _with_current_token(getattr(TritonAttnBackend, name)))
    for name in ("init_forward_metadata", "_translate_cuda_graph_shared_pool_locs"):
        setattr(TritonAttnBackend, name, _with_current_token(getattr(TritonAttnBackend, name), _decodes))


def _decodes(batch: Any, *_: Any, **__: Any) -> bool:
    decodes: bool = batch.forward_mode.is_decode_or_idle()
    return decodes


def _with_current_token(method: Callable[..., Any], applies: Callable[..., bool] | None = None) -> Callable[..., Any]:
    """Return a method that finds a window of one token more in its attention backend, where that applies."""

    @wraps(method)
    def call_with_current_token(self: Any, *arguments: Any, **named: Any) -> Any:
        before = self.sliding_window_size
        if before is None or before <= 0 or (applies and not applies(*arguments, **named)):
            return method(self, *arguments, **named)
        self.sliding_window_size = before + 1
        try:
            return method(self, *arguments, **named)
        finally:
            self.sliding_window_size = before

    return call_with_current_token


def activate_towers_as_configured() -> None:
    """Use the activation in the config of gemma3's vision tower: SGLang computes a coarser GELU for all."""
    from sglang.srt.models import siglip
    from transformers.activations import ACT2FN

    build = siglip.SiglipMLP.__init__

    def build_as_configured(self: Any, config: Any, *arguments: Any, **named: Any) -> None:
        build(self, config, *arguments, **named)
        self.act = ACT2FN[config.hidden_act]

    siglip.SiglipMLP.__init__ = build_as_configured


def read_epsilon() -> None:
    """Normalise exaone4's queries and keys with the epsilon of its config: SGLang takes 1e-6."""
    from sglang.srt.models.exaone4 import Exaone4Attention

    build = Exaone4Attention.__init__

    def build_as_configured(self: Any, config: Any, **named: Any) -> None:
        build(self, config, **{"rms_norm_eps": config.rms_norm_eps, **named})

    Exaone4Attention.__init__ = build_as_configured


def know_new_styles() -> None:
    """Add transformers 5's names of parallel layers with whole outputs or inputs to SGLang."""
    from sglang.srt.models import transformers

    known = {"colwise_gather_output": "colwise_rep", "rowwise_split_input": "rowwise_rep"}
    normalise = transformers._normalize_tp_style
    transformers._normalize_tp_style = lambda style: normalise(known.get(style, style))
