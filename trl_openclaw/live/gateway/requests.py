"""Requests to `/v1/chat/completions`: which fields count, and a clear no to everything else."""

import json
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal, NoReturn

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from ...types import finite_float, is_parts, message_text, valid_text
from .api_errors import ApiError, field_name

LABELS = ("user", "metadata", "safety_identifier", "prompt_cache_key")
"""Fields that say something about a request and change nothing in its reply. They are accepted and not kept."""

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "parallel_tool_calls": (True,),
    "response_format": ({"type": "text"},),
    "store": (False,),
    "service_tier": ("auto", "default"),
    "modalities": (["text"],),
    "functions": ([],),
    "tools": ([],),
}
"""Values that ask for nothing, of fields that mostly cannot be honoured."""

_NO: dict[str, str] = {
    "n": "one reply per request is all there is (n=1)",
    "logprobs": "log-probs are recorded with the turn, not returned",
    "functions": "use `tools`",
    "function_call": "use `tool_choice`",
}

_IN_PARTS, _IN_TOOLS = {"type", "text"}, {"type", "function"}
_IN_FUNCTIONS = {"name", "description", "parameters", "strict"}
_EMPTY_IN_MESSAGES = ("refusal", "annotations", "audio", "function_call", "tool_calls")
_MAX_STOPS = 4
_NOT_OF_TEMPLATES = {
    "conversation", "messages", "tools", "documents", "chat_template", "add_generation_prompt",
    "continue_final_message", "tokenize", "sanitize_control_tokens", "padding", "truncation", "max_length",
    "return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs",
}  # fmt: skip
_LIMIT = 2**63


class Message(BaseModel):
    """One message. Contents are text; parts of text are joined."""

    model_config = ConfigDict(extra="forbid", strict=True)

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Any = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None

    @field_validator("content")
    @classmethod
    def _text(cls, content: Any) -> Any:
        if content is None or isinstance(content, str):
            return content
        if not is_parts(content):
            raise ValueError("content is a text, or a list of parts with their types")
        for part in content:
            if part["type"] != "text":
                raise ValueError(f"this model reads text only, so a part of type {str(part['type'])!r} is refused")
            if unknown := _unknown(part, _IN_PARTS):
                raise ValueError(f"this gateway does not support {unknown!r} in a part of text")
        return content

    @model_validator(mode="after")
    def _says_something(self) -> "Message":
        if self.content is None and self.role != "assistant":
            raise ValueError(f"a message of the {self.role} has a content")
        return self

    @field_validator("tool_calls")
    @classmethod
    def _calls(cls, calls: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
        for call in calls or ():
            function = call.get("function")
            if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
                raise ValueError("a tool call has a `function` with a `name`")
            if not isinstance(function.get("arguments", ""), str):
                raise ValueError("the arguments of a tool call are JSON as text")
        return calls


class StreamOptions(BaseModel):
    """What to send besides the pieces of a reply."""

    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool | None = False
    include_obfuscation: Literal[False] | None = None


class ChatRequest(BaseModel):
    """A request that can be honoured as it stands. See `parse_chat`."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    model: str
    messages: Annotated[list[Message], Field(min_length=1)]
    stream: bool = False
    stream_options: StreamOptions | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    seed: Annotated[int, Field(ge=-_LIMIT, lt=_LIMIT)] | None = None
    stop: str | list[str] | None = None
    response_format: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, str | bool | int | float] | None = None

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with what it cost."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def said(self) -> list[dict[str, Any]]:
        """The messages for engine and store, as every template can read them: each content is one text, and a
        developer's message the system's, since many templates pass over roles that they do not know.
        """
        return [
            {
                **message.model_dump(exclude_none=True),
                "role": "system" if message.role == "developer" else message.role,
                "content": message_text({"content": message.content}),
            }
            for message in self.messages
        ]

    @property
    def offered_tools(self) -> list[dict[str, Any]] | None:
        """The tools that the model is told of."""
        return None if self.tool_choice == "none" else self.tools

    @property
    def forces_form(self) -> bool:
        """Whether tokens are not the model's own choice, so that its log-probs do not say how they came about."""
        return self.response_format is not None or self.tool_choice not in (None, "auto", "none")


def read_json(body: bytes) -> dict[str, Any]:
    """A body as an object.

    Raises:
        ApiError: 400 when it is none.
    """
    try:
        # Said by name, since JSON's own way with bytes takes halves of emojis, too.
        value = json.loads(body.decode("utf-8-sig"), parse_constant=_no_constant, parse_float=finite_float)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"The body is no JSON: {error}.") from error
    if not isinstance(value, dict):
        raise ApiError(400, "The body is no JSON object.")
    if b"\\ud" in body.lower():  # half an emoji can be spelled in JSON, and then written nowhere
        value = _encodable(value)
    return value


def parse_chat(body: Mapping[str, Any], features: Iterable[str]) -> ChatRequest:
    """Read a request.

    Args:
        body: Its JSON.
        features: What the engine can.

    Raises:
        ApiError: 400, naming the first field that is wrong or cannot be honoured.
    """
    fields = {name: value for name, value in body.items() if value is not None and name not in LABELS}
    fields = {name: value for name, value in fields.items() if not _is_neutral(name, value)}
    for name in fields:
        if name not in ChatRequest.model_fields:
            _refuse(name, _NO.get(name, "this gateway does not support it"))
    if isinstance(fields.get("messages"), list):
        fields["messages"] = [_without_nothing(message) for message in fields["messages"]]
    try:
        request = ChatRequest.model_validate(fields)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = field_name(first["loc"])
        raise ApiError(400, f"`{place}`: {first['msg']}.", param=place, code="invalid_value") from error
    _check_tools(request)
    _check_sizes(request)
    _check_template(request)
    _check_features(request, set(features))
    return request


