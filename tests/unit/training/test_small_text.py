"""A training text of a few rows is reported with its size, the epochs of the run and a remedy."""

from __future__ import annotations

from pathlib import Path

import pytest

from config.data import MarkovChain, MixtureEntry
from config.load import load_config
from config.train import TrainConfig
from diffusionlm.data.loader import LoaderSpec
from diffusionlm.data.pipeline import open_components
from diffusionlm.training.checkpointing.run_directory import open_run_directory
from diffusionlm.training.run import build_run, warn_small_dataset
from tests.conftest import MakeConfig
from tests.tiny_run import write_train_config
from tokenizer import train_bpe

ROW_LENGTH = 16


def small_config(folder: Path, text: str) -> TrainConfig:
    """A run of 8 steps of 4 rows over one document."""
    (folder / "b.txt").write_text(text, encoding="utf-8")
    source = {"kind": "files", "paths": [str(folder / "b.txt")], "validation_paths": [str(folder / "a.txt")]}
    return load_config(TrainConfig, write_train_config(folder, data={"source": source}))


def find_problem(config: TrainConfig, make_config: MakeConfig) -> str | None:
    """The problem of a run whose tokens are bytes."""
    tokenizer = train_bpe(["a"], vocab_size=258)
    model = make_config(vocab_size=258, mask_token_id=tokenizer.mask_token_id, eos_token_id=tokenizer.eos_token_id)
    spec = LoaderSpec(config.data, tokenizer, ROW_LENGTH, config.objective, model, 4, 4, seed=0)
    return warn_small_dataset(spec, open_components(config.data, "train"), max_steps=8)


def test_numbers_of_a_small_text(tmp_path: Path, make_config: MakeConfig) -> None:
    # 30 bytes and the end-of-text token fill two rows, of the 32 that the run reads.
    assert find_problem(small_config(tmp_path, "a" * 30), make_config) == (
        "the training text is very small: 31 tokens (rows of 16: 2); 8 steps of 4 rows are 16 epochs, and the model "
        "can only memorize it: add text, or lower training.max_steps or training.batch_size"
    )


@pytest.mark.parametrize(
    ("num_bytes", "is_small"), [(9 * ROW_LENGTH - 1, True), (9 * ROW_LENGTH, False), (1 << 16, False)]
)
def test_ten_rows_are_no_small_text(num_bytes: int, is_small: bool, tmp_path: Path, make_config: MakeConfig) -> None:
    assert (find_problem(small_config(tmp_path, "a" * num_bytes), make_config) is not None) == is_small


def test_entries_of_a_mixture_count_together(tmp_path: Path, make_config: MakeConfig) -> None:
    config = small_config(tmp_path, "a" * 30)
    text = MixtureEntry(source=config.data.components[0].source, name="a")

    def find_problem_of(*entries: MixtureEntry) -> str | None:
        mixture = config.data.model_copy(update={"source": None, "mixture": entries})
        return find_problem(config.model_copy(update={"data": mixture}), make_config)

    problem = find_problem_of(text, text.model_copy(update={"name": "b"}))
    assert problem is not None and "62 tokens (rows of 16: 4)" in problem
    assert find_problem_of(text, MixtureEntry(source=MarkovChain(documents_per_epoch=1))) is None


def test_a_run_prints_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = small_config(tmp_path, "the cat sat on the mat")
    with open_run_directory(config) as directory:
        build_run(config, directory)
    [line] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning: ")]
    assert line.startswith("warning: the training text is very small: ")
