"""Read the items of a task from a file, check them and select some. No torch."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from config.evaluation.tasks import (
    ClozeTask,
    ExactMatchTask,
    Gsm8kTask,
    HumanEvalTask,
    ItemTask,
    MultipleChoiceTask,
    TaskOptions,
)
from diffusionlm.data.chat.formats import ChatRowParser
from diffusionlm.data.chat.reference_answers import ReferenceAnswer, last_answer
from diffusionlm.data.sources.file_formats import read_json_records, read_parquet_records
from diffusionlm.data.sources.local_files import detect_format
from diffusionlm.data.sources.record_source import BadRecord, ParsedRecord, shorten_repr
from diffusionlm.evaluation.grading.extraction import extract_boxed, gold_gsm8k
from files.compressed import CorruptFileError

ID_FIELDS = ("task_id", "id", "ind", "index")
QUESTION_FIELDS = ("question", "ctx", "goal", "sentence", "prompt")
CHOICES_FIELDS = ("choices", "endings", "options")
PAIRED_CHOICES_FIELDS = ("sol1", "sol2")
"""Two fields in place of a list of options, as in PIQA."""
GOLD_FIELDS = ("gold", "answerKey", "label", "answer")
MAX_SHOWN_IDS = 5
MAX_OPTIONS = 26
"""Options have the letters A to Z."""


@dataclass(frozen=True)
class TaskItem:
    """One question with its right answer."""

    id: str
    fields: Mapping[str, Any]
    """What a template may name: the fields of the record, and those of the kind of task."""
    gold: str
    """The right answer; of options the text of the right one."""
    options: tuple[str, ...] = ()
    gold_index: int = 0
    """Index of the right option."""
    reference: ReferenceAnswer | None = None
    """Messages and answer of an exact_match task."""


@dataclass(frozen=True)
class _ItemParts:
    """What a kind of task reads from a record."""

    gold: str
    fields: dict[str, Any] = field(default_factory=dict)
    options: tuple[str, ...] = ()
    gold_index: int = 0
    reference: ReferenceAnswer | None = None


def read_task_items(task: ItemTask) -> list[TaskItem]:
    """Read the items of a task that are to be evaluated, in the order of the file.

    Raises:
        ValueError: the file cannot be read, a record is malformed or has no right answer, two items have the same id,
            an id of ``item_ids`` does not exist, or there are no items; names the file, and the line or item.
    """
    items = list(read_items_of_file(task, task.data))
    if not items:
        raise ValueError(f"{task.data}: has no items: name a file with at least one")
    return select_items(items, task)


def read_items_of_file(task: ItemTask, path: Path) -> Iterator[TaskItem]:
    """Read all items of a file in the format of a task, such as its examples; see `read_task_items`."""
    parse = ITEM_PARSERS[task.kind]
    places: dict[str, str] = {}
    for number, (record, place) in enumerate(_read_records(path)):
        item_id = _read_id(record, number, task, place)
        if item_id in places:
            raise ValueError(
                f"{place}: item {item_id!r} has the id of {places[item_id]}: ids must differ; correct the file, or "
                "name another field as id_field"
            )
        places[item_id] = place
        try:
            parts = parse(task, record)
        except ValueError as error:
            raise ValueError(f"{place}: item {item_id!r}: {error}") from None
        fields = {**record, **parts.fields}
        yield TaskItem(item_id, fields, parts.gold, parts.options, parts.gold_index, parts.reference)


def select_items(items: list[TaskItem], task: TaskOptions) -> list[TaskItem]:
    """Select ``item_ids``, and of these a random subset of ``limit``: those whose hash of seed and id is smallest, so
    that a larger limit adds items and takes none away.

    Raises:
        ValueError: an id does not exist.
    """
    if task.item_ids:
        wanted = set(task.item_ids)
        unknown = sorted(wanted - {item.id for item in items})
        if unknown:
            examples = ", ".join(repr(item.id) for item in items[:MAX_SHOWN_IDS])
            raise ValueError(f"item_ids: {unknown[0]!r} is no item of {task.data}; its first ids are {examples}")
        items = [item for item in items if item.id in wanted]
    if task.limit is None or task.limit >= len(items):
        return items
    ranked = sorted(items, key=lambda item: _hash_text(f"subset {task.seed} {item.id}"))
    selected = {item.id for item in ranked[: task.limit]}
    return [item for item in items if item.id in selected]


def draw_seed(seed: int, item_id: str, repeat: int) -> int:
    """Seed of an answer: a function of the task's seed, the item and the number of the repeat."""
    return int(_hash_text(f"answer {seed} {repeat} {item_id}")[:12], 16)


