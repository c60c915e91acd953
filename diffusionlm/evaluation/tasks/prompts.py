"""The prompt of an item: a template with its fields, after solved examples, as a text or a chat. No torch."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count, islice
from string import Formatter
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from config.evaluation.tasks import ExactMatchTask, ItemTask, MultipleChoiceTask, PromptConfig
from diffusionlm.evaluation.pair_encoding import EncodedPair, PairEncoder
from diffusionlm.evaluation.tasks.items import TaskItem, read_items_of_file
from diffusionlm.inference.request_builder import RequestBuilder
from tokenizer import ChatTemplate, render_chat


@dataclass(frozen=True)
class TaskTemplates:
    """The templates of a kind of task."""

    question: str
    answer: str
    delimiter: str = " "


DEFAULT_TEMPLATES: dict[str, TaskTemplates] = {
    "gsm8k": TaskTemplates("Question: {question}\nAnswer:", "{answer}"),
    "humaneval": TaskTemplates("{prompt}", "{answer}", delimiter=""),
    "multiple_choice": TaskTemplates("Question: {question}\nAnswer:", "{answer}"),
    "cloze": TaskTemplates("{context}", "{answer}"),
    "exact_match": TaskTemplates("", ""),
}
"""Those of lm-evaluation-harness 0.4: gsm8k, humaneval, arc_easy and lambada_openai. A conversation has none."""
LETTER_TEMPLATE = "{question}\n{options}\nAnswer:"
"""Of multiple choice with score = "letters", as in MMLU."""


def fill_template(template: str, fields: Mapping[str, Any], key: str) -> str:
    """Replace each ``{name}`` by a field, and ``{{`` and ``}}`` by braces.

    Raises:
        ValueError: the template is malformed, or there is no such field; names ``key``.
    """
    parts = []
    try:
        pieces = list(Formatter().parse(template))
    except ValueError as error:
        raise ValueError(f"{key} = {template!r}: {error}; write {{{{ and }}}} for braces") from None
    for literal, name, specification, conversion in pieces:
        parts.append(literal)
        if name is None:
            continue
        if name not in fields or specification or conversion:
            raise ValueError(
                f"{key}: {{{name}}} is no field of the item; its fields are {', '.join(map(repr, fields))}. Write "
                "{{ and }} for braces"
            )
        value = fields[name]
        parts.append(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
    return "".join(parts)


@dataclass(frozen=True)
class EncodedItem:
    """The prompt of an item, as tokens."""

    token_ids: NDArray[np.int32]
    segment_starts: tuple[int, ...]
    """Where blocks are counted anew (`RequestOptions.segment_starts`)."""
    sha256: str
    """Hash of the prompt's text."""


class PromptBuilder:
    """Builds the prompts of a task's items."""

    def __init__(self, task: ItemTask) -> None:
        """Read the examples.

        Raises:
            ValueError: the file of the examples cannot be read, or has too few.
        """
        self.config = PromptConfig() if isinstance(task, ExactMatchTask) else task.prompt
        defaults = DEFAULT_TEMPLATES[task.kind]
        is_letters = isinstance(task, MultipleChoiceTask) and task.score == "letters"
        default_question = LETTER_TEMPLATE if is_letters else defaults.question
        self.template = default_question if self.config.template is None else self.config.template
        self.answer_template = defaults.answer if self.config.answer_template is None else self.config.answer_template
        self.delimiter = defaults.delimiter if self.config.delimiter is None else self.config.delimiter
        self._shots = ShotReader(task, self.config)

    def text(self, item: TaskItem) -> str:
        """The prompt as a text, with examples and the beginning of the answer.

        Raises:
            ValueError: a template names a field that the item does not have.
        """
        text = self._join_examples(item)
        prefix = self.answer_prefix(item)
        return f"{text}{self.delimiter}{prefix}" if prefix else text

    def messages(self, item: TaskItem) -> list[dict[str, Any]]:
        """The prompt as a chat, without the beginning of the answer.

        Raises:
            ValueError: a template names a field that the item does not have.
        """
        if item.reference is not None:
            return list(item.reference.messages)
        system = [] if self.config.system is None else [{"role": "system", "content": self.config.system}]
        if self.config.shots_as == "text":
            return [*system, {"role": "user", "content": self._join_examples(item)}]
        turns = []
        for shot in self.select_shots(item):
            turns.append({"role": "user", "content": self._question(shot)})
            turns.append({"role": "assistant", "content": self._answer(shot)})
        return [*system, *turns, {"role": "user", "content": self._question(item)}]

    def answer_prefix(self, item: TaskItem) -> str:
        """The text that the answer begins with."""
        return fill_template(self.config.answer_prefix, item.fields, "prompt.answer_prefix")

    def select_shots(self, item: TaskItem) -> list[TaskItem]:
        """The examples of an item: the first ones that are neither the item nor a copy of it.

        Raises:
            ValueError: there are fewer than ``prompt.shots``.
        """
        return self._shots.select(item)

    def _join_examples(self, item: TaskItem) -> str:
        """Examples and question as one text."""
        shots = [f"{self._question(shot)}{self.delimiter}{self._answer(shot)}" for shot in self.select_shots(item)]
        return self.config.separator.join([*shots, self._question(item)])

    def _question(self, item: TaskItem) -> str:
        return fill_template(self.template, item.fields, "prompt.template")

    def _answer(self, item: TaskItem) -> str:
        return fill_template(self.answer_template, item.fields, "prompt.answer_template")


