"""``diffusionlm-train-tokenizer``: what it writes, says and refuses."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from cli.train_tokenizer import main
from config.data import LocalFiles, PythonStdlib
from config.load import load_config
from config.tokenizer import TrainTokenizerConfig
from diffusionlm.checkpoints.manifest import verify_directory
from diffusionlm.data.sources import open_source
from tests.unit.cli.conftest import Fails
from tokenizer import load_tokenizer, train_bpe

ROOT = Path(__file__).parents[3]
RESOURCE = ROOT / "config" / "resources" / "train_tokenizer.toml"


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    path = tmp_path / "texts.jsonl"
    lines = [json.dumps({"text": f"the cat {index} sat on the mat, naïve <|mask|>"}) for index in range(300)]
    path.write_text("\n".join([*lines, '{"text": ""}']) + "\n", encoding="utf-8")
    return path


def options(texts: Path, directory: Path, **more: object) -> list[str]:
    values = {
        "source.kind": "files",
        "source.paths": f'["{texts}"]',
        "source.validation_fraction": 0.1,
        "tokenizer.vocab_size": 280,
        "output.directory": directory,
        **more,
    }
    return ["--config", str(RESOURCE), *(part for key, value in values.items() for part in ("--set", f"{key}={value}"))]


def lines_of(text: str) -> dict[str, str]:
    return dict(re.split(r"\s{2,}|: (?=uv)", line, maxsplit=1) for line in text.splitlines())


def test_it_learns_measures_and_writes(texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = tmp_path / "made" / "my tokenizer"
    main(options(texts, directory))
    output = capsys.readouterr()
    config = LocalFiles(paths=(str(texts),), validation_fraction=0.1)
    train, _ = open_source(config, "train", "source").read(0, None, 1000)
    held_out, _ = open_source(config, "validation", "source").read(0, None, 1000)
    assert len(train) + len(held_out) == 300 and held_out

    tokenizer = load_tokenizer(directory)
    verify_directory(directory, must_have_manifest=True)
    assert tokenizer.fingerprint == train_bpe(train, vocab_size=280).fingerprint
    assert (tokenizer.vocab_size, tokenizer.eos_token_id, tokenizer.mask_token_id) == (280, 278, 279)
    assert load_config(TrainTokenizerConfig, directory / "config.toml").output.directory == directory
    assert [path.name for path in directory.parent.iterdir()] == [directory.name], "nothing is left beside it"

    facts = lines_of(output.out)
    assert facts["tokenizer"] == "280 tokens: 256 bytes, 22 merges, <|endoftext|> <|mask|>; pattern qwen"
    num_bytes = {name: sum(len(text.encode()) for text in texts) for name, texts in (("t", train), ("h", held_out))}
    assert facts["trained on"] == f"{num_bytes['t']:,} bytes in {len(train)} documents"
    per_token = num_bytes["h"] / sum(len(tokenizer.encode(text)) for text in held_out)
    of_what = f"{num_bytes['h']:,} bytes in {len(held_out)} documents of the validation split"
    assert facts["held out"] == f"{per_token:.3f} bytes per token, on {of_what}"
    assert facts["written to"] == str(directory)
    reading, learning = output.err.splitlines()
    assert reading.startswith(f"reading: {num_bytes['t']:,} bytes, ")
    assert learning.startswith("training: 22 of 22 merges, ")


@pytest.mark.slow
def test_the_shipped_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = load_config(TrainTokenizerConfig, RESOURCE)
    assert config.source == PythonStdlib()
    overrides = [f"output.directory={tmp_path / 't'}", "tokenizer.max_training_bytes=1000000"]
    main(["--config", str(RESOURCE), *(part for override in overrides for part in ("--set", override))])
    facts = lines_of(capsys.readouterr().out)
    assert load_tokenizer(tmp_path / "t").vocab_size == config.tokenizer.vocab_size == 4096
    assert 3.0 < float(facts["held out"].split()[0]) < 4.5


def test_nothing_is_overwritten(texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], fails: Fails) -> None:
    directory = tmp_path / "a b"
    directory.mkdir()
    main(options(texts, directory))  # an empty one does
    before = {path.name: path.read_bytes() for path in directory.iterdir()}
    capsys.readouterr()
    message = fails(main, *options(texts, directory, **{"tokenizer.vocab_size": 270}))
    assert f"output.directory = {directory} is not empty: choose another directory" in message
    assert {path.name: path.read_bytes() for path in directory.iterdir()} == before
    for path, cause in (
        (texts, "is not a directory"),
        (texts / "t", "is not a directory"),
        (Path("/proc/t"), "choose another"),
    ):
        assert cause in fails(main, *options(texts, path))


def test_sources_without_text(texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], fails: Fails) -> None:
    blank = tmp_path / "blank.jsonl"
    blank.write_text('{"text": ""}\n', encoding="utf-8")
    assert "[source] has no training documents" in fails(main, *options(blank, tmp_path / "t"), code=1)
    message = fails(main, *options(tmp_path / "none.jsonl", tmp_path / "t"), code=1)
    assert " source.paths: " in message and "matches no file" in message
    assert not (tmp_path / "t").exists()
    main(options(texts, tmp_path / "t", **{"source.validation_paths": f'["{blank}"]'}))
    assert "no validation documents to measure it on" in lines_of(capsys.readouterr().out)["held out"]
