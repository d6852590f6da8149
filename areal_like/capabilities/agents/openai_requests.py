"""The fields of a chat completion's request (https://platform.openai.com/docs/api-reference/chat/create).

Fields that are neither listed here nor ignored (`ignored_fields`) are rejected by name.
"""

from collections.abc import Mapping
from functools import lru_cache
from typing import Annotated, Any, Literal

import orjson
from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, ValidationError, model_validator

from areal_like.capabilities.agents.continued_answers import find_problem
from areal_like.capabilities.agents.conversation import Message, TemplateContext, parsed_arguments
from areal_like.capabilities.agents.ignored_fields import leave_out
from areal_like.capabilities.agents.image_parts import TEXT_ALONE, TEXT_AND_IMAGES, ImageUrl, content_of, has_image
from areal_like.capabilities.agents.replies import Refused
from areal_like.capabilities.agents.session import Request, Session
from areal_like.core.config.schema import MOST_KEPT
from areal_like.core.config.section import LEAST_TEMPERATURE

_OF_THE_REQUEST = {
    *("self", "messages", "conversations", "tools", "chat_template", "add_generation_prompt"),
    *("continue_final_message", "return_assistant_tokens_mask"),
}


def _check_sampling(value: Any, asked: Any) -> Any:
    """Return a sampling setting that tokens can be trained with."""
    session, name = asked.context, asked.field_name
    own = getattr(session.sampling, name)
    if not session.trained or value in (None, own):
        return value
    if not session.limits.own_sampling:
        raise ValueError(
            f"{value!r} differs from gconfig.{name}={own:g}, with which the teacher scores; {leave_out(name)}"
        )
    if (name == "temperature" and value < LEAST_TEMPERATURE) or (name == "top_k" and value == 1):
        why = "sampling is greedy, and every log-prob is 0"
        raise ValueError(f"{value!r} cannot be trained on: {why}; {leave_out(name)}")
    return value


def _tools(value: list[Any] | None, asked: Any) -> list[Any] | None:
    if value and asked.context.parse_tools is None:
        raise ValueError("set episode.tool_call_parser to SGLang's name for the model family, such as qwen25")
    return value


def _tool_choice(value: Any) -> Any:
    if value not in (None, "auto", "none"):
        why = f"{value!r} constrains what is sampled, which cannot be trained on"
        raise ValueError(f"{why}; write auto or none, or set `episode.ignored_fields=[tool_choice]`")
    return value


def _template_arguments(value: dict[str, Any] | None) -> dict[str, Any] | None:
    if own := [name for name in value or () if name in _OF_THE_REQUEST]:
        raise ValueError(f"{own[0]} cannot be passed to the chat template: it follows from the request")
    return value


class Text(BaseModel):
    """A block of text."""

    type: Literal["text"]
    text: str


@lru_cache(maxsize=1024)  # agents send the same tools with every request
def _check_schema(text: bytes) -> None:
    from jsonschema import Draft202012Validator, SchemaError

    try:
        Draft202012Validator.check_schema(orjson.loads(text))
    except SchemaError as error:
        raise ValueError(f"is not a JSON schema: {error.json_path}: {error.message[:200]}") from error
    except RecursionError as error:
        raise ValueError("is not a JSON schema that can be checked: it is nested too deeply") from error


def _json_schema(value: dict[str, Any]) -> dict[str, Any]:
    if value.get("type", "object") != "object":
        raise ValueError(f"describes {value['type']!r}; the arguments of a tool are an object")
    _check_schema(orjson.dumps(value))
    return value


type JsonSchema = Annotated[dict[str, Any], AfterValidator(_json_schema)]
"""The schema of a tool's arguments."""


def _as_blocks(given: Any) -> Any:
    return [{"type": "text", "text": given}] if isinstance(given, str) else given


BLOCKS = BeforeValidator(_as_blocks)  # a text means one text block
type Texts = Annotated[list[Text], BLOCKS]


class _Function(BaseModel):
    name: str


class _Called(_Function):
    arguments: str = "{}"


class _ToolCall(BaseModel):
    function: _Called


type _Part = Annotated[Text | ImageUrl, Field(discriminator="type")]


class _Message(BaseModel):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[list[_Part], BLOCKS] | None = None
    tool_calls: list[_ToolCall] | None = None

    @model_validator(mode="after")
    def _check(self) -> "_Message":
        if self.role not in ("user", "tool") and has_image(self.content):
            raise ValueError(f"has an image from the {self.role}: only users and tools can show images")
        return self


class Defined(BaseModel):
    """The definition of a function."""

    name: Annotated[str, Field(min_length=1)]
    description: str | None = None
    parameters: JsonSchema | None = None


class _Tool(BaseModel):
    type: Literal["function"]
    function: Defined


_SAMPLED = AfterValidator(_check_sampling)
_Flag = Annotated[bool | None, Field(strict=True)]
Count = Annotated[int | None, Field(strict=True, gt=0)]
StopText = Annotated[str, Field(min_length=1)]


