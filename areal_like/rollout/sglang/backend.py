"""SGLang as a backend of servers."""

from areal_like.rollout.backends import ServerBackend
from areal_like.rollout.sglang.architectures import CLASSES, ON_GPUS_ALONE, served_architectures
from areal_like.rollout.sglang.checks import check_section
from areal_like.rollout.sglang.decode_graphs import most_captured
from areal_like.rollout.sglang.options import (
    cached_tokens_on_cpu,
    scorer_arguments,
    server_arguments,
    tool_call_parsers,
)
from areal_like.rollout.sglang.process import SGLangServer
from areal_like.rollout.sglang.server import SGLangClient
from areal_like.rollout.sglang.tool_calls import CALL_STARTS

BACKEND = ServerBackend(
    connect=SGLangClient,
    actor=SGLangServer,
    arguments=server_arguments,
    scorer_arguments=scorer_arguments,
    letters="dtpe",
    check=check_section,
    architectures=served_architectures,
    classifiers=CLASSES,
    on_gpus_alone=ON_GPUS_ALONE,
    cached_tokens_on_cpu=cached_tokens_on_cpu,
    tool_call_parsers=tool_call_parsers,
    call_starts=CALL_STARTS,
    most_captured=most_captured,
)
