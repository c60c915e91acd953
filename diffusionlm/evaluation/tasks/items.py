"""Read the items of a task, check them and select some."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from diffusionlm.data.chat.conversation import identify_images
from diffusionlm.data.sources.file_formats import read_json_records, read_parquet_records
from diffusionlm.data.sources.local_files import detect_format
from diffusionlm.data.sources.record_source import BadRecord
from diffusionlm.evaluation.tasks.item_task import ItemTask, TaskItem, list_fields
from files.compressed import CorruptFileError
from files.usage_error import prefix_errors

ID_FIELDS = ("task_id", "id", "ind", "index")
MAX_SHOWN_IDS = 5


def read_task_items(task: ItemTask) -> list[TaskItem]:
    """Read the items of a task that are to be evaluated, in the order of the file.

    Raises:
        ValueError: the file cannot be read, a record is malformed or has no right answer, two items have the same id,
            an id of ``item_ids`` does not exist, or there are no items; names the file, and the line or item.
    """
    items = task.read_source() if task.data is None else list(read_items_of_file(task, task.data))
    if not items:
        raise ValueError(f"{task.data}: has no items: name a file with at least one")
    return select_items(items, task)


def read_items_of_file(task: ItemTask, path: Path) -> Iterator[TaskItem]:
    """Read all items of a file in the format of a task, such as its examples; see `read_task_items`."""
    places: dict[str, str] = {}
    for number, (record, place) in enumerate(_read_records(path)):
        item_id = _read_id(record, number, task, place)
        if item_id in places:
            raise ValueError(
                f"{place}: item {item_id!r} has the id of {places[item_id]}: ids must differ; correct the file, or "
                "name another field as id_field"
            )
        places[item_id] = place
        with prefix_errors(f"{place}: item {item_id!r}"):
            json.dumps(record, ensure_ascii=False, default=str).encode()  # refuses half of a character
            item = task.parse_item(record)
            images = () if item.messages else _read_images(record, path.parent)
        yield replace(item, id=item_id, fields={**record, **item.fields}, images=images)


def select_items(items: list[TaskItem], task: ItemTask) -> list[TaskItem]:
    """Select ``item_ids``, and of these a random subset of ``limit``: those whose hash of seed and id is smallest, so
    that a larger limit adds items and takes none away.
    """
    if task.item_ids:
        unknown = sorted(set(task.item_ids) - {item.id for item in items})
        if unknown:
            examples = ", ".join(repr(item.id) for item in items[:MAX_SHOWN_IDS])
            raise ValueError(f"item_ids: {unknown[0]!r} is no item of {task.data}; its first ids are {examples}")
        items = [item for item in items if item.id in task.item_ids]
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
    """Iterate over the records of a file, each with its place for errors."""
    file_format = detect_format(path)
    if file_format not in ("json", "parquet"):
        raise ValueError(f"{path}: items are read from .jsonl, .json or .parquet files: rename or convert the file")
    parse: Any = dict  # the whole record
    try:
        if file_format == "parquet":
            records, unit = read_parquet_records(path, parse, 0, "data"), "row"
        else:
            records, unit = read_json_records(path, parse, 0, 0), "line"
        for record, _, line in records:
            place = f"{path}: {unit} {line}"
            if isinstance(record, BadRecord):
                raise ValueError(f"{place}: {record.reason} ({record.detail}): correct the file")
            yield cast(dict[str, Any], record), place
    except CorruptFileError as error:
        raise ValueError(f"{path}: {error}") from None
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from None


def _read_images(record: Mapping[str, Any], folder: Path) -> tuple[Mapping[str, Any], ...]:
    values = record.get("image") if record.get("images") is None else record["images"]
    images = values if isinstance(values, list) else [values] * (values is not None)
    parts = [{"type": "image", "image": image} for image in images]
    [message] = identify_images([{"role": "user", "content": parts}], folder)
    return tuple(message["content"])


def _read_id(record: Mapping[str, Any], number: int, task: ItemTask, place: str) -> str:
    names = ID_FIELDS if task.id_field is None else (task.id_field,)
    value = next((record[name] for name in names if name in record), None)
    if value is None and task.id_field is not None:
        raise ValueError(f"{place}: no field {task.id_field!r} (id_field); its fields are {list_fields(record)}")
    return str(number if value is None else value)