class _Fields(BaseModel, extra="forbid"):
    messages: Annotated[list[_Message], Field(min_length=1)]
    continue_final_message: Annotated[bool, Field(strict=True)] = False  # of SGLang and vLLM
    model: Any = None
    stream_options: Any = None
    max_tokens: Count = None
    max_completion_tokens: Count = None
    temperature: Annotated[float | None, Field(strict=True, ge=0, allow_inf_nan=False), _SAMPLED] = None
    top_p: Annotated[float | None, Field(strict=True, gt=0, le=1), _SAMPLED] = None
    top_k: Annotated[int | None, Field(strict=True, ge=-1, le=MOST_KEPT), _SAMPLED] = None
    stop: Annotated[list[StopText], BeforeValidator(lambda stop: [stop] if isinstance(stop, str) else stop)] = []
    tools: Annotated[list[_Tool] | None, AfterValidator(_tools)] = None
    tool_choice: Annotated[Any, AfterValidator(_tool_choice)] = None
    logprobs: _Flag = None
    stream: _Flag = None
    reasoning_effort: Any = None
    chat_template_kwargs: Annotated[dict[str, Any] | None, AfterValidator(_template_arguments)] = None


class OtherFields(BaseModel, extra="forbid"):
    """The fields of another API's request. Chat completions have the fields of type Any, too, and check them."""

    model: Any = None
    temperature: Any = None
    top_p: Any = None
    top_k: Any = None
    stream: Any = None
    chat_template_kwargs: Any = None

    def get_shared(self) -> dict[str, Any]:
        """Return the given fields of type Any."""
        fields = type(self).model_fields
        return {name: getattr(self, name) for name in self.model_fields_set if fields[name].annotation is Any}


def read_request(fields: Mapping[str, Any], session: Session) -> Request:
    """Return the request of a body; raise Refused for untrainable or unknown fields."""
    asked = check_fields(_Fields, fields, session)
    tools = None if asked.tool_choice == "none" else fields.get("tools") or None
    messages = [_message(*pair) for pair in zip(fields["messages"], asked.messages, strict=True)]
    if problem := find_problem(messages, asked.continue_final_message):
        raise Refused(problem, "messages")
    # as SGLang and vLLM do: a variable of the template, which few templates read
    effort = {} if asked.reasoning_effort is None else {"reasoning_effort": asked.reasoning_effort}
    context = TemplateContext(tools, effort | (asked.chat_template_kwargs or {}))
    most = asked.max_completion_tokens or asked.max_tokens
    return Request(messages, context, most, tuple(asked.stop), asked.temperature, asked.top_p, asked.top_k)


def check_fields[M: BaseModel](model: type[M], fields: Mapping[str, Any], session: Session | None = None) -> M:
    """Return a request's fields as their model; raise Refused, which names the place of the first problem."""
    try:
        return model.model_validate(fields, context=session)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        # as texts: an error in a local variable and its frames would be a cycle
        context = {name: str(value) for name, value in problem.pop("ctx", {}).items()}
    where, kind = _spell(problem["loc"]), problem["type"]
    if kind == "extra_forbidden":
        fix = "leave it out" if "[" in where else leave_out(where)
        raise Refused(f"{where} is not supported: {fix}", where, "unsupported_parameter")
    if kind == "union_tag_invalid":
        allowed = TEXT_AND_IMAGES if session is not None and session.tokenizer.vision else TEXT_ALONE
        raise Refused(f"{where} is {context['tag']}: {allowed}", where)
    if kind == "literal_error" and context["expected"] == "'text'":
        where = where.removesuffix(".type")
        raise Refused(f"{where} is {problem['input']}: {TEXT_ALONE}", where)
    if kind == "value_error" and context["error"] == TEXT_ALONE:  # for an image, whose type is the last part
        where, _, tag = where.rpartition(".")
        raise Refused(f"{where} is {tag}: {TEXT_ALONE}", where)
    if kind == "value_error":
        raise Refused(f"{where}: {context['error']}", where)
    words = "Input should be an object" if kind in ("model_type", "dict_type") else problem["msg"]
    raise Refused(f"{where}: {words}", where, "invalid_value")


def _spell(place: Any) -> str:
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place).removeprefix(".")


def _message(given: Mapping[str, Any], asked: _Message) -> Message:
    """Return a message for chat templates, with the arguments of its tool calls as objects."""
    kept = {name: value for name, value in given.items() if value is not None}
    kept["role"] = "system" if asked.role == "developer" else asked.role
    kept["content"] = content_of(asked.content or [])
    if asked.tool_calls is not None:
        functions = [
            {"name": call.function.name, "arguments": parsed_arguments(call.function.arguments)}
            for call in asked.tool_calls
        ]
        kept["tool_calls"] = [
            {**call, "function": function} for call, function in zip(kept["tool_calls"], functions, strict=True)
        ]
    return kept
