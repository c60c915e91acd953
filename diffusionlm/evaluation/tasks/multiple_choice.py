"""Questions with options: the most probable option is chosen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from config.base import NonEmptyStr
from diffusionlm.evaluation.tasks.item_task import (
    ItemTask,
    LikelihoodTask,
    PromptConfig,
    TaskItem,
    find_field,
    find_text,
)
from diffusionlm.evaluation.tasks.results import Verdict

QUESTION_FIELDS = ("question", "ctx", "goal", "sentence", "prompt")
CHOICES_FIELDS = ("choices", "endings", "options")
PAIRED_CHOICES_FIELDS = ("sol1", "sol2")
"""Two fields in place of a list of options, as in PIQA."""
GOLD_FIELDS = ("gold", "answerKey", "label", "answer")
MAX_OPTIONS = 26
"""Options have the letters A to Z."""
LETTER_TEMPLATE = "{question}\n{options}\nAnswer:"
"""Default prompt with score = "letters", as in MMLU."""


class MultipleChoiceTask(LikelihoodTask, ItemTask):
    """Questions with options, of which the most probable one is chosen: `acc` by log-likelihood, `acc_norm` per
    character, `acc_bytes` per byte, as lm-evaluation-harness. Fields: `question` (or `ctx`, `goal`, ...), `choices` (or
    `endings`; ARC's `text` and `label`; PIQA's `sol1`, `sol2`), `gold` (or `answer`, `label`, `answerKey`) as index,
    letter, label or text."""

    kind: Literal["multiple_choice"] = "multiple_choice"
    question_field: NonEmptyStr | None = None
    """None: question, ctx, goal, sentence or prompt, the first that an item has."""
    choices_field: NonEmptyStr | None = None
    """A list of texts, or an object of lists text and label (ARC). None: choices, endings, options,
    or the two fields sol1 and sol2 (PIQA)."""
    gold_field: NonEmptyStr | None = None
    """The right option: its index from 0, its letter or label, or its text. None: gold, answerKey, label or answer."""
    score: Literal["texts", "letters"] = "texts"
    """What is scored after the prompt. texts: the options themselves. letters: A, B, C, ..., with a template that lists
    the options."""

    @property
    def prompt_config(self) -> PromptConfig:
        if self.score == "letters" and self.prompt.template is None:
            return self.prompt.model_copy(update={"template": LETTER_TEMPLATE})
        return self.prompt

    @property
    def rules(self) -> tuple[str, ...]:
        return ("acc", "acc_norm", "acc_bytes")

    def parse_item(self, record: Mapping[str, Any]) -> TaskItem:
        question = find_text(record, "question_field", self.question_field, QUESTION_FIELDS)
        if self.choices_field is None and all(name in record for name in PAIRED_CHOICES_FIELDS):
            choices: Any = [record[name] for name in PAIRED_CHOICES_FIELDS]
        else:
            choices = find_field(record, "choices_field", self.choices_field, CHOICES_FIELDS)
        options, labels = _read_options(choices)
        gold = _find_gold(find_field(record, "gold_field", self.gold_field, GOLD_FIELDS), options, labels)
        letters = _list_letters(options)
        fields = {
            "question": question,
            "answer": letters[gold] if self.score == "letters" else options[gold],
            "choices": list(options),
            "letters": ", ".join(letters),
            "options": "\n".join(f"{letter}. {option}" for letter, option in zip(letters, options, strict=True)),
        }
        return TaskItem(options[gold], fields, options, gold)

    def list_options(self, item: TaskItem) -> tuple[str, ...]:
        return _list_letters(item.options) if self.score == "letters" else item.options

    def list_divisors(self, options: Sequence[str]) -> dict[str, tuple[float, ...]]:
        return {
            "acc": (1.0,) * len(options),
            "acc_norm": tuple(float(len(option)) for option in options),
            "acc_bytes": tuple(float(len(option.encode())) for option in options),
        }

    def judge(self, item: TaskItem, log_likelihoods: Sequence[float], is_greedy: bool) -> Verdict:
        chosen = {}
        for rule, divisors in self.list_divisors(self.list_options(item)).items():
            values = [value / divisor for value, divisor in zip(log_likelihoods, divisors, strict=True)]
            chosen[rule] = values.index(max(values))
        return Verdict({rule: float(index == item.gold_index) for rule, index in chosen.items()}, chosen=chosen)


def _list_letters(options: Sequence[str]) -> tuple[str, ...]:
    return tuple(chr(ord("A") + index) for index in range(len(options)))


def _read_options(value: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
    labels: Any = ()
    texts = value
    if isinstance(value, Mapping):
        texts, labels = value.get("text"), value.get("label") or ()
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"the options are {value!r}, expected a list of texts, or lists text and label")
    if not 2 <= len(texts) <= MAX_OPTIONS:
        raise ValueError(f"it has {len(texts)} options, expected 2 to {MAX_OPTIONS}")
    if not all(text.strip() for text in texts):
        raise ValueError("an option is empty, and has no likelihood")
    if labels and len(labels) != len(texts):
        raise ValueError(f"it has {len(texts)} options and {len(labels)} labels")
    return tuple(texts), tuple(map(str, labels))


def _find_gold(value: Any, options: tuple[str, ...], labels: tuple[str, ...]) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        indices = {value}
    elif isinstance(value, str) and value in labels:
        indices = {labels.index(value)}
    elif isinstance(value, str):
        indices = {index for index, option in enumerate(options) if option == value}
        if value.strip().isascii() and value.strip().isdigit():
            indices.add(int(value))
        if len(value) == 1 and "A" <= value <= "Z":
            indices.add(ord(value) - ord("A"))
    else:
        indices = set()
    valid = [index for index in indices if 0 <= index < len(options)]
    if not valid:
        raise ValueError(f"the right option {value!r} is no index, letter, label or text of its {len(options)} options")
    if len(valid) > 1:
        raise ValueError(f"the right option {value!r} is ambiguous: options {sorted(valid)}; write a number, from 0")
    return valid[0]
