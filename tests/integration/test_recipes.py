"""The recipes of adaptation and fine-tuning, in small: a random model of the family, some text or chats, few steps."""

from __future__ import annotations

import json
import math
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from cli.commands import main
from cli.train import check_files
from config.convert import ConvertConfig
from config.load import load_config
from config.model import ModelConfig
from config.train import TrainConfig
from diffusionlm.checkpoints.convert import convert, prepare_conversion
from diffusionlm.checkpoints.huggingface import load_model, save_model_directory
from diffusionlm.checkpoints.model_files import load_tokenizer
from diffusionlm.data.pipeline import build_row_reader, open_components
from diffusionlm.models.init import init_weights
from diffusionlm.models.patterns import BlockCausal
from diffusionlm.models.transformer import Transformer
from diffusionlm.training.loop import train
from tests.tiny_run import MODEL, read_events, read_losses
from tokenizer import Tokenizer, save_tokenizer, train_bpe

ROOT = Path(__file__).parents[2]
CHATML = ("<|im_start|>", "<|im_end|>")
HEADERS = ("<|startoftext|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
SHAPE: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "intermediate_size": 48,
}
SMALL: dict[str, Any] = {
    "run.device": "cpu",
    "run.threads": 1,
    "data.workers": 0,
    "training.precision": "float32",
    "logging.progress": "none",
}
SMALL_SFT = SMALL | {
    "data.row_length": 256,
    "data.source.validation_fraction": 0.2,
    "training.batch_size": 2,
    "training.micro_batch_size": 1,
    "training.epochs": 1,
    "schedule.warmup_steps": 1,
    "validation.final_rows": 2,
}
ROWS = 288


