"""Conversations: the model's answer has to equal the last one of the conversation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import model_validator

from config.base import NonEmptyStr, TupleOf
from config.data import TextSourceOrName
from config.finetune.chat import ChatRowsConfig
from diffusionlm.evaluation.tasks.item_task import GenerationTask, ItemTask, TaskItem
from diffusionlm.evaluation.tasks.results import Verdict

if TYPE_CHECKING:
    from diffusionlm.data.chat.conversation import Conversation

DEFAULT_SOURCE_ITEMS = 256


class ExactMatchTask(GenerationTask, ItemTask):
    """Conversations in any format of training, or a `source` of them: the last answer of each is the reference, which
    the model's answer has to equal apart from whitespace around it."""

    kind: Literal["exact_match"] = "exact_match"
    source: TextSourceOrName | None = None
    """A source of conversations, as for training, in place of data. The items are its first different prompts, as many
    as `limit` (None: 256); `chat_tasks` has accuracies for each of its tasks, too."""
    split: Literal["validation", "train"] | None = None
    """Conversations of the source: those a training run validates on (also None), or those it trains on."""
    chat: ChatRowsConfig = ChatRowsConfig()
    """How a record of data becomes a conversation, and the chat template; without one, the model's own. That of a
    source is source.chat."""
    stop: TupleOf[NonEmptyStr] = ()
    """The answer ends before the first of these texts, wherever they lie in tokens."""
    default_new_tokens: ClassVar[int] = 64

    @model_validator(mode="after")
    def _check_source(self) -> Self:
        if self.source is None and self.split is not None:
            raise ValueError(f'split = "{self.split}" has no effect without source: remove it, or set source')
        if self.source is not None and self.data is not None:
            raise ValueError("items come from data and from source: set one of them")
        return self

    @property
    def chat_rows(self) -> ChatRowsConfig:
        """How records become conversations."""
        config: ChatRowsConfig = self.chat if self.source is None else getattr(self.source, "chat", None) or self.chat
        return config

    @property
    def rules(self) -> tuple[str, ...]:
        return ("exact_match",)

    def parse_item(self, record: Mapping[str, Any]) -> TaskItem:
        # Imported here, so that --help and config errors do not wait for numpy.
        from diffusionlm.data.chat.formats import ChatRowParser
        from diffusionlm.data.sources.record_source import BadRecord

        conversation = ChatRowParser(self.chat)(record, None if self.data is None else self.data.parent)
        if isinstance(conversation, BadRecord):
            raise ValueError(f"{conversation.reason} ({conversation.detail}): correct the file")
        return _to_item(conversation.up_to_answer())

    def read_source(self) -> list[TaskItem]:
        from diffusionlm.data.sources import read_reference_answers

        assert self.source is not None, "checked above"
        limit = DEFAULT_SOURCE_ITEMS if self.limit is None else self.limit
        conversations = read_reference_answers(self.source, self.split or "validation", "source", limit)
        return [
            replace(_to_item(item), group=item.task or "", id=str(number)) for number, item in enumerate(conversations)
        ]

    def grade(self, item: TaskItem, text: str) -> Verdict:
        score = float(text.strip() == item.gold)
        return Verdict({"exact_match": score} | ({f"exact_match/{item.group}": score} if item.group else {}))


def _to_item(conversation: Conversation) -> TaskItem:
    """The question before the last answer of a conversation, which ends with it."""
    *prompt, answer = conversation.messages
    return TaskItem(answer["content"].strip(), messages=tuple(prompt), tools=conversation.tools)
