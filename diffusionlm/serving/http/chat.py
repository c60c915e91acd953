"""``/v1/chat/completions``: the messages and tools of a request, their encoding, and the response with its calls."""

from __future__ import annotations

import json
import secrets
from collections import Counter
from inspect import signature
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, ValidationInfo, field_validator, model_validator

from config.base import Section
from diffusionlm.inference.healing import HealedText
from diffusionlm.inference.request_builder import RequestBuilder
from diffusionlm.serving.http.answers import Choice, PreparedCall, ServedAnswer, TextPiece
from diffusionlm.serving.http.bodies import MAX_TOP_LOGPROBS, GenerationBody, check_limit, check_text, context_of
from diffusionlm.serving.http.wire import shorten
from tokenizer import CHAT_TEMPLATES, Tokenizer, encode_answer, encode_chat
from tokenizer.tool_calls import CallPiece, ToolCallParser

OWN_VARIABLES = frozenset((*signature(encode_chat).parameters, *signature(encode_answer).parameters, "documents"))
"""Names that ``chat_template_kwargs`` may not have."""
_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}
_PLAIN_KEYS = frozenset(("$schema", "title", "description", "type", "required", "properties"))


class ImageUrl(Section):
    """``image_url`` of a `ContentPart`."""

    url: str
    detail: Literal["auto", "high"] = "auto"
    """Without effect: the model's options decide on the size of an image."""

    @field_validator("url")
    @classmethod
    def _check_url(cls, url: str) -> str:
        if not url.startswith("data:"):
            raise ValueError("this server fetches nothing: send the file itself, as data:image/png;base64,...")
        return url


class ContentPart(Section):
    """A part of a message: a text or an image."""

    type: Literal["text", "image_url"]
    text: str | None = None
    image_url: ImageUrl | None = None

    @model_validator(mode="after")
    def _check_type(self, info: ValidationInfo) -> Self:
        if getattr(self, self.type) is None or None not in (self.text, self.image_url):
            raise ValueError('must be {"type": "text", "text": "..."} or {"type": "image_url", "image_url": {...}}')
        if self.image_url is not None and not context_of(info).has_vision:
            raise ValueError("this model reads no images: remove it, or serve a model with vision")
        return self


def _check_parts(parts: list[ContentPart], info: ValidationInfo) -> list[ContentPart]:
    check_text("".join(part.text or "" for part in parts), info)
    return parts


def _parse_arguments(value: Any, info: ValidationInfo) -> Any:
    """The object of arguments that a JSON text has, which templates expect; an empty text has none."""
    try:
        return json.loads(check_text(value, info) or "{}") if isinstance(value, str) else value
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is no JSON ({error}): send back the arguments of the answer as they were") from None


class CalledFunction(Section):
    """``function`` of a `ToolCall`."""

    name: str
    arguments: Annotated[dict[str, Any], BeforeValidator(_parse_arguments)]


