"""Read conversations from the rows of data sets: messages, ShareGPT, Alpaca, prompt and completion, preferences."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from config.finetune.chat import COLUMNS, ChatFormat, ChatRowsConfig
from diffusionlm.data.chat.conversation import Conversation, Message, identify_images
from diffusionlm.data.sources.record_source import BadRecord, list_fields, shorten_repr, validate_text
from diffusionlm.vision.messages import place_images

REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
MESSAGE_KEYS = ("name", "tool_call_id")
"""Keys of a message that templates may read, beside role, content, reasoning and tool calls."""
TRAINING_KEYS = ("weight", "train")
"""Keys of an answer that say with 0 or false that it is context and not learned: OpenAI's, and Axolotl's."""
IMAGE_PARTS = ("image", "image_url")


class _InvalidRowError(Exception):
    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(reason)
        self.reason, self.detail = reason, detail


def _refuse_value(value: Any) -> Any:
    """Refuse dates, bytes and other values of Parquet, which tools and arguments of calls may contain."""
    raise _InvalidRowError("value is no JSON", f"{type(value).__name__} {shorten_repr(value)}")


@dataclass(frozen=True)
class ChatRowParser:
    """Turns a row into its conversation, or says why it cannot."""

    config: ChatRowsConfig

    def __call__(self, row: Mapping[str, Any], folder: Path | None = None) -> Conversation | BadRecord:
        """Parse the columns of one row. Paths of images begin in the folder; None: they are refused."""
        try:
            conversation = self._parse(row, folder)
            checked = validate_text(conversation.to_json(_refuse_value))
        except _InvalidRowError as error:
            return BadRecord(error.reason, error.detail, is_field_error=True)
        if isinstance(checked, BadRecord):
            return BadRecord(checked.reason, checked.detail, is_field_error=True)
        return conversation

    def column(self, name: str) -> str:
        """Return the column of the data for a field of a format."""
        return self.config.columns.get(name, name)

    def detect_format(self, row: Mapping[str, Any]) -> ChatFormat:
        """Return the format whose columns a row has."""
        present = {name for name in COLUMNS if row.get(self.column(name)) is not None}
        if isinstance(row.get(self.column("chosen")), Mapping):  # LLaMA-Factory's, beside messages
            return "preference"
        for name, needed in FORMAT_COLUMNS.items():
            if needed <= present:
                return name
        raise _InvalidRowError(
            "no conversation",
            f"its columns {list_fields(row)} are those of no format; name them in chat.columns, such as "
            '{prompt = "question", completion = "answer"}',
        )

    def _parse(self, row: Mapping[str, Any], folder: Path | None) -> Conversation:
        is_unpaired = self.config.format == "unpaired"
        name = self.detect_format(row) if is_unpaired or self.config.format == "auto" else self.config.format
        value = {field: row.get(self.column(field)) for field in COLUMNS}
        missing = next((field for field in sorted(FORMAT_COLUMNS[name]) if value[field] is None), None)
        if missing is not None:
            raise _InvalidRowError(f"no column {self.column(missing)!r}", f"its columns are {list_fields(row)}")
        label = value["label"] if value["label"] is not None else row.get("kto_tag")
        # Of a conversation only false can be nothing else.
        if not is_unpaired and (name == "prompt_completion" or (name != "preference" and label is False)):
            _refuse_label(label)
        tools = _parse_tools(value["tools"])
        rejected: tuple[Message, ...] | None = None
        prompt_length: int | None = None
        match name:
            case "messages" | "conversations":
                messages = self._parse_messages(value[name])
            case "alpaca":
                messages = (*self._parse_instruction(value), _make_answer(_check_text(value["output"], "output")))
            case "prompt_completion":
                prompt = self._parse_prompt(value["prompt"])
                messages = prompt + self._parse_completion(value["completion"], prompt)
            case "preference":
                prompt, chosen, worse = self._parse_preference(value)
                messages = prompt + chosen
                rejected = self._complete(_read_images(prompt + worse, value, folder), value["system"])
                prompt_length = len(rejected) - 1
        messages = self._complete(_read_images(messages, value, folder), value["system"])
        messages, context_answers = _remove_training_keys(messages)
        if rejected is not None:
            rejected, _ = _remove_training_keys(rejected)
            _check_preference(messages, rejected, len(rejected) - 1)
        task = value["task"] if isinstance(value["task"], str) else None
        is_desirable = _parse_label(label, self.column("label")) if is_unpaired and rejected is None else None
        conversation = Conversation(messages, tools, rejected, prompt_length, task, context_answers, is_desirable)
        learned = conversation.learned_answers
        if not learned or (rejected is not None and learned[-1] != prompt_length):
            raise _InvalidRowError(
                "no answer to learn",
                "weight or train of the answer is 0 or false; remove the key of an answer to learn, or remove the row",
            )
        return conversation

    def _complete(self, messages: tuple[Message, ...], system: Any) -> tuple[Message, ...]:
        """Add the system message if there is none, and check the order of roles."""
        content = _check_text("" if system is None else system, "system") or self.config.system
        if content and messages and messages[0]["role"] != "system":
            messages = ({"role": "system", "content": content}, *messages)
        _check_order(messages, self.config.allow_empty_answers)
        return messages

    def _parse_messages(self, value: Any) -> tuple[Message, ...]:
        if isinstance(value, str):  # a column of JSON
            value = _parse_json(value, "messages")
        if not isinstance(value, Sequence) or isinstance(value, str | bytes) or not value:
            raise _InvalidRowError("no messages", f"{shorten_repr(value)}, expected a list of messages")
        return tuple(self._parse_message(message) for message in value)

    def _parse_message(self, value: Any) -> Message:
        if not isinstance(value, Mapping):
            raise _InvalidRowError("message is no object", shorten_repr(value))
        columns, tags = self.config.columns, self.config.tags
        name = _first_of(value, columns.get("role", tags.get("role_tag")), "role", "from")
        role = self.config.role_aliases.get(name) if isinstance(name, str) else None
        if role is None:
            problem = f"{name!r}; name it in chat.roles if it stands for a role"
            raise _InvalidRowError("unknown role" if name is not None else "message without role", problem)
        content = _first_of(value, columns.get("content", tags.get("content_tag")), "content", "value")
        marks = _parse_training_keys(value) if role in ("assistant", "function_call") else {}
        if role == "function_call":
            return {"role": "assistant", "content": "", "tool_calls": _parse_tool_calls(content), **marks}
        message: Message = {"role": role, "content": _parse_content(content, has_calls=bool(value.get("tool_calls")))}
        reasoning = _first_of(value, *REASONING_KEYS)
        if isinstance(reasoning, str) and reasoning:
            message["reasoning_content"] = reasoning
        if value.get("tool_calls"):
            message["tool_calls"] = _parse_tool_calls(value["tool_calls"])
        return message | marks | {key: value[key] for key in MESSAGE_KEYS if isinstance(value.get(key), str)}

    def _parse_instruction(self, value: Mapping[str, Any]) -> tuple[Message, ...]:
        """The history, then instruction and input on lines of their own, as in LLaMA-Factory."""
        texts = [_check_text(value[key] or "", key) for key in ("instruction", "input")]
        messages: list[Message] = []
        history = value["history"] or ()
        if not isinstance(history, Sequence):
            raise _InvalidRowError("history is no list of pairs", shorten_repr(history))
        for pair in history:
            if not isinstance(pair, Sequence) or isinstance(pair, str) or len(pair) != 2:
                raise _InvalidRowError("history is no list of pairs", shorten_repr(pair))
            question, answer = (_check_text(text, "history") for text in pair)
            messages += [{"role": "user", "content": question}, _make_answer(answer)]
        return (*messages, {"role": "user", "content": "\n".join(text for text in texts if text)})

    def _parse_prompt(self, value: Any) -> tuple[Message, ...]:
        if isinstance(value, str):
            return ({"role": "user", "content": value},)
        return self._parse_messages(value)

    def _parse_completion(self, value: Any, prompt: tuple[Message, ...]) -> tuple[Message, ...]:
        """An answer as text, as a message, or as messages, which may repeat the prompt."""
        if isinstance(value, str):
            return (_make_answer(value),)
        messages = self._parse_messages([value] if isinstance(value, Mapping) else value)
        repeats_prompt = len(messages) > len(prompt) and messages[: len(prompt)] == prompt
        return messages[len(prompt) :] if repeats_prompt else messages

    def _parse_preference(self, value: Mapping[str, Any]) -> tuple[tuple[Message, ...], ...]:
        """Prompt, chosen and rejected answer; the prompt of two lists of messages may be what they have in common."""
        prompt: tuple[Message, ...] | None = None
        if value["prompt"] is not None:
            prompt = self._parse_prompt(value["prompt"])
        elif any(isinstance(value[key], str | Mapping) for key in ("chosen", "rejected")):
            messages = _first_of(value, "messages", "conversations")
            if value["instruction"] is None and messages is None:
                raise _InvalidRowError(
                    "preference without prompt",
                    f"chosen or rejected is one answer: {shorten_repr(value['chosen'])}; name the column of the prompt "
                    'in chat.columns, such as {prompt = "question"}',
                )
            prompt = self._parse_messages(messages) if value["instruction"] is None else self._parse_instruction(value)
        if prompt is not None:
            return prompt, *(self._parse_completion(value[key], prompt) for key in ("chosen", "rejected"))
        chosen, rejected = (self._parse_messages(value[key]) for key in ("chosen", "rejected"))
        pairs = zip(chosen[:-1], rejected[:-1], strict=False)
        length = next((index for index, (a, b) in enumerate(pairs) if a != b), min(len(chosen), len(rejected)) - 1)
        return chosen[:length], chosen[length:], rejected[length:]


FORMAT_COLUMNS: dict[ChatFormat, set[str]] = {
    "messages": {"messages"},
    "conversations": {"conversations"},
    "preference": {"chosen", "rejected"},
    "alpaca": {"instruction", "output"},
    "prompt_completion": {"prompt", "completion"},
}
"""Columns that a format must have, in the order of detection."""


def _make_answer(text: str) -> Message:
    return {"role": "assistant", "content": text}


def _first_of(value: Mapping[str, Any], *keys: str | None) -> Any:
    """Return the first value that is there and not null."""
    return next((value[key] for key in keys if key is not None and value.get(key) is not None), None)


def _parse_training_keys(value: Mapping[str, Any]) -> Message:
    """Return the keys of an answer that say that it is not learned."""
    values = {key: value[key] for key in TRAINING_KEYS if value.get(key) is not None}
    for key, number in values.items():
        if number not in (0, 1):
            raise _InvalidRowError(
                f"{key} is neither 0 nor 1",
                f"{shorten_repr(number)}: write 1 (the answer is learned) or 0 (it is context), or remove the key",
            )
    return {key: number for key, number in values.items() if not number}


def _remove_training_keys(messages: Sequence[Message]) -> tuple[tuple[Message, ...], tuple[int, ...]]:
    """Return the messages as templates see them, and the indices of answers that are not learned."""
    indices = tuple(index for index, message in enumerate(messages) if any(key in message for key in TRAINING_KEYS))
    plain = ({key: value for key, value in message.items() if key not in TRAINING_KEYS} for message in messages)
    return tuple(plain), indices


def _parse_label(label: Any, column: str) -> bool:
    if label not in (0, 1):  # also false and true
        problem = f"its column {column!r} is {shorten_repr(label)}, expected true (desirable) or false"
        raise _InvalidRowError("no label", f'{problem}; name it in chat.columns, such as {{label = "kto_tag"}}')
    return bool(label)


def _refuse_label(label: Any) -> None:
    """Refuse an answer with a label, TRL's unpaired preference: an undesirable one would be learned."""
    if label in (0, 1):  # also false and true
        raise _InvalidRowError(
            "unpaired preference",
            f'its label is {str(label).lower()}; set chat.format = "unpaired", which learns desirable answers only, or '
            'with objective.loss = "kto" from both; or remove the rows with label = false or 0, and then the key',
        )


