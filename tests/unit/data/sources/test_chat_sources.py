"""Conversations from JSON lines, JSON, Parquet and datasets: the same rows, nothing lost, nothing in both splits."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from config.data import DataConfig
from config.make_data import MakeDataConfig
from config.model import ModelConfig
from config.training.objective import MaskedDiffusionConfig
from diffusionlm.data.loader import Loader
from diffusionlm.data.packing import Row, pad_to_longest
from diffusionlm.data.pipeline import build_row_reader, count_skipped, describe_skipped, open_components
from diffusionlm.data.sources import open_source
from diffusionlm.diffusion.objectives import build_objective
from tests.unit.data.chat_cases import chat, chat_tokenizer

Drain = Callable[..., list[Any]]
ROWS = [chat(f"question {index}", f"answer {index * index}") for index in range(120)]


def write(path: Path, rows: list[Any]) -> Path:
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=50)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows, indent=1))
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def config_of(path: Path, chat_options: dict[str, Any] | None = None, **source: Any) -> DataConfig:
    values = {"kind": "files", "paths": [str(path)], "chat": chat_options or {}, **source}
    return DataConfig.model_validate({"source": values, "document_shuffle_window": 0, "row_shuffle_window": 0})


def read_all(config: DataConfig, split: Any = "train") -> list[Any]:
    conversations, position = open_source(config.components[0].source, split, "data.source").read(0, None, 10_000)  # type: ignore[arg-type]
    assert position is None
    return conversations


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.parquet", "hub"])
def test_every_file_format_gives_the_same_conversations(name: str, tmp_path: Path) -> None:
    expected = read_all(config_of(write(tmp_path / "expected.jsonl", ROWS)))
    assert len(expected) > 90
    if name == "hub":
        folder = tmp_path / "dataset"
        folder.mkdir()
        write(folder / "train.jsonl", ROWS)
        values = {"kind": "hub", "dataset": str(folder), "validation_fraction": 0.05, "chat": {}}
        config = DataConfig.model_validate({"source": values})
    else:
        config = config_of(write(tmp_path / name, ROWS))
    assert read_all(config) == expected
    held_out = read_all(config, "validation")
    assert len(held_out) + len(expected) == len(ROWS)
    assert all(item not in expected for item in held_out), "a hash of the conversation decides"


def test_keys_that_only_some_messages_have(tmp_path: Path) -> None:
    """Parquet has null for them in all others."""
    call = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    other = {"type": "function", "function": {"name": "g", "arguments": {"y": 2}}}
    answers = [{"role": "assistant", "content": "", "tool_calls": [item]} for item in (call, other)]
    rows = [{"messages": [{"role": "user", "content": "q"}, answer]} for answer in answers] * 2 + ROWS[:2]
    held_out = [str(write(tmp_path / "v.jsonl", ROWS[:1]))]
    texts = [
        read_all(config_of(write(tmp_path / name, rows), validation_paths=held_out))
        for name in ("a.jsonl", "a.parquet")
    ]
    assert texts[0] == texts[1] and len(texts[0]) == len(rows)


def test_bad_rows_name_file_and_line_or_are_counted(tmp_path: Path) -> None:
    bad = [{"messages": [{"role": "wizard", "content": "x"}]}, chat("a", " "), {"text": "x"}, [1]]
    path = write(tmp_path / "a.jsonl", [*ROWS[:60], bad[0], *ROWS[60:], *bad[1:]])
    with pytest.raises(ValueError, match=r"data.source.chat: .*a.jsonl, line 61: unknown role: 'wizard'.*on_bad_row"):
        read_all(config_of(path))
    with path.open("a") as file:
        file.write(f'\n{{"messages": {"9" * 5000}}}')  # more digits than Python reads
    config = config_of(path, on_bad_row="skip")
    (component,) = open_components(config, "train")
    tokenizer = chat_tokenizer()
    reader = build_row_reader([component], config, tokenizer, 64, 0, repeat=False)
    rows, _ = reader.read(0, None, 1000)
    assert len(read_all(config)) + len(read_all(config, "validation")) == len(ROWS)
    reasons = ("unknown role", "empty answer", "no conversation", "not an object", "malformed JSON")
    assert count_skipped([component]) == dict.fromkeys(reasons, 1)
    assert sum(log.num_left_out for log in component.skip_logs) == len(reasons) and len(rows) > 50
    log = component.skip_logs[0]
    assert log.total == len(ROWS) + len(reasons) and set(log.examples) == set(reasons)
    assert "a.jsonl, line 61: 'wizard'; name it in chat.roles" in log.examples["unknown role"]


@pytest.mark.parametrize("turns", ["expand", "all"])
def test_a_resumed_loader_counts_each_record_once(
    turns: str, tmp_path: Path, make_config: Callable[..., ModelConfig]
) -> None:
    """Of the source and of the encoder, although their windows are read again."""
    rows = [
        *ROWS[:30],
        chat("a", " "),
        chat("q" * 200, "a"),
        *ROWS[30:80],
        {"text": "x"},
        chat("q" * 200, "b"),
        *ROWS[80:],
    ]
    path = write(tmp_path / "a.jsonl", rows)
    objective = build_objective(MaskedDiffusionConfig(), make_config(vocab_size=260, mask_token_id=257))
    values = config_of(path, {"turns": turns, "eos_padding": "none"}, on_bad_row="skip").model_dump()
    config = DataConfig.model_validate(values | {"document_shuffle_window": 16, "row_shuffle_window": 7})

    def make() -> Loader:
        components = open_components(config, "train")
        return Loader(
            build_row_reader(components, config, chat_tokenizer(), 80, 0), objective, 4, 4, 0, components=components
        )

    loader, states = make(), []
    while loader.epoch < 2:
        states.append(json.loads(json.dumps(loader.state_dict())))
        loader.next_step(len(states))
    (expected,) = loader.state_dict()["skip_logs"]
    assert [sum(log["counts"].values()) for log in expected] == [2, 2] and expected[0]["total"] == len(rows)
    for start in range(0, len(states), 15):
        resumed = make()
        resumed.load_state_dict(states[start])
        for step in range(start, len(states)):
            resumed.next_step(step)
        assert resumed.state_dict()["skip_logs"] == [expected]
    older = make()
    older.load_state_dict({key: value for key, value in states[3].items() if key != "skip_logs"})
    assert older.next_step(3).state["padding"] > 0


def test_too_long_conversations_are_counted_and_none_left_is_an_error(
    tmp_path: Path, make_config: Callable[..., ModelConfig]
) -> None:
    config = config_of(write(tmp_path / "a.jsonl", [*ROWS, chat("q" * 100, "a")]))
    components = open_components(config, "train")
    tokenizer = chat_tokenizer()
    rows, _ = build_row_reader(components, config, tokenizer, 70, 0).read(0, None, 1000)
    assert rows and count_skipped(components) == {"longer than a row": 1}
    components = open_components(config, "train")
    reader = build_row_reader(components, config, tokenizer, 20, 0)
    objective = build_objective(MaskedDiffusionConfig(), make_config(vocab_size=260, mask_token_id=257))
    loader = Loader(reader, objective, 4, 4, 0, components=components)
    with pytest.raises(
        ValueError,
        match=r"no documents to train on \(left out: .* longer than a row; the first: .*a.jsonl, line",
    ):
        loader.next_step(0)
    assert describe_skipped(components).startswith(" (left out: ")


def test_few_conversations_are_not_cut(tmp_path: Path) -> None:
    """Two of four or more are held out: a bound over one row has no standard error."""
    for number, expected in ((2, (1, 1)), (3, (2, 1)), (4, (2, 2)), (8, (6, 2))):
        config = config_of(write(tmp_path / "a.jsonl", ROWS[:number]))
        assert (len(read_all(config)), len(read_all(config, "validation"))) == expected
    with pytest.raises(ValueError, match="only one conversation"):
        read_all(config_of(write(tmp_path / "b.jsonl", ROWS[:1] * 5)))


def test_text_and_conversations_in_one_run(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text("\n\n".join(f"paragraph {index} of text" for index in range(300)))
    text = {"kind": "files", "paths": [str(tmp_path / "t.txt")], "sample_by": "paragraph"}
    chats = {"kind": "files", "paths": [str(write(tmp_path / "a.jsonl", ROWS))], "chat": {}}
    config = DataConfig.model_validate({"mixture": [{"source": text}, {"source": chats}]})
    tokenizer = chat_tokenizer()
    components = open_components(config, "train")
    rows, _ = build_row_reader(components, config, tokenizer, 64, 0, block_length=4).read(0, None, 40)
    kinds = set()
    for row in rows:
        assert row.segment_ids_L is not None and row.is_eos_padding_L is not None
        kinds.add(bool((row.loss_mask_L == (row.document_ids_L >= 0)).all()))
        assert ((row.segment_ids_L >= 0) == (row.document_ids_L >= 0)).all()
    assert kinds == {True, False}
    with pytest.raises(ValueError, match="differ between the sources"):
        DataConfig.model_validate(
            {"mixture": [{"source": chats}, {"source": {**chats, "chat": {"template": "llama3"}}}]}
        )
    with pytest.raises(ValueError, match="random_length_probability"):
        DataConfig.model_validate({"source": chats, "random_length_probability": 0.1})


def test_padding_to_the_longest_of_a_step(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [chat("q", "a" * (1 + index % 7)) for index in range(100)])
    with pytest.raises(ValueError, match="padded"):
        config_of(path, {"eos_padding": "batch_max"})
    values = {"kind": "files", "paths": [str(path)], "chat": {"eos_padding": "batch_max"}}
    config = DataConfig.model_validate({"source": values, "rows": "padded"})
    tokenizer = chat_tokenizer()
    batches: list[list[Row]] = []
    reader = build_row_reader(open_components(config, "train"), config, tokenizer, 64, 0)
    for _ in range(3):
        rows, _ = reader.read(0, None, 10)
        batches.append(pad_to_longest(rows))
    for before, row in zip(rows, batches[-1], strict=True):
        assert row.is_eos_padding_L is not None and row.segment_ids_L is not None
        size, old_size = int((row.document_ids_L >= 0).sum()), int((before.document_ids_L >= 0).sum())
        assert size == max(int((other.document_ids_L >= 0).sum()) for other in rows)
        assert row.is_eos_padding_L.nonzero()[0].tolist() == list(range(old_size, size))
        assert row.loss_mask_L[old_size:size].all() and not row.loss_mask_L[size:].any()
        assert not row.segment_ids_L[:size].any() and (row.segment_ids_L[size:] == -1).all()
        assert (row.tokens_L[old_size:] == tokenizer.eos_token_id).all()


def test_make_data_and_plain_text_refuse_conversations(tmp_path: Path) -> None:
    source = {"kind": "files", "paths": [str(write(tmp_path / "a.jsonl", ROWS))], "chat": {}}
    with pytest.raises(ValueError, match="cannot hold conversations"):
        MakeDataConfig.model_validate({"source": source, "output": {"directory": "x"}})
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(ValueError, match="reads conversations from JSON or Parquet"):
        read_all(config_of(tmp_path / "a.txt"))