class ToolCall(Section):
    """A call in an earlier answer."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


class ChatMessage(Section):
    """A message of a chat. What is empty of other fields is ignored."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[
        list[ContentPart],
        BeforeValidator(lambda value: [{"type": "text", "text": value}] if isinstance(value, str) else value),
        AfterValidator(_check_parts),
    ]
    name: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _drop_empty_fields(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        fields = {key: item for key, item in value.items() if item is not None and (item != [] or key == "content")}
        return {"content": "", **fields} if "tool_calls" in fields else fields

    @model_validator(mode="after")
    def _check_fields_fit_role(self) -> Self:
        for key, role in (("tool_calls", "assistant"), ("tool_call_id", "tool")):
            if getattr(self, key) and self.role != role:
                raise ValueError(f"{key} belongs to a message of role {role}, and this one is of role {self.role}")
        return self

    @property
    def num_images(self) -> int:
        return sum(part.image_url is not None for part in self.content)

    def to_template(self) -> dict[str, Any]:
        """The message as chat templates read it, and its parts if there are images among them."""
        values = self.model_dump(exclude_none=True)
        if not self.num_images:
            values["content"] = "".join(part.text or "" for part in self.content)
        return values | {"role": "system" if self.role == "developer" else self.role}


class ToolFunction(Section):
    """``function`` of a `Tool`. ``strict`` has no effect: arguments are exact if and only if a call is required."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_./:-]{1,128}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Section):
    """A function that the answer may call."""

    type: Literal["function"]
    function: ToolFunction

    @property
    def schema_of_arguments(self) -> dict[str, Any]:
        """JSON schema of the arguments; one that describes no property allows none."""
        schema = self.function.parameters or {}
        return schema if schema.get("properties") or schema.keys() - _PLAIN_KEYS else _NO_ARGUMENTS

    def to_template(self) -> dict[str, Any]:
        """The tool as chat templates read it."""
        return self.model_dump(exclude_none=True, exclude={"function": {"strict"}})


def _check_tool_choice(value: Any) -> Any:
    """A word as it is; of a named function a list of its name."""
    match value:
        case "none" | "auto" | "required":
            return value
        case {"type": "function", "function": {"name": str(name)}}:
            return [name]
    raise ValueError('must be "none", "auto", "required" or {"type": "function", "function": {"name": "..."}}')


class ChatBody(GenerationBody):
    """Fields of a request that answers a chat."""

    text_key = "messages"
    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    tools: list[Tool] = Field(default_factory=list)
    tool_choice: Annotated[Any, AfterValidator(_check_tool_choice)] = "auto"
    parallel_tool_calls: bool = True
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False

    @field_validator("messages")
    @classmethod
    def _check_images(cls, messages: list[ChatMessage], info: ValidationInfo) -> list[ChatMessage]:
        check_limit(sum(message.num_images for message in messages), info, key="max_images")
        return messages

    @field_validator("tools")
    @classmethod
    def _check_tools(cls, tools: list[Tool], info: ValidationInfo) -> list[Tool]:
        check_text(json.dumps([tool.to_template() for tool in tools], ensure_ascii=False), info)
        for name, count in Counter(tool.function.name for tool in tools).items():
            if count > 1:
                raise ValueError(f"there are two functions {name}: rename one")
        for tool in tools:
            if (tool.function.parameters or {}).get("type", "object") != "object":
                raise ValueError(f'parameters of {tool.function.name} must have type = "object"')
        return tools

    @field_validator("chat_template_kwargs")
    @classmethod
    def _check_variables(cls, variables: dict[str, Any]) -> dict[str, Any]:
        for name in variables:
            if not name.isidentifier() or name in OWN_VARIABLES:
                raise ValueError(f"{shorten(name)} is no variable that a request sets this way: remove it")
        return variables

    @model_validator(mode="after")
    def _check_chat(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs = true")
        if self.token_healing:
            raise ValueError("token_healing has no effect on a chat")
        if self.continue_final_message:
            if self.add_generation_prompt:
                raise ValueError("continue_final_message needs add_generation_prompt = false")
            if self.messages[-1].role != "assistant" or self.messages[-1].tool_calls:
                raise ValueError("continue_final_message needs a last message of role assistant without tool_calls")
        if self.must_call and not self.callable_tools:
            raise ValueError("tool_choice asks for a function that is not among the tools: add it there")
        has_constraint = super().constraint is not None and (self.must_call or self.response_format is None)
        if self.callable_tools and has_constraint:
            raise ValueError(
                f'{super().constraint_key} leaves no call possible: remove it, or set tool_choice = "none"'
            )
        return self

    @property
    def callable_tools(self) -> dict[str, dict[str, Any]]:
        schemas = {tool.function.name: tool.schema_of_arguments for tool in self.tools}
        if isinstance(self.tool_choice, list):
            return {name: schemas[name] for name in self.tool_choice if name in schemas}
        return {} if self.tool_choice == "none" else schemas

    @property
    def must_call(self) -> bool:
        """The answer has to be calls."""
        return self.tool_choice not in ("none", "auto")

    @property
    def num_alternatives(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def constraint_key(self) -> str:
        return "tools" if self.must_call else super().constraint_key

    @property
    def constraint(self) -> Any:
        """As of other bodies; if the answer has to be calls, or calls or a JSON value, an object of all that."""
        constraint, tools = super().constraint, self.callable_tools
        if not (self.must_call or (tools and constraint)):
            return constraint
        is_single = isinstance(self.tool_choice, list) or not self.parallel_tool_calls
        content = constraint and constraint.get("json", {"type": "object"})
        return {"schemas": tools, "is_single": is_single, "content": content}

    def encode(self, builder: RequestBuilder) -> list[HealedText]:
        template = builder.template
        if template is None:
            raise ValueError(
                "messages: the model has no chat template: use /v1/completions, or start the server with "
                f"--chat-template NAME, one of {', '.join(CHAT_TEMPLATES)}, or a file with Jinja"
            )
        if self.tools and "tools" not in template.source:
            raise ValueError("tools: the chat template ignores them: use another one, such as --chat-template chatml")
        text = builder.encode_chat(
            [message.to_template() for message in self.messages],
            [tool.to_template() for tool in self.tools] or None,
            variables=self.chat_template_kwargs,
            has_prompt=not self.continue_final_message and self.add_generation_prompt is not False,
            continues_answer=self.continue_final_message,
        )
        return [text]


class ChatAnswer(ServedAnswer[ChatBody]):
    """``chat.completion`` and its chunks."""

    prefix, whole_object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, call: PreparedCall[ChatBody], tokenizer: Tokenizer, response_id: str) -> None:
        super().__init__(call, tokenizer, response_id)
        self._parsers: list[ToolCallParser] = []
        """Of each choice, if it may call tools."""
        if call.tool_format is not None:
            tools, must_call = self.body.callable_tools, self.body.must_call
            self._parsers = [ToolCallParser(call.tool_format, tools, is_constrained=must_call) for _ in self.choices]

    def _parse(self, choice: Choice, text: str) -> list[str | CallPiece]:
        """Content and pieces of calls in new text of a choice."""
        if not self._parsers:
            return [text] if text else []
        pieces = self._parsers[choice.index].push(text, is_last=choice.finish_reason is not None)
        is_single = not self.body.parallel_tool_calls
        return [piece for piece in pieces if isinstance(piece, str) or not (is_single and piece.index)]

    def _finish_reason(self, choice: Choice) -> str | None:
        reason, parser = super()._finish_reason(choice), self._parsers[choice.index] if self._parsers else None
        has_calls = parser is not None and parser.num_calls and not parser.has_open_call
        return "tool_calls" if reason == "stop" and has_calls else reason

    def _whole_details(self) -> dict[str, Any]:
        return self._prompt_logprobs(self.choices[0])

    def _content(self, choice: Choice) -> dict[str, Any]:
        pieces = self._parse(choice, choice.spans[0].text)
        content = "".join(piece for piece in pieces if isinstance(piece, str))
        calls = [_build_call(piece.name, piece.arguments) for piece in pieces if isinstance(piece, CallPiece)]
        message = {"role": "assistant", "content": content or None if calls else content, "refusal": None}
        return {"message": message | ({"tool_calls": calls} if calls else {})}

    def _new_contents(self, choice: Choice, piece: TextPiece, *, is_first: bool) -> list[dict[str, Any]]:
        deltas: list[dict[str, Any]] = []
        for part in self._parse(choice, piece.text):
            if isinstance(part, str):
                deltas.append({"content": part})
                continue
            if part.name is not None:
                deltas.append({"tool_calls": [{"index": part.index, **_build_call(part.name, "")}]})
            if part.arguments:
                deltas.append({"tool_calls": [{"index": part.index, "function": {"arguments": part.arguments}}]})
        first = [{"delta": {"role": "assistant", "content": ""}, "logprobs": None}] if is_first else []
        logprobs = self._logprobs(piece.tokens) if piece.tokens else None
        if not deltas and (logprobs or choice.finish_reason or self.body.diffusing):
            deltas.append({})
        contents = [{"delta": delta, "logprobs": None} for delta in deltas]
        if logprobs:
            contents[-1]["logprobs"] = logprobs
        return [*first, *contents]


def _build_call(name: str | None, arguments: str) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}
