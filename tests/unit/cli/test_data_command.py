"""diffusionlm-data: rows with their prompts, targets and EOS padding, and numbers that agree with the rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from rich.text import Text

from cli.data import main
from cli.data.rows import STYLES, RowSource, format_row, read_rows, row_to_json
from config.finetune.preference import KTOLossConfig, PreferenceConfig
from config.load import load_config
from config.train import TrainConfig
from diffusionlm.data.pipeline import open_components
from diffusionlm.evaluation.validation import Validator
from diffusionlm.vision.messages import IMAGE_TOKENS
from diffusionlm.vision.processor import save_processor
from tests.tiny_run import write_train_config
from tests.unit.cli.conftest import Fails
from tests.unit.data.chat_cases import VISION, chat, chat_tokenizer, image_processor, image_tokenizer, picture
from tokenizer import save_tokenizer

BEGIN, _, END = IMAGE_TOKENS
LONG_ROWS = [chat(letter * 200, "z") for letter in "abc"]

EXPECTED = """\
prompts as they are, [[learned tokens]], {EOS padding}, | begins a block; --full shows rows in full

row 1: 56 of 70 positions, 13 learned
- document 1, segment 1: 21 context, 3 learned, 0 EOS padding
<|im_start|>user
q0<|im_end|>
<|im_start|>assis|tant
[[a0<|im_end|>]]
- document 1, segment 2: 22 context, 3 learned, 7 EOS padding

<|im_start|>user
r0<|im_end|>
<|im_start|>assi|stant
[[b0<|im_end|>]]{7 x <|endoftext|>}
"""


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, str]:
    """A file of six conversations of two turns, two bad rows and three long ones; and a tokenizer."""
    rows: list[Any] = [chat(f"q{index}", f"a{index}", f"r{index}", f"b{index}") for index in range(6)]
    path = tmp_path / "chats.jsonl"
    path.write_text("\n".join(map(json.dumps, [*rows, {"messages": []}, chat("x", ""), *LONG_ROWS])))
    save_tokenizer(chat_tokenizer(), tmp_path / "tokenizer")
    return str(path), str(tmp_path / "tokenizer")


def test_rows_are_shown_with_their_targets(files: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    path, tokenizer = files
    arguments = [path, "--tokenizer", tokenizer, "--row-length", "70", "--block-length", "16", "--rows", "1"]
    main(arguments)
    output = capsys.readouterr().out
    row, _, counts = output.partition("\n\nrows")
    number = next(line for line in row.split("\n") if line.startswith("[[a"))[3]
    assert row.replace(f"{number}<", "0<").strip() == EXPECTED.strip()
    assert "\x1b" not in output
    for line in ("of 70 positions (of an epoch)", "blocks               16 tokens", "1                  empty answer"):
        assert line in counts, output
    assert "longer than a row" in counts and "1                  no messages" in counts


def test_long_rows_are_shortened_unless_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They fit a terminal; beginnings and ends are there, and numbers of what is between."""
    lengths = (9, 200, 150, 120, 300)
    rows = [chat(f"begin {'q ' * length}end", f"first {'a ' * length}last", "r", "b") for length in lengths]
    path = tmp_path / "chats.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    save_tokenizer(chat_tokenizer(), tmp_path / "tokenizer")
    arguments = [str(path), "--tokenizer", str(tmp_path / "tokenizer"), "--row-length", "9000", "--rows", "1"]
    main(arguments)
    short = capsys.readouterr().out
    assert len(short) < 2500 and "tokens ...>" in short and "more segments" in short
    assert all(word in short for word in ("begin", "end", "first", "last<|im_end|>]]"))
    main([*arguments, "--full"])
    full = capsys.readouterr().out
    assert "tokens ...>" not in full and "more segments" not in full and "a " * 300 in full


