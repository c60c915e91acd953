"""The prompt of an item: a template with its fields, after solved examples, as a text or a chat. No torch."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import count, islice
from string import Formatter
from typing import Any, NoReturn

from diffusionlm.evaluation.pair_encoding import EncodedPair, PairEncoder
from diffusionlm.evaluation.tasks.item_task import ItemTask, TaskItem
from diffusionlm.evaluation.tasks.items import read_items_of_file
from diffusionlm.inference.healing import HealedText
from diffusionlm.inference.request_builder import RequestBuilder
from tokenizer import ChatTemplate, render_chat


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


class PromptBuilder:
    """Builds the prompts of a task's items, and encodes them for a model."""

    def __init__(
        self,
        task: ItemTask,
        encoder: PairEncoder,
        chat_template: ChatTemplate | None = None,
        requests: RequestBuilder | None = None,
    ) -> None:
        """Read the examples.

        Args:
            chat_template: None: the prompts are texts.
            requests: encodes chats whose answers are decoded. None: nothing is decoded.

        Raises:
            ValueError: the file of the examples cannot be read, or has too few.
        """
        self.chat_template = chat_template
        self._encoder, self._requests = encoder, requests
        self.config = task.prompt_config
        defaults = (task.question_template, task.answer_template, task.delimiter)
        values = (self.config.template, self.config.answer_template, self.config.delimiter)
        self.template, self.answer_template, self.delimiter = (
            default if value is None else value for value, default in zip(values, defaults, strict=True)
        )
        self._shots: list[TaskItem] = []
        """Examples that have been read."""
        self._others: Iterator[TaskItem] = iter(())
        path = self.config.shots_data
        if path is not None:
            self._others = read_items_of_file(task, path)
            needed = self.config.shots + (task.data is not None and path.resolve() == task.data.resolve())
            self._shots = list(islice(self._others, needed))
            if len(self._shots) < needed:
                self._reject_shots(len(self._shots), "")

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
        if item.messages:
            return [dict(message) for message in item.messages]
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
        """The examples of an item: the first ones that are neither the item nor a copy of it. They are read as needed.

        Raises:
            ValueError: there are fewer than ``prompt.shots``.
        """
        selected: list[TaskItem] = []
        for index in count():
            if len(selected) == self.config.shots:
                break
            if index == len(self._shots):
                shot = next(self._others, None)
                if shot is None:
                    self._reject_shots(len(selected), " besides the item and its copies")
                self._shots.append(shot)
            if _question_and_gold(self._shots[index]) != _question_and_gold(item):
                selected.append(self._shots[index])
        return selected

    def encode(self, item: TaskItem) -> HealedText:
        """Encode a prompt whose answer is to be decoded.

        Raises:
            ValueError: a field is missing, or the chat template rejects the chat.
        """
        if self.chat_template is None:
            return HealedText(self._encoder.encode(self.text(item)))
        assert self._requests is not None, "only answers that are decoded are encoded alone"
        return self._requests.encode_chat(self.messages(item), item.tools, self.answer_prefix(item))

    def encode_options(self, item: TaskItem, options: Sequence[str]) -> list[EncodedPair]:
        """Encode a prompt with each of its possible continuations.

        Raises:
            ValueError: a field is missing, or the chat template rejects the chat.
        """
        if self.chat_template is None:
            text, delimiter = self.text(item), self.delimiter
        else:
            chat = render_chat(self.chat_template, self.messages(item), add_generation_prompt=True)
            text, delimiter = chat + self.answer_prefix(item), ""
        return [self._encoder.encode_pair(text, f"{delimiter}{option}") for option in options]

    def hash_prompt(self, item: TaskItem) -> str:
        """SHA-256 of the prompt: of the text, or of the chat and the beginning of the answer as JSON."""
        if self.chat_template is None:
            text = self.text(item)
        else:
            text = json.dumps([self.messages(item), item.tools, self.answer_prefix(item)], ensure_ascii=False)
        return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()

    def _reject_shots(self, num_examples: int, which: str) -> NoReturn:
        raise ValueError(
            f"prompt.shots_data = {self.config.shots_data} has {num_examples} examples{which}, and prompt.shots = "
            f"{self.config.shots}: lower shots, or name a file with more"
        )

    def _join_examples(self, item: TaskItem) -> str:
        """Examples and question as one text."""
        shots = [f"{self._question(shot)}{self.delimiter}{self._answer(shot)}" for shot in self.select_shots(item)]
        return self.config.separator.join([*shots, self._question(item)])

    def _question(self, item: TaskItem) -> str:
        return fill_template(self.template, item.fields, "prompt.template")

    def _answer(self, item: TaskItem) -> str:
        return fill_template(self.answer_template, item.fields, "prompt.answer_template")


def _question_and_gold(item: TaskItem) -> tuple[str, str]:
    """What a copy of an item shares with it, whatever other fields it has."""
    return str(item.fields.get("question", "")).strip(), item.gold
