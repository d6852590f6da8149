"""Names of parallel layers that transformers 5 has changed, and SGLang 0.5.17 does not know."""

from areal_like.rollout.sglang.patch import Launch, Patch


def know_new_styles() -> None:
    """Add transformers 5's names of parallel layers with whole outputs or inputs to SGLang."""
    from sglang.srt.models import transformers

    known = {"colwise_gather_output": "colwise_rep", "rowwise_split_input": "rowwise_rep"}
    normalise = transformers._normalize_tp_style
    transformers._normalize_tp_style = lambda style: normalise(known.get(style, style))


def apply(launch: Launch) -> None:
    """Correct the model where it is the served one."""
    if "GlmForCausalLM" in launch.architectures:
        know_new_styles()


PATCH = Patch(schedule=apply)