class PromptEncoder:
    """Encodes the prompts of a task for a model.

    Args:
        template: of chats. None: the prompts are texts.
        requests: encodes the chats whose answers are decoded. None: nothing is decoded.
    """

    def __init__(
        self,
        builder: PromptBuilder,
        encoder: PairEncoder,
        template: ChatTemplate | None,
        requests: RequestBuilder | None = None,
    ) -> None:
        self._builder, self._encoder, self._template, self._requests = builder, encoder, template, requests

    def encode(self, item: TaskItem) -> EncodedItem:
        """Encode a prompt whose answer is to be generated.

        Raises:
            ValueError: a field is missing, or the chat template rejects the chat.
        """
        if self._template is None:
            text = self._builder.text(item)
            return EncodedItem(np.array(self._encoder.encode(text), dtype=np.int32), (), _hash(text))
        assert self._requests is not None, "only answers that are decoded are encoded alone"
        messages, prefix = self._builder.messages(item), self._builder.answer_prefix(item)
        tools = None if item.reference is None else item.reference.tools
        chat = self._requests.encode_chat(messages, tools, prefix)
        text = json.dumps([messages, tools, prefix], ensure_ascii=False)
        return EncodedItem(np.array(chat.token_ids, dtype=np.int32), tuple(chat.options.segment_starts), _hash(text))

    def encode_options(self, item: TaskItem, options: Sequence[str]) -> tuple[list[EncodedPair], str]:
        """Encode a prompt with each of its possible continuations. Returns the hash of the prompt's text as well.

        Raises:
            ValueError: a field is missing, or the chat template rejects the chat.
        """
        if self._template is None:
            text, delimiter = self._builder.text(item), self._builder.delimiter
        else:
            chat = render_chat(self._template, self._builder.messages(item), add_generation_prompt=True)
            text, delimiter = chat + self._builder.answer_prefix(item), ""
        return [self._encoder.encode_pair(text, f"{delimiter}{option}") for option in options], _hash(text)


class ShotReader:
    """Reads the examples of a task, as many as its items need.

    An item is never its own example, nor is a copy of it.
    """

    def __init__(self, task: ItemTask, config: PromptConfig) -> None:
        """
        Raises:
            ValueError: the file cannot be read, or has too few examples.
        """
        self.config = config
        self._shots: list[TaskItem] = []
        self._others = iter(()) if config.shots_data is None else read_items_of_file(task, config.shots_data)
        if config.shots_data is None:
            return
        has_items = config.shots_data.resolve() == task.data.resolve()
        self._shots = list(islice(self._others, config.shots + has_items))
        if len(self._shots) < config.shots + has_items:
            self._reject(len(self._shots), "")

    def select(self, item: TaskItem) -> list[TaskItem]:
        """The first examples that are not the item.

        Raises:
            ValueError: the file has too few, or cannot be read.
        """
        selected: list[TaskItem] = []
        for index in count():
            if len(selected) == self.config.shots:
                break
            if index == len(self._shots):
                shot = next(self._others, None)
                if shot is None:
                    self._reject(len(selected), " besides the item and its copies")
                self._shots.append(shot)
            if _question_and_gold(self._shots[index]) != _question_and_gold(item):
                selected.append(self._shots[index])
        return selected

    def _reject(self, num_examples: int, which: str) -> NoReturn:
        raise ValueError(
            f"prompt.shots_data = {self.config.shots_data} has {num_examples} examples{which}, and prompt.shots = "
            f"{self.config.shots}: lower shots, or name a file with more"
        )


def _question_and_gold(item: TaskItem) -> tuple[str, str]:
    """What a copy of an item shares with it, whatever other fields it has."""
    return str(item.fields.get("question", "")).strip(), item.gold


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()