def sampling_of(request: ChatRequest, temperature: float, top_p: float, max_tokens: int | None) -> dict[str, Any]:
    """The settings to sample with, under OpenAI's names.

    Args:
        request: The request.
        temperature: For requests that name none.
        top_p: Likewise.
        max_tokens: Likewise; `None` for as many as fit.
    """
    found: dict[str, Any] = {
        "temperature": temperature if request.temperature is None else request.temperature,
        "top_p": top_p if request.top_p is None else request.top_p,
        "stop": [request.stop] if isinstance(request.stop, str) else list(request.stop or ()),
        "max_tokens": request.max_tokens or request.max_completion_tokens or max_tokens,
        "seed": request.seed,
        "tool_choice": request.tool_choice if request.offered_tools else None,
        "response_format": request.response_format,
        "chat_template_kwargs": request.chat_template_kwargs,
    }
    return {name: value for name, value in found.items() if value is not None}


def _is_neutral(name: str, value: Any) -> bool:
    """Whether a value asks for nothing. True is not 1 here, nor False 0."""
    return any(type(value) in (type(one), float) and value == one for one in NEUTRAL.get(name, ()))


def _unknown(holder: Mapping[str, Any], known: set[str]) -> str | None:
    """The first field that says something and is none of those known."""
    return next((name for name, value in holder.items() if name not in known and value is not None), None)


def _without_nothing(message: Any) -> Any:
    """A message without fields that say nothing; clients send replies back as their own classes write them."""
    if not isinstance(message, Mapping):
        return message
    return {
        name: value
        for name, value in message.items()
        if value is not None and (value or name not in _EMPTY_IN_MESSAGES)
    }


def _check_tools(request: ChatRequest) -> None:
    names = set()
    for index, tool in enumerate(request.tools or ()):
        function = tool.get("function")
        if tool.get("type") != "function" or not isinstance(function, Mapping):
            _refuse(f"tools[{index}]", "a tool has the type 'function' and a `function`")
        if not isinstance(function.get("name"), str) or not isinstance(function.get("parameters", {}), Mapping):
            _refuse(f"tools[{index}].function", "a function has a `name`, and `parameters` as a JSON schema")
        for place, holder, known in (("", tool, _IN_TOOLS), (".function", function, _IN_FUNCTIONS)):
            if unknown := _unknown(holder, known):
                _refuse(f"tools[{index}]{place}.{unknown}", "this gateway does not support it")
        if function.get("strict"):
            _refuse(f"tools[{index}].function.strict", "calls cannot be forced into their schema here: leave it out")
        names.add(function["name"])
    choice = request.tool_choice
    if isinstance(choice, dict):
        function = choice.get("function")
        if choice.get("type") != "function" or not isinstance(function, Mapping) or function.get("name") not in names:
            _refuse("tool_choice", "it names none of the functions in `tools`")
    elif choice not in (None, "none", "auto", "required"):
        _refuse("tool_choice", "it is 'none', 'auto', 'required' or a function of `tools`")
    elif choice == "required" and not names:
        _refuse("tool_choice", "there are no `tools`")


def _check_sizes(request: ChatRequest) -> None:
    stops = [request.stop] if isinstance(request.stop, str) else request.stop or []
    if len(stops) > _MAX_STOPS or not all(stops):
        _refuse("stop", f"up to {_MAX_STOPS} texts, none of them empty")
    if len({request.max_tokens, request.max_completion_tokens} - {None}) > 1:
        _refuse("max_tokens", "`max_completion_tokens` says something else")
    if request.stream_options is not None and not request.stream:
        _refuse("stream_options", "it goes with `stream: true`")


def _check_template(request: ChatRequest) -> None:
    for name in request.chat_template_kwargs or ():
        if name in _NOT_OF_TEMPLATES or not name.isidentifier():
            _refuse(
                f"chat_template_kwargs.{name}",
                "only what the model's own chat template reads, such as `enable_thinking`",
            )


def _check_features(request: ChatRequest, features: set[str]) -> None:
    if request.offered_tools and "tools" not in features:
        _refuse("tools", "this model's replies cannot be read as tool calls")
    if request.tool_choice not in (None, "auto", "none") and "tool_choice" not in features:
        _refuse("tool_choice", "this engine cannot force a call: use 'auto' or 'none'")
    if request.response_format is not None and "response_format" not in features:
        _refuse("response_format", "this engine cannot force a form")


def _refuse(param: str, why: str) -> NoReturn:
    raise ApiError(400, f"`{param}`: {why}.", param=param, code="unsupported_value")


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


def _encodable(value: Any) -> Any:
    if isinstance(value, str):
        return valid_text(value)
    if isinstance(value, list):
        return [_encodable(item) for item in value]
    if isinstance(value, dict):
        return {valid_text(name): _encodable(item) for name, item in value.items()}
    return value
