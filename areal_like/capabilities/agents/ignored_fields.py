"""Fields of requests that are ignored: inert ones, and the fields named in `episode.ignored_fields`.

Clients send many fields that do not change the tokens of an answer, and the defaults of hosted and local servers. They
are ignored in all three APIs, so that agents train as they are. Every other unknown field is rejected by name.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from areal_like.capabilities.agents.replies import Refused

SHIFTED = "the log-probs would not match the distribution that tokens are sampled from"
_ENDS = "a response ends as the run's responses do"
_PROMPT = "the prompt is the conversation as the chat template renders it"
_ANSWER = "an answer has its text, its tool calls and the log-probs of its tokens"

# Fields that do not change the answer, with any value.
INERT = frozenset(
    {
        # accounts and abuse
        *("user", "metadata", "safety_identifier", "user_profile_id", "workspace_id", "billing_policy", "diagnostics"),
        # caches, storage and priority
        *("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "cache_control", "cache_salt"),
        *("extra_key", "store", "service_tier", "inference_geo", "speed", "priority", "prediction"),
        *("request_id", "rid", "session_id", "data_parallel_rank", "routed_dp_rank"),
        # versions of an API
        *("betas", "anthropic_beta", "anthropic_version"),
        # a response has the calls and the thinking that the model writes
        *("parallel_tool_calls", "max_tool_calls", "separate_reasoning", "stream_reasoning", "include_reasoning"),
    }
)

# Fields whose default does not change the answer, and why another value cannot be trained on.
DEFAULTS: Mapping[str, tuple[Any, str]] = {
    "n": (1, "a request generates one message; send several requests"),
    "best_of": (1, "a request generates one message; send several requests"),
    **dict.fromkeys(("min_p", "frequency_penalty", "presence_penalty"), (0, SHIFTED)),
    **dict.fromkeys(("repetition_penalty", "length_penalty"), (1, SHIFTED)),
    **dict.fromkeys(("use_beam_search", "early_stopping"), (False, SHIFTED)),
    **dict.fromkeys(("logit_bias", "bad_words", "logits_processors", "custom_params"), ({}, SHIFTED)),
    "response_format": ({"type": "text"}, SHIFTED),
    **dict.fromkeys(("ignore_eos", "include_stop_str_in_output", "no_stop_trim"), (False, _ENDS)),
    "min_tokens": (0, _ENDS),
    "stop_token_ids": ([], _ENDS),
    "add_generation_prompt": (True, _PROMPT),
    **dict.fromkeys(("add_special_tokens", "echo", "use_audio_in_video"), (False, _PROMPT)),
    **dict.fromkeys(("documents", "functions", "mcp_servers"), ([], _PROMPT)),
    "truncation": ("disabled", _PROMPT),
    "context_management": ({"edits": []}, "the run does not edit conversations"),
    "modalities": (["text"], "the run generates text"),
    **dict.fromkeys(("skip_special_tokens", "spaces_between_special_tokens"), (True, _ANSWER)),
    **dict.fromkeys(
        ("return_hidden_states", "return_routed_experts", "return_cached_tokens_details"), (False, _ANSWER)
    ),
    **dict.fromkeys(("return_prompt_token_ids", "return_token_ids", "return_meta_info"), (False, _ANSWER)),
    "return_tokens_as_token_ids": (False, _ANSWER),
    "routed_experts_start_len": (0, _ANSWER),
    **dict.fromkeys(("top_logprobs", "prompt_logprobs"), (0, "the servers return only the sampled token's log-prob")),
    "background": (False, "an answer is generated while the client waits"),
}


def without_ignored(fields: Mapping[str, Any], ignored: Sequence[str]) -> dict[str, Any]:
    """Return the fields of a request without the ones in `episode.ignored_fields`; `a.b` is the field `b` in `a`."""
    kept = dict(fields)
    for name in ignored:
        first, _, rest = name.partition(".")
        if not rest:
            kept.pop(first, None)
        elif isinstance(kept.get(first), dict):
            kept[first] = without_ignored(kept[first], [rest])
    return kept


def without_inert(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that an answer depends on; raise Refused for a value that cannot be trained on."""
    kept = {}
    for name, value in fields.items():
        if value is None or name in INERT:
            continue
        if name in DEFAULTS:
            check_default(name, value, *DEFAULTS[name])
        else:
            kept[name] = value
    return kept


def check_default(name: str, value: Any, default: Any, why: str) -> None:
    """Raise Refused for a value of a field that is neither its default nor empty."""
    if value not in (None, default, [], {}):
        raise Refused(f"{name}: {value!r} cannot be trained on: {why}; {leave_out(name)}", name)


def leave_out(name: str) -> str:
    """Return the fix for a field that is rejected."""
    return f"leave it out, or set `episode.ignored_fields=[{name}]`"
