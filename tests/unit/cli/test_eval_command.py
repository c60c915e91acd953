"""``diffusionlm-eval`` on tiny models: every number against one that is worked out otherwise."""

from __future__ import annotations

import json
import math
import re
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cli.eval import main
from config.data import DataConfig, LocalFiles
from config.eval import EvalConfig
from config.generation import GenerationConfig
from config.load import load_config
from diffusionlm.checkpoints.huggingface import load_model
from diffusionlm.data.loader import collate_rows
from diffusionlm.data.packing import Row
from diffusionlm.data.pipeline import build_row_reader, open_components
from diffusionlm.evaluation.nelbo import nelbo
from diffusionlm.evaluation.sampler_likelihood import sampler_likelihood
from diffusionlm.evaluation.statistics import bits_per_byte
from diffusionlm.evaluation.text_likelihood import OpenedText, evaluate_likelihood
from tests.unit.cli.conftest import Fails, MakeDirectory
from tokenizer import Tokenizer, save_tokenizer

ROOT = Path(__file__).parents[3]
RESOURCE = ROOT / "config" / "resources" / "eval.toml"
TEXTS = [
    "the cat sat on the mat",
    "the dog sat too, naïve and 日本",
    "a dog",
    "the mat and the cat and the dog sat on the mat, and the cat sat too and the dog",
    "x",
]


@pytest.fixture(scope="module")
def make_dir(make_directory: MakeDirectory) -> MakeDirectory:
    return partial(make_directory, noise=0.2, max_position_embeddings=32)


