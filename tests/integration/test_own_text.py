"""One text of one's own: the config for it trains at once, and samples and the next command are of that text."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from cli.infer import main as infer
from cli.train import main
from tests.tiny_run import read_events, read_losses

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "config" / "resources" / "own_text.toml"
TINY = (
    "run.device=cpu",
    "run.threads=1",
    "model.hidden_size=16",
    "model.num_hidden_layers=1",
    "model.num_attention_heads=1",
    "model.num_key_value_heads=1",
    "model.head_dim=16",
    "model.intermediate_size=16",
    "model.max_position_embeddings=32",
    "tokenizer.vocab_size=300",
    "training.batch_size=4",
    "training.max_steps=6",
    "training.precision=float32",
    "schedule.kind=constant",
    "schedule.warmup_fraction=0.0",
    "validation.every_steps=4",
    "validation.ngrams=false",
    "samples.every_steps=3",
    "checkpoint.every_steps=3",
    "logging.every_steps=1",
)
NAMES = ["Anna", "Boris", "Clara", "Dmitri", "Eliza"]
TEXT = "\n\n".join(
    f"{NAMES[index % 5]}:\nI walked {index} miles to the river, and {NAMES[index % 3]} walked back."
    for index in range(90)
)


def run(capsys: pytest.CaptureFixture[str], directory: Path, *overrides: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of the training command."""
    values = (f"run.directory={directory}", *TINY, *overrides)
    code = main(["--config", str(CONFIG), *[part for value in values for part in ("--set", value)]])
    output = capsys.readouterr()
    return code, output.out, output.err


@pytest.fixture
def text_path(tmp_path: Path) -> Path:
    path = tmp_path / "my.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


@pytest.mark.slow
def test_one_text_trains_and_resumes(capsys: pytest.CaptureFixture[str], text_path: Path, tmp_path: Path) -> None:
    paths = f'data.source.paths=["{text_path}"]'
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    code, table, log = run(capsys, whole, paths)
    assert code == 0 and "Validation, nats per token" in table
    assert "my.txt; the ends of 1 of its 1 documents (" in log and "are validation text" in log

    samples = read_events(whole, "sample")
    assert [sample["step"] for sample in samples] == [3, 3, 3, 6, 6, 6]
    for sample in samples:
        before, _, rest = sample["values"]["given"].partition("[MASK:")
        after = rest.partition("]")[2]
        start = TEXT.index(before, len(TEXT) * 9 // 10)
        assert after in TEXT[start + len(before) :], "the words around the span are validation text"

    words = shlex.split(table.splitlines()[-1].removeprefix("next: uv run diffusionlm-infer "))
    assert words[:3] == ["--model", str(whole), "--infill"]
    assert words[3].replace("\\n", "\n") == samples[0]["values"]["given"]
    infer(words)
    assert "walked" in capsys.readouterr().out

    run(capsys, parts, paths, "training.max_steps=3")
    run(capsys, parts, paths, "checkpoint.config_change=accept")
    assert len(read_losses(parts)) == 6 and read_losses(parts) == read_losses(whole)