def _check_text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise _InvalidRowError(f"{name} is not text", shorten_repr(value))
    return value


def _parse_content(value: Any, *, has_calls: bool) -> Any:
    """Text, or a list of text parts, which are joined, or of parts with images, which `_read_images` reads."""
    if value is None and has_calls:
        return ""
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        has_images = any(isinstance(part, Mapping) and part.get("type") in IMAGE_PARTS for part in value)
        return list(value) if has_images else "".join(map(_parse_part, value))
    if not isinstance(value, str):
        raise _InvalidRowError("content is not text", shorten_repr(value))
    return value


def _parse_part(part: Any) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, Mapping) else None
    raise _InvalidRowError("content part is not text", f"type {kind!r}" if kind else shorten_repr(part))


def _read_images(messages: tuple[Message, ...], value: Mapping[str, Any], folder: Path | None) -> tuple[Message, ...]:
    """Check the images of the messages, and put those of the columns `image` or `images` into them."""
    images = value["image"] if value["images"] is None else value["images"]
    if images is None and all(isinstance(message["content"], str) for message in messages):
        return messages
    is_list = isinstance(images, Sequence) and not isinstance(images, str | bytes)
    try:
        placed = messages if images is None else place_images(messages, images if is_list else [images])
        return identify_images(placed, folder)
    except ValueError as error:
        raise _InvalidRowError("image cannot be used", str(error)) from None