def _hash_text(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()


def _read_records(path: Path) -> Iterator[tuple[dict[str, Any], str]]:
    """Iterate over the records of a file, each with its place for errors.

    Raises:
        ValueError: the file or a record cannot be read.
    """
    file_format = detect_format(path)
    if file_format not in ("json", "parquet"):
        raise ValueError(f"{path}: items are read from .jsonl, .json or .parquet files: rename or convert the file")
    unit = "row" if file_format == "parquet" else "line"
    records: Iterator[ParsedRecord]
    try:
        if file_format == "parquet":
            records = read_parquet_records(path, _dump_row, 0, "data")
        else:
            records = read_json_records(path, _dump_row, 0, 0)
        for content, _, line in records:
            place = f"{path}: {unit} {line}"
            if isinstance(content, BadRecord):
                raise ValueError(f"{place}: {content.reason} ({content.detail}): correct the file")
            yield json.loads(str(content)), place
    except CorruptFileError as error:
        raise ValueError(f"{path}: {error}") from None
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from None


def _dump_row(row: Mapping[str, Any]) -> str | BadRecord:
    try:
        text = json.dumps(row, ensure_ascii=False)
        text.encode()
    except UnicodeEncodeError:
        return BadRecord("lone surrogate", "a text has half of a character")
    except TypeError as error:
        return BadRecord("value without a JSON form", str(error))
    return text


def _read_id(record: Mapping[str, Any], number: int, task: TaskOptions, place: str) -> str:
    names = ID_FIELDS if task.id_field is None else (task.id_field,)
    value = next((record[name] for name in names if name in record), None)
    if value is None and task.id_field is not None:
        raise ValueError(f"{place}: no field {task.id_field!r} (id_field); its fields are {_list_fields(record)}")
    return str(number if value is None else value)


def _list_fields(record: Mapping[str, Any]) -> str:
    return ", ".join(map(repr, record)) or "none"


def _find_field(record: Mapping[str, Any], key: str, name: str | None, candidates: tuple[str, ...]) -> Any:
    """The value of the field that ``key`` of the task names, else of the first candidate that the record has.

    Raises:
        ValueError: there is no such field, or it is null.
    """
    names = candidates if name is None else (name,)
    value = next((record[field_name] for field_name in names if record.get(field_name) is not None), None)
    if value is None:
        raise ValueError(
            f"has no {' or '.join(names)} ({key}); its fields are {_list_fields(record)}: correct the file, or name "
            f"the field as {key}"
        )
    return value


def _find_text(record: Mapping[str, Any], key: str, name: str | None, candidates: tuple[str, ...] = ()) -> str:
    value = _find_field(record, key, name, candidates)
    if not isinstance(value, str) or not value.strip():
        problem = "is empty" if isinstance(value, str) else f"is {value!r}, not a text"
        raise ValueError(f"the field of {key} {problem}: correct the file, or name another field")
    return value


# ----------------------------------------------------------------------------------------------------------------------
# Kinds of tasks


def _parse_gsm8k(task: Gsm8kTask, record: Mapping[str, Any]) -> _ItemParts:
    question = _find_text(record, "question_field", task.question_field)
    value = _find_field(record, "answer_field", task.answer_field, ())
    answer = str(value) if isinstance(value, int | float) else value
    if not isinstance(answer, str):
        raise ValueError(f"the field of answer_field is {value!r}, expected a text or a number")
    return _ItemParts(_read_gold_number(answer), {"question": question, "answer": answer})


def _read_gold_number(answer: str) -> str:
    """The number after ####, else in the last box, else the whole text.

    Raises:
        ValueError: there is none.
    """
    if "####" in answer:
        return gold_gsm8k(answer)
    try:
        return gold_gsm8k(f"#### {extract_boxed(answer) or answer}")
    except ValueError:
        raise ValueError(
            f'the answer {shorten_repr(answer)} is no number, and has no "#### NUMBER" at its end'
        ) from None


def _parse_humaneval(task: HumanEvalTask, record: Mapping[str, Any]) -> _ItemParts:
    fields = {
        name: _find_text(record, f"{name}_field", getattr(task, f"{name}_field"))
        for name in ("prompt", "test", "entry_point")
    }
    solution = record.get("canonical_solution")
    gold = solution if isinstance(solution, str) else ""
    return _ItemParts(gold, {**fields, "question": fields["prompt"], "answer": gold})


def _parse_multiple_choice(task: MultipleChoiceTask, record: Mapping[str, Any]) -> _ItemParts:
    question = _find_text(record, "question_field", task.question_field, QUESTION_FIELDS)
    if task.choices_field is None and all(name in record for name in PAIRED_CHOICES_FIELDS):
        choices: Any = [record[name] for name in PAIRED_CHOICES_FIELDS]
    else:
        choices = _find_field(record, "choices_field", task.choices_field, CHOICES_FIELDS)
    options, labels = _read_options(choices)
    gold = _find_gold(_find_field(record, "gold_field", task.gold_field, GOLD_FIELDS), options, labels)
    letters = [chr(ord("A") + index) for index in range(len(options))]
    fields = {
        "question": question,
        "answer": letters[gold] if task.score == "letters" else options[gold],
        "choices": list(options),
        "letters": ", ".join(letters),
        "options": "\n".join(f"{letter}. {option}" for letter, option in zip(letters, options, strict=True)),
    }
    return _ItemParts(options[gold], fields, options, gold)


def _read_options(value: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Texts and labels of the options.

    Raises:
        ValueError: there are fewer than two texts, more than have letters, or an empty one.
    """
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
    """Index of the right option.

    Raises:
        ValueError: the value names no option, or different ones.
    """
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


def _parse_cloze(task: ClozeTask, record: Mapping[str, Any]) -> _ItemParts:
    text = _find_text(record, "text_field", task.text_field)
    if task.answer_field is not None:
        context, answer = text.rstrip(), _find_text(record, "answer_field", task.answer_field).strip()
    else:
        context, _, answer = text.rstrip().rpartition(" ")
        if not context.strip() or not answer:
            raise ValueError(f"its text {text!r} has no context before the last word")
    return _ItemParts(answer, {"context": context, "question": context, "answer": answer})


def _parse_exact_match(task: ExactMatchTask, record: Mapping[str, Any]) -> _ItemParts:
    conversation = ChatRowParser(task.chat)(record)
    if isinstance(conversation, BadRecord):
        raise ValueError(f"{conversation.reason} ({conversation.detail}): correct the file")
    reference = last_answer(conversation)
    return _ItemParts(reference.answer.strip(), reference=reference)


ITEM_PARSERS: dict[str, Callable[[Any, Mapping[str, Any]], _ItemParts]] = {
    "gsm8k": _parse_gsm8k,
    "humaneval": _parse_humaneval,
    "multiple_choice": _parse_multiple_choice,
    "cloze": _parse_cloze,
    "exact_match": _parse_exact_match,
}
"""Kind of task -> what it reads from a record."""
