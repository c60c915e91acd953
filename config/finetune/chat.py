"""``[data.source.chat]``: conversations in place of text."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, field_validator, model_validator

from config.base import NonEmptyStr, Section, check_distinct

ChatFormat = Literal["auto", "messages", "conversations", "alpaca", "prompt_completion", "preference", "unpaired"]

TurnSelection = Literal["all", "last", "one", "expand"]

ChatRole = Literal["system", "user", "assistant", "tool", "function_call"]

COLUMNS = (
    "messages", "conversations", "role", "content", "system", "tools", "instruction", "input", "output", "history",
    "prompt", "completion", "chosen", "rejected", "label", "task", "image", "images",
)  # fmt: skip
"""The fields of the formats, which `columns` maps to those of the data."""

COLUMN_ALIASES = {"query": "input", "response": "output", "kto_tag": "label"}
"""LLaMA-Factory's names of fields. Beside query or response its prompt is the instruction."""

ROLE_TAGS: dict[str, ChatRole] = {
    "system_tag": "system", "user_tag": "user", "assistant_tag": "assistant", "observation_tag": "tool",
    "function_tag": "function_call",
}  # fmt: skip
"""LLaMA-Factory's names of roles."""

TagName = Literal[
    "role_tag", "content_tag", "system_tag", "user_tag", "assistant_tag", "observation_tag", "function_tag"
]

ROLE_ALIASES: dict[str, ChatRole] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
    "function_call": "function_call",
}
"""Role names that are understood without `roles`."""

RENDER_VARIABLES = ("messages", "tools", "documents", "add_generation_prompt")
"""Variables that every rendering of a template sets."""

EOS_PADDING_PATTERN = re.compile(r"none|block|batch_max|length:([1-9][0-9]*)")


def _check_eos_padding(value: str) -> str:
    if EOS_PADDING_PATTERN.fullmatch(value) is None:
        raise ValueError(f'{value!r} is none of "none", "block", "length:N" (N a number of tokens) and "batch_max"')
    return value


class ChatRowsConfig(Section):
    """Each record is a conversation; answers are noised and learned, everything else is context."""

    format: ChatFormat = "auto"
    """messages: a list of objects with role and content. conversations: the same, or from and value, beside optional
    columns system and tools. alpaca: instruction, input, output, and optional system and history. prompt_completion:
    strings or lists of messages. preference: prompt, chosen and rejected; without a prompt it is instruction and input,
    or messages, where answers are texts or single messages, else their common beginning. unpaired: one of the others
    and a label (or kto_tag): true for a desirable last answer. auto: by the columns of each record. Each may have
    images: content parts of the user's messages, or a column image or images."""
    columns: Mapping[str, NonEmptyStr] = Field(default_factory=dict)
    """Field of the format -> column of the data, such as {prompt = "question", completion = "answer"}. Others have
    their own names. LLaMA-Factory's query, response and kto_tag are input, output and label."""
    tags: Mapping[TagName, NonEmptyStr] = Field(default_factory=dict)
    """Keys of messages and names of roles as in LLaMA-Factory, such as {role_tag = "from", user_tag = "human"}."""
    roles: Mapping[str, ChatRole] = Field(default_factory=dict)
    """Further role names -> system, user, assistant, tool or function_call. human, gpt, model, bot, developer,
    observation and function are known."""
    system: NonEmptyStr | None = None
    """System message of conversations that have none."""
    template: NonEmptyStr | None = None
    """Name of a built-in template (chatml, qwen3, llama3, llada), a file with Jinja, or a directory with a tokenizer.
    None: the template of the run's tokenizer."""
    template_variables: Mapping[str, bool | int | str] = Field(default_factory=dict)
    """Other variables of the template, such as {enable_thinking = false}."""
    turns: TurnSelection | None = None
    """Answers that are learned. all: those of the whole conversation in one row; where the template changes earlier
    answers, as that of Qwen3 does with reasoning, the conversation is expanded. expand: each answer with what precedes
    it is a document of its own. last: the last one. one: a random one, another one in each epoch. None: expand for
    masked diffusion, in which an answer would see later questions, else all."""
    truncate_mode: Literal["drop", "cut"] = "drop"
    """Conversations that are longer than a row: drop leaves them out; cut keeps the beginning, without a stop token
    after the answer that was cut. Both are counted."""
    eos_padding: Annotated[str, AfterValidator(_check_eos_padding)] | None = Field(
        default=None, serialization_alias="fill"
    )
    """End-of-text tokens after the last answer of a document. They are learned, because a canvas of fixed length has
    them. none; block: up to the end of the block; length:N: up to N tokens of answer and padding, fewer than a row has;
    batch_max: up to the longest conversation of the step, in validation of as many conversations as a step has; with
    rows = "padded" only. None: length:128 for masked diffusion, block for block diffusion, none for next tokens."""
    allow_empty_answers: bool = False
    """Learn answers without text: they teach only to stop. False: such a record is bad."""

    @field_validator("columns")
    @classmethod
    def _check_columns(cls, columns: Mapping[str, str]) -> Mapping[str, str]:
        aliases = COLUMN_ALIASES | ({"prompt": "instruction"} if {"query", "response"} & columns.keys() else {})
        fields = [aliases.get(name, name) for name in columns]
        check_distinct({"fields": fields})
        unknown = next((name for name in fields if name not in COLUMNS), None)
        if unknown is not None:
            raise ValueError(f"{unknown!r} is no field of a format; the fields are {', '.join(COLUMNS)}")
        return dict(zip(fields, columns.values(), strict=True))

    @field_validator("template_variables")
    @classmethod
    def _check_variables(cls, variables: Mapping[str, bool | int | str]) -> Mapping[str, bool | int | str]:
        wrong = next((name for name in variables if not name.isidentifier() or name in RENDER_VARIABLES), None)
        if wrong is not None:
            raise ValueError(
                f"{wrong!r} is no variable of your own: use a name of letters, digits and _, other than "
                f"{', '.join(RENDER_VARIABLES)}"
            )
        return variables

    @model_validator(mode="after")
    def _check_turns(self) -> Self:
        if self.format in ("preference", "unpaired") and self.turns not in (None, "last"):
            raise ValueError(
                f'turns = "{self.turns}": a preference concerns the last answer; set "last" or leave it out'
            )
        return self

    @property
    def identity(self) -> str:
        """Return what checkpoints compare of these options, with the names that the first ones have."""
        return self.model_dump_json(by_alias=True, exclude=None if self.tags else {"tags"})

    @property
    def role_aliases(self) -> dict[str, ChatRole]:
        """Role name in the data -> role."""
        tags = {name: ROLE_TAGS[tag] for tag, name in self.tags.items() if tag in ROLE_TAGS}
        return ROLE_ALIASES | tags | dict(self.roles)

    @property
    def eos_padding_length(self) -> int | None:
        """The number N of ``eos_padding = "length:N"``. None: another value."""
        match = EOS_PADDING_PATTERN.fullmatch(self.eos_padding or "none")
        return None if match is None or match[1] is None else int(match[1])

    def resolve(self, block_length: int | None) -> ChatRowsConfig:
        """Return a copy with `turns` and `eos_padding` that fit an objective, where they are not set.

        Args:
            block_length: None: masked diffusion; 1: next tokens.
        """
        is_preference = self.format in ("preference", "unpaired")
        turns = self.turns or ("last" if is_preference else "expand" if block_length is None else "all")
        eos_padding = self.eos_padding or (
            "length:128" if block_length is None else "none" if block_length == 1 else "block"
        )
        return self.model_copy(update={"turns": turns, "eos_padding": eos_padding})
