"""``diffusionlm-infer`` on a tiny model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cli.infer import main
from config.dump import to_toml
from config.infer import InferConfig
from config.load import load_config
from config.model import ModelConfig
from diffusionlm.checkpoints.huggingface import load_model, save_model_directory
from diffusionlm.inference.generate import generate
from diffusionlm.inference.terminal import wrapped
from diffusionlm.models.init import init_weights
from diffusionlm.models.transformer import Transformer
from tokenizer import load_tokenizer, train_bpe

RESOURCE = Path(__file__).parents[3] / "config" / "resources" / "infer.toml"


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained model whose embedding has five rows more than its tokenizer has tokens."""
    tokenizer = train_bpe(["the cat sat on the mat and the dog sat too"] * 2, vocab_size=270)
    assert tokenizer.mask_token_id is not None
    config = ModelConfig(
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        intermediate_size=24,
        max_position_embeddings=48,
        vocab_size=tokenizer.vocab_size + 5,
        mask_token_id=tokenizer.mask_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    model = Transformer(config)
    init_weights(model, seed=3)
    folder = tmp_path_factory.mktemp("model")
    save_model_directory(model, tokenizer, folder)
    return folder


def run(*argv: object) -> None:
    main([str(item) for item in argv])


def failure(capsys: pytest.CaptureFixture[str], code: int, *argv: object) -> str:
    with pytest.raises(SystemExit) as caught:
        run(*argv)
    assert caught.value.code == code
    output = capsys.readouterr()
    assert "Traceback" not in output.err
    return output.out if code == 0 else output.err


def records(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_prompts_and_infills_as_json(capsys: pytest.CaptureFixture[str], model_dir: Path) -> None:
    common = ("--model", model_dir, "--json", "--seed", 5, "--set", "generation.max_new_tokens=6")
    more = ("--set", "generation.temperature=2.0", "--set", "model.device=cpu")
    run(*common, *more, "--prompt", "the cat", "--infill", r"the [MASK:2]\nsat", "--prompt", "")
    first, second, hole = records(capsys)
    keys = ["text", "token_ids", "finish_reason", "num_forwards", "logprobs", "step_map", "seed", "seconds"]
    assert list(first) == ["prompt", *keys]
    assert list(hole) == ["infill", *keys]
    assert [first["prompt"], second["prompt"], hole["infill"]] == ["the cat", "", "the [MASK:2]\nsat"]
    assert [first["seed"], second["seed"], hole["seed"]] == [5, 6, 7]

    tokenizer, model = load_tokenizer(model_dir), load_model(model_dir)
    unknown = range(tokenizer.vocab_size, model.config.vocab_size)
    settings = InferConfig().generation.model_copy(
        update={"max_new_tokens": 6, "temperature": 2.0, "suppress_token_ids": tuple(unknown)}
    )
    [expected] = generate(model, [tokenizer.encode("the cat")], settings, [5])
    assert first["token_ids"] == list(expected.token_ids)
    assert first["text"] == tokenizer.decode(expected.token_ids)
    assert first["step_map"] == list(expected.step_map)
    assert first["logprobs"] == pytest.approx(expected.logprobs, abs=1e-4)
    assert hole["text"].startswith("the ")
    assert hole["text"].endswith("\nsat")
    assert (len(hole["step_map"]), hole["finish_reason"], hole["num_forwards"]) == (2, "length", 2)


def test_plain_text_of_one_request_is_the_text_alone(capsys: pytest.CaptureFixture[str], model_dir: Path) -> None:
    arguments = ("--model", model_dir, "--prompt", "the dog", "--set", "generation.max_new_tokens=4")
    run(*arguments, "--json")
    [record] = records(capsys)
    run(*arguments)
    assert capsys.readouterr().out == f"the dog{record['text']}\n"
    run(*arguments, "--prompt", "the")
    assert capsys.readouterr().out.startswith(f"[prompt 1]\nthe dog{record['text']}\n[prompt 2]\nthe")


def test_show_prints_one_line_a_forward(capsys: pytest.CaptureFixture[str], model_dir: Path) -> None:
    run("--model", model_dir, "--infill", "the [MASK:3] sat", "--show")
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines[:3]] == [f"infill 1, forward {n}" for n in (1, 2, 3)]
    assert [line.count("░") for line in lines[:3]] == [2, 1, 0]
    run("--model", model_dir, "--infill", "the [MASK:3] sat", "--show", "--json")
    output = capsys.readouterr()
    assert len(output.out.splitlines()) == 1
    assert len(output.err.splitlines()) == 3


def test_show_redraws_in_a_terminal(
    capsys: pytest.CaptureFixture[str], model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    run("--model", model_dir, "--infill", "the [MASK:2] sat", "--show")
    output = capsys.readouterr().out
    assert output.startswith("forward 1\n\x1b[2mthe \x1b[0m")
    assert output.count("\x1b[2A\r\x1b[J") == 2
    assert output.endswith("\x1b[2m sat\x1b[0m\n")


def test_wrapped_lines_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    assert wrapped([("abcd", False), ("ef\ng", True)], 3) == ["abc", "def", "g"]
    assert wrapped([("日本a\x1b\t", True)], 4) == ["日本", "a\ufffd  ", "  "]
    assert wrapped([], 4) == [""]


def printed_config(capsys: pytest.CaptureFixture[str], path: Path, *argv: object) -> InferConfig:
    path.write_text(failure(capsys, 0, *argv, "--print-config"), encoding="utf-8")
    return load_config(InferConfig, path)


def test_escapes_are_read_unless_raw(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    text = r'a\nb\tc\\n "q" \x [é]' + "\x7f"
    path = tmp_path / "c.toml"
    read = 'a\nb\tc\\n "q" \\x [é]\x7f'
    assert printed_config(capsys, path, "--prompt", text).input.prompts == (read,)
    assert printed_config(capsys, path, "--infill", text, "--infill", "[1]").input.infills == (read, "[1]")
    assert printed_config(capsys, path, "--raw", "--prompt", text).input.prompts == (text,)
    assert printed_config(capsys, path, "--prompt", text, "--raw").input.prompts == (text,)


def test_shorthands_are_overrides(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file, path = tmp_path / "a.toml", tmp_path / "b.toml"
    file.write_text('[model]\npath = "x"\n[input]\nprompts = ["a", "b"]\nseed = 1\n')
    config = printed_config(capsys, path, "--config", file, "--model", "m", "--seed", 9, "--show", "--json")
    assert (str(config.model.path), config.input.seed, config.output.show, config.output.format) == (
        "m",
        9,
        True,
        "json",
    )
    assert config.input.prompts == ("a", "b")
    config = printed_config(capsys, path, "--config", file, "--prompt", "c")
    assert (str(config.model.path), config.input.prompts, config.input.seed) == ("x", ("c",), 1)


def test_the_example_is_valid() -> None:
    config = load_config(InferConfig, RESOURCE)
    assert str(config.model.path) == "runs/quickstart"
    assert config.input.prompts
    assert "[MASK:" in config.input.infills[0]


def test_usage_errors_exit_with_2(capsys: pytest.CaptureFixture[str], model_dir: Path) -> None:
    assert failure(capsys, 2, "--prompt", "a") == (
        "diffusionlm-infer: error: no model given: add --model DIR, or path to [model] of the config\n"
    )
    assert "nothing to do: add --prompt" in failure(capsys, 2, "--model", model_dir)
    assert "--set input.seed=x: expected an integer" in failure(capsys, 2, "--seed", "x")
    message = failure(capsys, 2, "--set", "generation.steps=2", "--set", "generation.denoising_steps=2")
    assert "steps = 2 (over all blocks) and denoising_steps = 2 (of each block)" in message


def test_errors_of_the_run_exit_with_1(capsys: pytest.CaptureFixture[str], model_dir: Path, tmp_path: Path) -> None:
    assert "no model at" in failure(capsys, 1, "--model", tmp_path / "none", "--prompt", "a")
    assert "[MASK:0] is no hole" in failure(capsys, 1, "--model", model_dir, "--infill", "a [MASK:0]")
    assert "has no hole" in failure(capsys, 1, "--model", model_dir, "--infill", "a")
    message = failure(capsys, 1, "--model", model_dir, "--prompt", "a")
    assert "max_new_tokens = 64: 65 tokens are more than the model's context, max_position_embeddings = 48" in message


def test_help_and_config_errors_do_not_wait_for_torch() -> None:
    code = (
        "import sys, contextlib, cli.infer\n"
        "for argv in (['--help'], ['--print-config'], ['--set', 'a.b=1'], ['--schema'], ['--prompt', 'x']):\n"
        "    with contextlib.suppress(SystemExit):\n"
        "        cli.infer.main(argv)\n"
        "print({'torch', 'numpy', 'tokenizer'} & set(sys.modules))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.endswith("set()\n")
    assert '--infill "def area(r):\\n    return [MASK:6]\\n"' in result.stdout


def test_print_config_without_arguments_shows_the_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    assert failure(capsys, 0, "--print-config") == to_toml(InferConfig())