@pytest.fixture(scope="module")
def model_dir(make_dir: MakeDirectory) -> Path:
    return make_dir()


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five documents with text and an empty one."""
    path = tmp_path_factory.mktemp("data") / "texts.jsonl"
    lines = [json.dumps({"text": text}) for text in (*TEXTS, "")]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def run(*argv: object) -> None:
    main([str(item) for item in argv])


def evaluated(capsys: pytest.CaptureFixture[str], *argv: object) -> dict[str, Any]:
    run(*argv, "--json", "--set", "model.device=cpu")
    [line] = capsys.readouterr().out.splitlines()
    values: dict[str, Any] = json.loads(line)
    return values


def padded_rows(tokenizer: Tokenizer, length: int = 32) -> list[Row]:
    """The documents as ``rows = "padded"`` without shuffling makes them."""
    rows = []
    for text in TEXTS:
        ids = [*tokenizer.encode(text)[: length - 1], tokenizer.eos_token_id]
        tokens = torch.full((length,), tokenizer.eos_token_id or 0, dtype=torch.int32)
        tokens[: len(ids)] = torch.tensor(ids)
        is_text = torch.arange(length) < len(ids)
        rows.append(Row(tokens.numpy(), torch.where(is_text, 0, -1).int().numpy(), is_text.numpy()))
    return rows


IN_ORDER = ("--set", "data.rows=padded", "--set", "data.shuffle_window=0")


def test_a_bound_and_its_bytes(
    capsys: pytest.CaptureFixture[str], model_dir: Path, data: Path, tokenizer: Tokenizer
) -> None:
    result = evaluated(capsys, "--model", model_dir, "--data", data, *IN_ORDER, "--set", "likelihood.num_mc_samples=3")
    batch = collate_rows(padded_rows(tokenizer))
    expected = nelbo(
        load_model(model_dir), batch.tokens_BL, batch.loss_mask_BL, num_mc_samples=3, document_BL=batch.document_BL
    )
    assert result["method"] == "bound, bidirectional"
    assert (result["is_exact"], result["block_length"], result["num_forwards"]) == (False, None, None)
    assert result["nats_per_token"] == pytest.approx(expected.nats_per_token, abs=1e-6)
    assert result["nats_per_token_standard_error"] == pytest.approx(expected.standard_error, abs=1e-6)
    assert result["perplexity"] == pytest.approx(math.exp(expected.nats_per_token), rel=1e-5)
    assert result["perplexity_standard_error"] == pytest.approx(
        math.exp(expected.nats_per_token) * expected.standard_error, rel=1e-5
    )
    assert (result["num_tokens"], result["num_rows"], result["row_length"]) == (expected.num_tokens, 5, 32)
    cut = [text.encode() for text in TEXTS]
    cut[3] = tokenizer.decode_bytes(tokenizer.encode(TEXTS[3])[:31])  # one document is longer than a row
    assert result["num_bytes"] == sum(map(len, cut))
    assert result["bits_per_byte"] == pytest.approx(expected.nats / math.log(2) / sum(map(len, cut)), rel=1e-5)
    assert (result["num_unscored_tokens"], result["skipped_documents"]) == (0, {"empty": 1})
    assert [tuple(entry) for entry in result["by_masked_fraction"]] == [
        pytest.approx(entry, abs=1e-5) for entry in expected.by_masked_fraction
    ]


def test_bits_per_byte_by_hand(tokenizer: Tokenizer) -> None:
    # é has two bytes, 日 three, 🙂 four; the end of text none.
    texts = ["é日", "🙂a"]
    rows = [[*tokenizer.encode(text), tokenizer.eos_token_id] for text in texts]
    assert [len(row) for row in rows] == [6, 6]  # the tokenizer has no merges for them
    tokens_BL = torch.tensor(rows).numpy()
    is_scored_BL = np.ones((2, 6), dtype=np.bool_)
    value, error, num_bytes = bits_per_byte(tokenizer, tokens_BL, is_scored_BL, [6.0, 4.0])
    assert value == pytest.approx(1.0 / math.log(2)) and num_bytes == 10
    # Residuals 1 and -1; sqrt(2 / 1 * 2) / 10 bytes.
    assert error == pytest.approx(0.2 / math.log(2))
    is_scored_BL[0, 2:] = is_scored_BL[1] = False
    assert bits_per_byte(tokenizer, tokens_BL, is_scored_BL, [6.0, 4.0])[2] == 2
    assert bits_per_byte(tokenizer, tokens_BL, np.zeros_like(is_scored_BL), [1.0, 1.0]) == (math.inf, math.inf, 0)


def test_blocks(capsys: pytest.CaptureFixture[str], make_dir: MakeDirectory, data: Path, tokenizer: Tokenizer) -> None:
    batch = collate_rows(padded_rows(tokenizer))
    folder = make_dir(block_length=4)
    model = load_model(folder)
    for options, block_length, method in (
        ((), 4, "bound, blocks of 4"),
        (("--set", "likelihood.block_length=16"), 16, "bound, blocks of 16"),
        (("--set", "likelihood.bidirectional=true"), None, "bound, bidirectional"),
        (("--set", "likelihood.block_length=1"), 1, "exact, block length 1"),
    ):
        result = evaluated(capsys, "--model", folder, "--data", data, *IN_ORDER, *options)
        expected = nelbo(model, batch.tokens_BL, batch.loss_mask_BL, block_length, document_BL=batch.document_BL)
        assert (result["method"], result["block_length"]) == (method, block_length)
        assert result["nats_per_token"] == pytest.approx(expected.nats_per_token, abs=1e-5)
        assert result["is_exact"] == (block_length == 1)
        assert (result["by_masked_fraction"] == []) == (block_length == 1)


def test_a_sampler(capsys: pytest.CaptureFixture[str], model_dir: Path, data: Path, tokenizer: Tokenizer) -> None:
    batch = collate_rows(padded_rows(tokenizer))
    settings = ("likelihood.kind=sampler", "likelihood.generation.block_length=8", "likelihood.batch_size=2")
    options = [argument for setting in settings for argument in ("--set", setting)]
    result = evaluated(capsys, "--model", model_dir, "--data", data, *IN_ORDER, *options)
    expected = sampler_likelihood(
        load_model(model_dir),
        batch.tokens_BL,
        batch.loss_mask_BL,
        GenerationConfig(block_length=8),
        document_BL=batch.document_BL,
    )
    assert (result["method"], result["is_exact"]) == ("exact, low_confidence sampler", True)
    assert result["nats_per_token"] == pytest.approx(expected.nats_per_token, abs=1e-5)
    assert result["num_forwards"] == expected.num_forwards == expected.num_tokens
    run("--model", model_dir, "--data", data, *IN_ORDER, *options)
    assert re.search(rf"forwards +{expected.num_forwards}\n", capsys.readouterr().out)


@pytest.fixture(scope="module")
def qwen_dir(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A causal Qwen3 that transformers wrote."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(5)
    config = transformers.Qwen3Config(
        vocab_size=tokenizer.vocab_size, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, intermediate_size=48, max_position_embeddings=64, initializer_range=0.3,
        tie_word_embeddings=False, eos_token_id=tokenizer.eos_token_id, bos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("qwen")
    transformers.Qwen3ForCausalLM(config).save_pretrained(folder)
    save_tokenizer(tokenizer, folder)
    return folder


@pytest.mark.parametrize("begins", [False, True])
def test_causal_checkpoint_matches_transformers(
    capsys: pytest.CaptureFixture[str], qwen_dir: Path, data: Path, tokenizer: Tokenizer, begins: bool
) -> None:
    import transformers

    result = evaluated(
        capsys, "--model", qwen_dir, "--data", data, "--set", f"data.begin_with_eos={json.dumps(begins)}"
    )
    peer = transformers.AutoModelForCausalLM.from_pretrained(qwen_dir)
    source = LocalFiles(paths=(str(data),), validation_paths=("none",))
    recipe = DataConfig(source=source, begin_with_eos=begins, row_shuffle_window=0)
    rows, _ = build_row_reader(open_components(recipe, "train"), recipe, tokenizer, 64, 0).read(0, None, 100)
    pieces = [
        row.tokens_L[row.document_ids_L == number] for row in rows for number in range(row.document_ids_L.max() + 1)
    ]
    assert len(pieces) > len(TEXTS)  # a row's end cuts one
    nats, count = 0.0, 0
    for piece in pieces:
        ids_1L = torch.from_numpy(piece).long()[None]
        if len(piece) > 1:
            with torch.no_grad():
                nats += float(peer(ids_1L, labels=ids_1L).loss) * (len(piece) - 1)
            count += len(piece) - 1
    num_bytes = sum(int(tokenizer.byte_lengths()[piece[1:]].sum()) for piece in pieces)
    assert result["method"] == "exact, next token"
    assert (result["num_tokens"], result["num_bytes"], result["row_length"]) == (count, num_bytes, 64)
    assert result["nats_per_token"] == pytest.approx(nats / count, abs=1e-5)
    assert result["bits_per_byte"] == pytest.approx(nats / num_bytes / math.log(2), abs=1e-5)
    assert result["num_unscored_tokens"] == (0 if begins else len(pieces))
    assert num_bytes == sum(len(text.encode()) for text in TEXTS) or not begins


def test_autoregressive_model_rejects_diffusion_options(
    capsys: pytest.CaptureFixture[str], fails: Fails, make_dir: MakeDirectory, data: Path
) -> None:
    folder = make_dir(block_length=1, logit_alignment="shifted", mask_token_id=None)
    common = ("--model", folder, "--data", data)
    assert evaluated(capsys, *common)["method"] == "exact, next token"
    assert evaluated(capsys, *common, "--set", "likelihood.block_length=1")["method"] == "exact, next token"
    for setting, words in (
        ("likelihood.block_length=4", "likelihood: block_length = 4 does not fit an autoregressive model"),
        ("likelihood.bidirectional=true", "likelihood: bidirectional attention does not fit an autoregressive model"),
    ):
        assert words in fails(main, *common, "--set", setting)
    sampler = (*common, "--set", "likelihood.kind=sampler")
    assert evaluated(capsys, *sampler)["nats_per_token"] == pytest.approx(
        evaluated(capsys, *common)["nats_per_token"], abs=1e-5
    )
    message = fails(main, *sampler, "--set", "likelihood.generation.attention=bidirectional")
    assert "likelihood.generation: bidirectional attention does not fit" in message


def test_the_table(capsys: pytest.CaptureFixture[str], model_dir: Path, data: Path) -> None:
    run("--model", model_dir, "--data", data)
    rows = dict(re.split(r"  +", line, maxsplit=1) for line in capsys.readouterr().out.splitlines())
    for name in ("nats per token", "perplexity", "bits per byte"):
        assert re.fullmatch(r"<= [\d.]+ \+- [\d.]+", rows[name])
    assert (rows["method"], rows["row length"], rows["skipped documents"]) == ("bound, bidirectional", "32", "1 empty")
    assert "nats per masked token, 90% - 100% of the row masked" in rows
    run("--model", model_dir, "--data", data, "--set", "data.max_rows=1")
    assert re.search(r"nats per token +<= [\d.]+\n", capsys.readouterr().out), "a single row has no error"


def test_splits_of_a_source(make_dir: MakeDirectory, data: Path) -> None:
    folder = make_dir(begin_with_eos=True)
    values: dict[str, Any] = {"model": {"path": folder, "device": "cpu"}}
    source = {"kind": "files", "paths": [str(data)], "validation_fraction": 0.5}
    model, bytes_of = load_model(folder), {}
    for split in ("train", "validation", "all"):
        config = EvalConfig.model_validate({**values, "data": {"source": source, "split": split}})
        result = evaluate_likelihood(OpenedText(config), model)
        bytes_of[split] = result.num_bytes
        assert result.num_unscored_tokens == 0
    assert 0 < bytes_of["validation"] < bytes_of["all"] == bytes_of["train"] + bytes_of["validation"]
    markov = {"source": "markov", "rows": "padded", "row_length": 32, "end_with_eos": False, "begin_with_eos": False}
    text = OpenedText(EvalConfig.model_validate({**values, "data": {**markov, "max_rows": 4}}))
    result = evaluate_likelihood(text, model)
    assert (result.num_tokens, result.num_bytes) == (128, 128)


def test_errors(fails: Fails, model_dir: Path, make_dir: MakeDirectory, data: Path, tmp_path: Path) -> None:
    (tmp_path / "empty.txt").touch()
    assert "empty file" in fails(main, "--model", model_dir, "--data", tmp_path / "empty.txt")
    (tmp_path / "blank.jsonl").write_text('{"text": ""}\n')
    message = fails(main, "--model", model_dir, "--data", tmp_path / "blank.jsonl")
    assert 'data.source has no text for split = "all"' in message
    short = ("--data", data, "--set", "data.row_length=1")
    shifted = make_dir(logit_alignment="shifted")
    message = fails(main, "--model", shifted, *short, code=1)
    assert "nothing to score" in message
    assert "set data.begin_with_eos = true, or raise data.row_length" in message
    small = make_dir(vocab_size=200, mask_token_id=199, eos_token_id=None)
    message = fails(main, "--model", small, "--data", data)
    assert "vocab_size = 200" in message
    trained = make_dir()
    for key, value in (("attention", "prompt_and_own_block"), ("attention_bias", "bias.npy")):
        (trained / "config.toml").write_text(f'[objective]\n{key} = "{value}"\n')
        message = fails(main, "--model", trained, "--data", data, code=2)
        assert f'config.toml: the model was trained with objective.{key} = "{value}"' in message
        assert "exact_match" in message


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["likelihood.bidirectional=true", "likelihood.block_length=4"], "bidirectional = true contradicts"),
        (["data.source=markov", "data.split=all"], 'split = "all" needs a source of files'),
        (["likelihood.generation.steps=8"], 'generation needs kind = "sampler"'),
    ],
)
def test_contradictions(overrides: list[str], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        load_config(EvalConfig, None, overrides)