def _parse_json(text: str, name: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _InvalidRowError(f"{name} is no JSON", f"{shorten_repr(text)}: {error}") from None


def _parse_tool_calls(value: Any) -> list[dict[str, Any]]:
    """Calls as `{"type": "function", "function": {name, arguments}}`, in the row's order; arguments are an object."""
    if isinstance(value, str):
        value = _parse_json(value, "function_call")
    calls = value if isinstance(value, Sequence) else [value]
    parsed: list[dict[str, Any]] = []
    for call in calls:
        function = call.get("function") if isinstance(call, Mapping) and call.get("function") is not None else call
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise _InvalidRowError("tool call without name", shorten_repr(call))
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            arguments = _parse_json(arguments, "arguments of a tool call")
        values = {"name": function["name"], "arguments": arguments or {}}
        entry: dict[str, Any] = {"type": "function", "function": _order_keys(values, function)}
        identifier = call.get("id")
        parsed.append(_order_keys(entry | ({"id": identifier} if isinstance(identifier, str) else {}), call))
    return parsed


def _order_keys(values: dict[str, Any], order: Iterable[str]) -> dict[str, Any]:
    """Return the values with their keys in this order; others follow."""
    return {key: values[key] for key in order if key in values} | values


def _parse_tools(value: Any) -> tuple[Any, ...] | None:
    if isinstance(value, str):
        value = _parse_json(value, "tools") if value.strip() else None
    if not value:
        return None
    if not isinstance(value, Sequence) or not all(isinstance(tool, Mapping) for tool in value):
        raise _InvalidRowError("tools are no list of objects", shorten_repr(value))
    return tuple(value)


def _check_preference(messages: Sequence[Message], rejected: Sequence[Message], prompt_length: int) -> None:
    """Check that two chats differ in their last messages only, which are answers."""
    for name, chat in (("chosen", messages), ("rejected", rejected)):
        if chat[-1]["role"] != "assistant" or len(chat) != prompt_length + 1:
            raise _InvalidRowError(f"{name} is not one answer", f"the last roles are {[m['role'] for m in chat[-2:]]}")
    if messages[:prompt_length] != rejected[:prompt_length]:
        raise _InvalidRowError("chosen and rejected have different prompts", shorten_repr(messages[0]["content"]))
    if messages[-1] == rejected[-1]:
        raise _InvalidRowError("chosen and rejected are equal", shorten_repr(messages[-1]["content"]))


def _check_order(messages: Sequence[Message], allow_empty_answers: bool) -> None:
    """Check that questions and answers alternate, and that no answer is empty."""
    roles = [message["role"] for message in messages]
    turns = roles[1:] if roles[:1] == ["system"] else roles
    if "assistant" not in turns:
        raise _InvalidRowError("no answer", f"its roles are {', '.join(roles)}")
    if "system" in turns:
        raise _InvalidRowError("system message after the first message", f"its roles are {', '.join(roles)}")
    for before, role in zip([None, *turns], turns, strict=False):
        follows = {None: ("user",), "user": ("assistant",), "tool": ("assistant", "tool")}
        if before in follows and role not in follows[before]:
            problem = (
                "does not begin with a user message" if before is None else f"{role} message after {before} message"
            )
            raise _InvalidRowError(problem, f"its roles are {', '.join(roles)}")
        if before == role == "assistant":
            raise _InvalidRowError("two assistant messages in a row", f"its roles are {', '.join(roles)}")
    if allow_empty_answers:
        return
    for message in messages:
        if message["role"] == "assistant" and not message["content"].strip() and "tool_calls" not in message:
            raise _InvalidRowError("empty answer", f"after {shorten_repr(messages[0]['content'])}")
