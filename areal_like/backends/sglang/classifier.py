"""SGLang's scheduler process for sequence classifiers, which score and do not generate."""

from importlib import import_module
from typing import Any

# SGLang 0.5.17 gives their heads a bias, which transformers' have not, and draws it at random where it is not loaded
_WITH_BIAS = {
    "qwen2_classification": "Qwen2ForSequenceClassification",
    "qwen3_classification": "Qwen3ForSequenceClassification",
}
CLASSES = ("LlamaForSequenceClassification", "Gemma2ForSequenceClassification", *_WITH_BIAS.values())
"""The architectures whose scores are transformers' own, as `config.json` names them."""


def run_scheduler(*arguments: Any, **options: Any) -> None:
    """Run SGLang's scheduler process with changed classes, for `launch_server(run_scheduler_process_func=...)`."""
    from sglang.srt.managers.scheduler import run_scheduler_process

    for module, name in _WITH_BIAS.items():
        _without_made_up_bias(getattr(import_module(f"sglang.srt.models.{module}"), name))
    run_scheduler_process(*arguments, **options)


def _without_made_up_bias(model: Any) -> None:
    import torch

    make = model.__init__

    def make_without(self: Any, *arguments: Any, **options: Any) -> None:
        make(self, *arguments, **options)
        torch.nn.init.zeros_(self.score.bias)

    model.__init__ = make_without