def test_json_agrees_with_the_rows(files: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    path, tokenizer = files
    main([path, "--tokenizer", tokenizer, "--row-length", "100", "--json", "--rows", "1000"])
    result = json.loads(capsys.readouterr().out)
    rows, counts = result["rows"], result["counts"]
    assert counts["rows"] == len(rows) and counts["is_complete"]
    assert counts["targets"] == sum(map(sum, (row["loss_mask"] for row in rows)))
    assert counts["eos_padding"] == sum(map(sum, (row["is_eos_padding"] for row in rows)))
    assert counts["documents"] == counts["answers"] == sum(max(row["document_ids"]) + 1 for row in rows)
    # Nothing is held out: everything in the file is counted.
    assert counts["skipped"] == {"no messages": 1, "empty answer": 1, "longer than a row": len(LONG_ROWS)}
    for row in rows:
        for segment in row["segments"]:
            assert segment["context"].endswith("<|im_start|>assistant\n") and segment["answer"].endswith("<|im_end|>")
            assert not segment["eos_padding"].replace("<|endoftext|>", "")


def open_preferences(
    folder: Path, rows: list[dict[str, Any]], objective: PreferenceConfig, **chat_options: Any
) -> RowSource:
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    chat_options = {"eos_padding": "none", **chat_options}
    data = {"source": {"kind": "files", "paths": [str(folder / "rows.jsonl")], "chat": chat_options}}
    path = write_train_config(folder, model={"max_position_embeddings": 200}, data=data | {"row_length": 200})
    config = load_config(TrainConfig, path).model_copy(update={"objective": objective})
    return RowSource(config, "train", open_components(config.data, "train"), chat_tokenizer())


def test_preferences_are_rows_of_pairs(tmp_path: Path) -> None:
    rows = [{"prompt": f"q{index}", "chosen": "yes", "rejected": "no"} for index in range(9)]
    source = open_preferences(tmp_path, rows, PreferenceConfig())
    for row in read_rows(source):
        answers = [segment["answer"] for segment in row_to_json(row, source.tokenizer)["segments"]]
        assert answers == ["yes<|im_end|>", "no<|im_end|>"]


def test_labeled_answers_are_shown_with_their_labels(tmp_path: Path) -> None:
    rows = [{"prompt": f"q{index}", "completion": "yes", "label": index % 2 == 0} for index in range(8)]
    source = open_preferences(tmp_path, rows, PreferenceConfig(loss=KTOLossConfig()), format="unpaired")
    shown = list(read_rows(source))
    labels = [row_to_json(row, source.tokenizer)["is_desirable"] for row in shown]
    assert [True] in labels and [False] in labels
    heads = [part.plain for part in format_row(shown[0], 2, source, is_full=True) if isinstance(part, Text)]
    assert heads[0].endswith(", desirable" if shown[0].is_desirable_1 else ", undesirable")


def test_a_training_config_with_its_own_tokenizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = write_train_config(
        tmp_path,
        model={"max_position_embeddings": 200},
        data={"source": {"kind": "chat_tasks", "documents_per_epoch": 30, "chat": {"template": "chatml"}}},
        tokenizer={"vocab_size": 262, "special_tokens": ["<|im_start|>", "<|im_end|>"]},
    )
    main(["--config", str(config), "--rows", "1", "--split", "validation"])
    output = capsys.readouterr().out
    assert "<|im_end|>]]" in output and "none, both directions" in output and not (tmp_path / "run").exists()
    rows = RowSource.open(load_config(TrainConfig, config), "train")
    parts = format_row(next(read_rows(rows)), 1, rows, is_full=True)
    [text] = (part for part in parts[:4] if isinstance(part, Text) and "[[" in part.plain)
    styled = {str(span.style): text.plain[span.start : span.end] for span in text.spans}
    assert (styled[STYLES["stop"]], styled[STYLES["answer"]]) == ("<|im_end|>", "]]")
    assert styled[STYLES["eos_padding"]].endswith("}")
    main(["--config", str(write_train_config(tmp_path, "text")), "--rows", "1"])
    assert "[[the cat" in capsys.readouterr().out


def test_the_validation_split_is_what_the_validator_sees(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = {
        "kind": "chat_tasks",
        "documents_per_epoch": 30,
        "chat": {"template": "chatml", "eos_padding": "batch_max"},
    }
    path = write_train_config(
        tmp_path,
        run={"seed": 5},
        model={"max_position_embeddings": 96},
        data={"source": source, "rows": "padded", "document_shuffle_window": 64},
        tokenizer={"vocab_size": 262, "special_tokens": ["<|im_start|>", "<|im_end|>"]},
        validation={"rows": 6, "final_rows": 10},
    )
    main(["--config", str(path), "--rows", "100", "--split", "validation", "--json"])
    result = json.loads(capsys.readouterr().out)
    config = load_config(TrainConfig, path)
    tokenizer = RowSource.open(config, "validation").tokenizer
    validated = Validator(config, tokenizer, []).rows
    assert [row["loss_mask"] for row in result["rows"]] == [row.loss_mask_L.tolist() for row in validated]
    assert [row["tokens"] for row in result["rows"]] == [row.tokens_L.tolist() for row in validated]
    assert result["counts"]["rows"] == 10
    lengths = [int((row.document_ids_L >= 0).sum()) for row in validated]
    assert [len(set(lengths[start : start + 4])) for start in (0, 4, 8)] == [1, 1, 1], "filled like steps of 4 rows"
    num_eos_padding = sum(int(row.is_eos_padding_L.sum()) for row in validated if row.is_eos_padding_L is not None)
    assert result["counts"]["eos_padding"] == num_eos_padding > 0


def test_settings_of_files_can_be_changed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a 'file'.jsonl"
    path.write_text("\n".join(json.dumps({"question": f"q{index}", "answer": f"a{index}"}) for index in range(30)))
    save_tokenizer(chat_tokenizer(None), tmp_path)
    columns = 'source.chat.columns={prompt="question", completion="answer"}'
    main([str(path), "--tokenizer", str(tmp_path), "--template", "chatml", "--set", columns, "--json"])
    counts = json.loads(capsys.readouterr().out)["counts"]
    assert counts["documents"] > 20 and not counts["skipped"]


EXPECTED_IMAGES = """\
row 1: 80 of 80 positions, 47 learned
- document 1, segment 1: 25 context, 3 learned, 44 EOS padding, 8 of images
<|im_start|>user
a<|vision_start|>[image 1: 16x24, 6 tokens]<|vision_end|>b<|vision_start|>[image 2: 8x16, 2 tokens]<|vision_end|>\
"""


def test_images_are_shown_with_their_sizes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The processor is that of the tokenizer's directory, or of the model that is trained."""
    (tmp_path / "a.png").write_bytes(picture(2, 3))
    (tmp_path / "b.png").write_bytes(picture(1, 2))
    rows = [chat("a<image>b<image>", f"x{index}") | {"images": ["a.png", "b.png"]} for index in range(20)]
    path = tmp_path / "chats.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    directory = tmp_path / "tokenizer"
    save_tokenizer(image_tokenizer(), directory)
    save_processor(image_processor(), directory)
    arguments = [str(path), "--tokenizer", str(directory), "--row-length", "80", "--rows", "1"]
    main(arguments)
    output = capsys.readouterr().out
    assert output.partition("\n\n")[2].startswith(EXPECTED_IMAGES), output
    main([*arguments, "--json"])
    [row] = json.loads(capsys.readouterr().out)["rows"]
    assert row["images"] == [{"start": 8, "grid": [2, 3]}, {"start": 17, "grid": [1, 2]}]
    [segment] = row["segments"]
    assert segment["context"].startswith(f"<|im_start|>user\na{BEGIN}{END}b{BEGIN}{END}<|im_end|>")

    source = {"kind": "files", "paths": [str(path)], "chat": {"eos_padding": "none"}}
    model = {"max_position_embeddings": 80, "vision": VISION.model_dump()}
    config = write_train_config(
        tmp_path,
        model=model,
        data={"source": source, "images": {"max_pixels": 128}},
        tokenizer={"path": str(directory), "vocab_size": 4096},
    )
    main(["--config", str(config), "--rows", "1"])
    assert "[image 1: 8x8, 1 tokens]" in capsys.readouterr().out


def test_usage_errors(files: tuple[str, str], fails: Fails, tmp_path: Path) -> None:
    path, tokenizer = files
    for arguments, problem in (
        ([], "either --config"),
        ([path], "no tokenizer"),
        ([path, "--tokenizer", str(tmp_path / "none")], "none"),
        ([path, "--tokenizer", tokenizer, "--set", "run.seed=1"], "run"),
        (["--config", "x.toml", "--template", "chatml"], "are for files; use --set"),
        (["--config", str(tmp_path / "missing.toml")], "missing.toml"),
        ([str(tmp_path / "missing.jsonl"), "--tokenizer", tokenizer], "matches no file"),
    ):
        assert problem in fails(main, *arguments)
    assert "longer than a row" in fails(main, path, "--tokenizer", tokenizer, "--row-length", 5, code=1)