def to_overrides(values: dict[str, Any]) -> list[str]:
    return [f"{key}={value}" for key, value in values.items()]


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen3 of transformers, with a tokenizer that has no mask token and fewer tokens than there are rows."""
    import transformers

    directory = tmp_path_factory.mktemp("qwen3")
    tokens = (*CHATML, "<|endoftext|>", "<|mask|>")
    trained = train_bpe(["the cat sat on the mat"], vocab_size=270, special_tokens=tokens)
    special = {text: token_id for text, token_id in trained.special_tokens.items() if text != "<|mask|>"}
    save_tokenizer(Tokenizer(trained.vocab, trained.merges, special, "qwen", eos_token="<|endoftext|>"), directory)
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        **SHAPE,
        vocab_size=ROWS,
        max_position_embeddings=4_096,
        rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
        tie_word_embeddings=True,
        initializer_range=0.1,
        eos_token_id=special["<|endoftext|>"],
    )
    transformers.Qwen3ForCausalLM(config).save_pretrained(directory)
    return directory


def write_chats(path: Path) -> None:
    records = [
        {"messages": [{"role": "user", "content": f"what is {i}"}, {"role": "assistant", "content": f"{i} and one"}]}
        for i in range(30)
    ]
    path.parent.mkdir(exist_ok=True)
    path.write_text("\n".join(map(json.dumps, records)), encoding="utf-8")


def adapt(qwen3: Path, folder: Path, alignment: str, **objective: Any) -> TrainConfig:
    """The shipped recipe on the converted model and a little text."""
    diffusion = {"mask_token": "<|MASK|>", "block_length": 4, "logit_alignment": alignment, "untie_head": True}
    conversion = ConvertConfig(source=qwen3, target=folder / "mask", diffusion=diffusion)  # type: ignore[arg-type]
    convert(prepare_conversion(conversion))
    lines = [json.dumps({"text": f"the cat {index} sat on the mat {index * index}"}) for index in range(400)]
    (folder / "a.jsonl").write_text("\n".join(lines), encoding="utf-8")
    changes = SMALL | {
        "run.directory": folder / "run",
        "model.init_from": folder / "mask",
        "data.row_length": 32,
        "model.logit_alignment": alignment,
        "data.source.paths": json.dumps([str(folder / "a.jsonl")]),
        "training.batch_size": 8,
        "training.micro_batch_size": 4,
        "training.max_steps": 2,
        "schedule.warmup_steps": 1,
        "validation.final_rows": 16,
        "logging.every_steps": 1,
        **{f"objective.{name}": value for name, value in objective.items()},
    }
    return load_config(TrainConfig, ROOT / "config/resources/adapt_qwen3.toml", to_overrides(changes))


def test_training_starts_from_the_converted_model(qwen3: Path, tmp_path: Path) -> None:
    config = adapt(qwen3, tmp_path, "same_position")
    summary = train(config).summary
    assert summary is not None and summary.evaluation.block_length == 4
    # What it has learnt is to predict the token behind; of the one in place of a mask it knows nothing yet.
    assert read_losses(config)[0] == pytest.approx(math.log(ROWS), rel=0.35)
    model = load_model(config.run.directory)
    assert (model.config.block_length, model.config.logit_alignment) == (4, "same_position")
    assert model.config.vocab_size == ROWS and model.config.mask_token_id is not None
    assert not model.config.tie_word_embeddings
    assert model.config.max_position_embeddings == 4_096 and model.config.rope_theta == 1e6, "as the source's"
    again = train(load_config(TrainConfig, config.run.directory / "config.toml"))
    assert again.summary is not None and again.summary.to_json() == summary.to_json(), "the run is the same one"


@pytest.mark.slow
def test_shifted_outputs_with_block_length_one_match_the_source_loss(qwen3: Path, tmp_path: Path) -> None:
    import transformers

    config = adapt(qwen3, tmp_path, "shifted", block_length=1)
    train(config)
    components, tokenizer = open_components(config.data, "train"), load_tokenizer(tmp_path / "mask")
    rows, _ = build_row_reader(components, config.data, tokenizer, 32, config.run.seed).read(0, None, 8)
    peer = transformers.AutoModelForCausalLM.from_pretrained(qwen3)
    mask = load_model(tmp_path / "mask").config.required_mask_token_id
    nats, targets = 0.0, 0
    for row in rows:
        for number in range(int(row.document_ids_L.max()) + 1):
            ids = torch.from_numpy(row.tokens_L[row.document_ids_L == number]).long()
            with torch.no_grad():
                logits = peer(ids[None]).logits[0, :-1].double()
            logits[:, mask] = -math.inf  # never predicted here
            targets += len(ids) - 1
            nats += float(torch.nn.functional.cross_entropy(logits, ids[1:], reduction="sum"))
    assert read_losses(config)[0] == pytest.approx(nats / targets, rel=1e-4)


def test_the_guide_leads_from_a_local_qwen3_to_a_chat(
    qwen3: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The commands of docs/finetuning.md, in order, on a small model."""
    guide = (ROOT / "docs/finetuning.md").read_text(encoding="utf-8")
    [block] = re.findall(r"```bash\n(.*?)```", guide, re.DOTALL)
    (tmp_path / "models").mkdir()
    (tmp_path / "models/Qwen3-0.6B-Base").symlink_to(qwen3)
    (tmp_path / "config").symlink_to(ROOT / "config")
    write_chats(tmp_path / "chats.jsonl")
    monkeypatch.chdir(tmp_path)
    outputs = []
    for line in block.replace("\\\n", "").splitlines():
        program, *arguments = shlex.split(line.removeprefix("uv run diffusionlm-"))
        changes = {"train": SMALL_SFT, "infer": {"generation.max_new_tokens": 8}, "data": {"data.workers": 0}}
        options = [part for override in to_overrides(changes.get(program, {})) for part in ("--set", override)]
        assert main([program, *arguments, *options]) == 0
        outputs.append((program, capsys.readouterr().out))
    assert [program for program, _ in outputs] == ["convert", "data", "train", "infer", "convert"]
    assert "left out or mended   nothing" in outputs[1][1] and outputs[3][1]
    assert "Validation, nats per token" in outputs[2][1]
    tokens_BL = torch.arange(12)[None]
    with torch.no_grad():
        merged, adapted = (load_model(path)(tokens_BL, pattern=BlockCausal(4)) for path in ("models/mine", "runs/mine"))
    torch.testing.assert_close(merged, adapted, atol=1e-4, rtol=1e-4)


RECIPES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "sft_llada": ({"model_type": "llada", "qk_norm": False}, HEADERS),
    "sft_sdar": ({"model_type": "sdar", "block_length": 4}, CHATML),
    "preference": ({"model_type": "qwen3", "block_length": 4}, CHATML),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_recipe(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    options, special_tokens = RECIPES[name]
    tokens = (*special_tokens, "<|endoftext|>", "<|mask|>")
    tokenizer = train_bpe(["what is one and one"], vocab_size=290, special_tokens=tokens)
    ids: Any = {"mask_token_id": tokenizer.mask_token_id, "eos_token_id": tokenizer.eos_token_id}
    model = Transformer(
        ModelConfig(**SHAPE, max_position_embeddings=2048, vocab_size=tokenizer.vocab_size, **ids, **options)
    )
    init_weights(model, 0)
    save_model_directory(model, tokenizer, tmp_path / "model")
    write_chats(tmp_path / "chats/a.jsonl")
    pairs = [{"prompt": f"what is {i}", "chosen": f"{i} and one", "rejected": "none"} for i in range(30)]
    (tmp_path / "pairs").mkdir()
    (tmp_path / "pairs/a.jsonl").write_text("\n".join(map(json.dumps, pairs)), encoding="utf-8")
    overrides = to_overrides(SMALL_SFT | {"model.init_from": "model"})
    config = load_config(TrainConfig, ROOT / f"config/resources/{name}.toml", overrides)
    check_files(config)
    assert train(config).summary is not None
    tensors = load_file(config.run.directory / "checkpoints/latest/adapter_model.safetensors")
    assert len([key for key in tensors if key.endswith("lora_A.weight")]) == 7 * 2
    assert load_model(config.run.directory).config.block_length == options.get("block_length")


NAMES = ["Anna", "Boris", "Clara", "Dmitri", "Eliza"]
OWN_TEXT = "\n\n".join(
    f"{NAMES[index % 5]}:\nI walked {index} miles to the river, and {NAMES[index % 3]} walked back."
    for index in range(90)
)


@pytest.mark.slow
def test_one_text_of_ones_own_trains_and_resumes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Samples and the next command are of that text."""
    (tmp_path / "my.txt").write_text(OWN_TEXT, encoding="utf-8")
    values = SMALL | {f"model.{key}": value for key, value in MODEL.items()}
    values |= {
        "data.source.paths": json.dumps([str(tmp_path / "my.txt")]),
        "model.max_position_embeddings": 32,
        "tokenizer.vocab_size": 300,
        "training.batch_size": 4,
        "training.max_steps": 6,
        "schedule.kind": "constant",
        "schedule.warmup_fraction": 0.0,
        "validation.every_steps": 4,
        "samples.every_steps": 3,
        "checkpoint.every_steps": 3,
        "logging.every_steps": 1,
        "logging.progress": "lines",
    }

    def run(directory: Path, **changes: Any) -> tuple[int, str, str]:
        overrides = to_overrides(values | {"run.directory": directory} | changes)
        options = [part for override in overrides for part in ("--set", override)]
        code = main(["train", "--config", str(ROOT / "config/resources/own_text.toml"), *options])
        return code, *capsys.readouterr()

    whole, parts = tmp_path / "whole", tmp_path / "parts"
    code, table, log = run(whole)
    assert code == 0 and "Validation, nats per token" in table
    assert "my.txt; the ends of 1 of its 1 documents (" in log and "are validation text" in log

    samples = read_events(whole, "sample")
    assert [sample["step"] for sample in samples] == [3, 3, 3, 6, 6, 6]
    for sample in samples:
        before, _, rest = sample["values"]["given"].partition("[MASK:")
        after = rest.partition("]")[2]
        start = OWN_TEXT.index(before, len(OWN_TEXT) * 9 // 10)
        assert after in OWN_TEXT[start + len(before) :], "the words around the span are validation text"

    words = shlex.split(table.splitlines()[-1].removeprefix("next: uv run diffusionlm-infer "))
    assert words[:3] == ["--model", str(whole), "--infill"]
    assert words[3].replace("\\n", "\n") == samples[0]["values"]["given"]
    main(["infer", *words])
    assert "walked" in capsys.readouterr().out

    run(parts, **{"training.max_steps": 3})
    run(parts, **{"checkpoint.config_change": "accept"})
    assert len(read_losses(parts)) == 6 and read_losses(parts) == read_losses(whole)
