"""What is wrong with files and arguments is reported on one line, with exit code 2, before the work begins."""

from __future__ import annotations

import importlib
import json
import shutil
from pathlib import Path

import pytest

from tests.unit.cli.conftest import MakeDirectory

ROOT = Path(__file__).parents[3]

Call = tuple[str, list[str], list[str]]
"""Module of the command, arguments, texts of the message."""


@pytest.fixture(scope="module")
def folder(make_directory: MakeDirectory, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, copies of it that are damaged, a text and a file of prompts."""
    folder = tmp_path_factory.mktemp("cases")
    shutil.copytree(make_directory(), folder / "model")
    (folder / "model/MANIFEST.json").unlink(missing_ok=True)
    for name in ("no-config", "no-weights", "no-tokenizer", "broken", "bert"):
        shutil.copytree(folder / "model", folder / name)
    (folder / "no-config/config.json").unlink()
    (folder / "no-weights/model.safetensors").unlink()
    (folder / "no-tokenizer/tokenizer.json").unlink()
    (folder / "broken/config.json").write_text("{", encoding="utf-8")
    config = json.loads((folder / "model/config.json").read_text(encoding="utf-8"))
    (folder / "bert/config.json").write_text(json.dumps({**config, "model_type": "bert"}), encoding="utf-8")
    (folder / "adapter").mkdir()
    (folder / "adapter/adapter_config.json").write_text('{"peft_type": "IA3", "lora_bias": true}', encoding="utf-8")
    (folder / "adapter/adapter_model.safetensors").touch()
    (folder / "text.txt").write_text("a b c\n" * 99, encoding="utf-8")
    (folder / "image.txt").write_bytes(b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR")
    (folder / "holes.jsonl").write_text('"a"\n{"infill": "a[MASK:x]"}\n', encoding="utf-8")
    (folder / "answers.jsonl").write_text("{}\n", encoding="utf-8")
    return folder


def calls_of_models(folder: Path) -> list[Call]:
    """Each command that reads a model, with each kind of damage that concerns it."""
    damages = {
        "none": ["none", "no such directory"],
        "no-config": ["no-config", "config.json"],
        "no-weights": ["no-weights"],
        "broken": ["broken/config.json", "JSON"],
        "bert": ["bert/config.json", "model_type = 'bert'"],
        "no-tokenizer": ["no-tokenizer", "tokenizer.json"],
    }
    calls: list[Call] = []
    for name, texts in damages.items():
        path = str(folder / name)
        calls.append(("cli.infer", ["--model", path, "--prompt", "a", "--max-new-tokens", "4"], texts))
        calls.append(("cli.serve", ["--model", path, "--port", "0"], texts))
        calls.append(("cli.eval", ["--model", path, "--data", str(folder / "text.txt")], texts))
        calls.append(("cli.convert", ["--source", path, "--target", str(folder / "new")], texts))
        calls.append(("cli.train", [*train(folder), "--set", f'model={{init_from="{path}"}}'], [*texts, "init_from"]))
        if name not in ("bert", "no-tokenizer"):  # analyze reads tensors of any model
            calls.append(("cli.analyze", [path], texts))
            calls.append(("cli.analyze", [str(folder / "model"), path], texts))
    return calls


def train(folder: Path) -> list[str]:
    source = f'data.source={{kind="files", paths=["{folder / "text.txt"}"]}}'
    overrides = [f"run.directory={folder}/run", "data.row_length=16", source]
    config = ["--config", str(ROOT / "config/resources/train.toml")]
    return [*config, *(word for override in overrides for word in ("--set", override))]


def calls_of_inputs(folder: Path) -> list[Call]:
    infer = ["--model", str(folder / "model")]
    evaluate = [*infer, "--data", str(folder / "text.txt")]
    file, proc, short = str(folder / "text.txt"), "/proc/new", ["--max-new-tokens", "4"]
    return [
        ("cli.infer", [*infer, "--infill", "a [MASK:0]"], ["[MASK:0]", "n from 1"]),
        ("cli.infer", [*infer, "--infill", "a"], ["no masked span", "write [MASK:n]"]),
        ("cli.infer", [*infer, "--prompts", f"{folder}/holes.jsonl", *short], ["holes.jsonl:2", "[MASK:x]"]),
        ("cli.infer", [*infer, "--prompts", str(folder / "none.txt")], ["none.txt"]),
        ("cli.infer", [*infer, "--prompts", str(folder)], [str(folder), "directory"]),
        ("cli.infer", [*infer, "--chat", "a"], ["no chat template", "input.chat_template"]),
        ("cli.infer", [*infer, "--set", 'input.chats=["a"]'], ["no chat template", "input.chat_template"]),
        ("cli.infer", [*infer, "--prompt", "a", "--max-new-tokens", "999"], ["max_new_tokens = 999", "lower"]),
        ("cli.infer", [*infer, "--prompt", "a", "--block-length", "999"], ["block_length = 999", "lower it"]),
        ("cli.infer", [*infer, "--prompt", "a", "--output", f"{folder}/answers.jsonl"], ["output.file", "new path"]),
        ("cli.infer", [*infer, "--prompt", "a", "--output", f"{file}/a"], ["output.file", "choose another path"]),
        ("cli.infer", [*infer, "--prompt", "a", *short, "--html", proc], ["output.html", "choose another"]),
        ("cli.infer", ["--prompt", "a"], ["no model", "--model DIR"]),
        ("cli.serve", [], ["no model", "--model DIR"]),
        ("cli.eval", ["--data", file], ["no model", "--model DIR"]),
        ("cli.eval", infer, ["no data", "--data FILE"]),
        ("cli.serve", [*infer, "--adapter", f"a={folder}/none"], ["adapter_config.json", "PEFT adapter"]),
        ("cli.serve", [*infer, "--adapter", f"a={folder}/adapter"], ['peft_type = "IA3"']),
        ("cli.serve", [*infer, "--adapter", f"model={folder}/adapter"], ["both named 'model'", "serve.model_name"]),
        ("cli.serve", [*infer, "--api-keys-file", str(folder / "none.txt")], ["none.txt"]),
        ("cli.serve", [*infer, "--api-keys-file", str(folder / "text.txt")], ["text.txt:1", "at least 16 ASCII"]),
        ("cli.serve", [*infer, "--chat-template", "t.jinja"], ["chat_template", "t.jinja", "chatml", "file"]),
        ("cli.serve", [*infer, "--host", "192.0.2.1", "--port", "0"], ["serve.host", "--host"]),
        ("cli.serve", [*infer, "--set", "generation.block_length=999"], ["block_length = 999", "lower it"]),
        ("cli.eval", [*infer, "--data", str(folder / "none*.txt")], ["data.source.paths", "matches no file"]),
        ("cli.eval", [*evaluate, "--set", "data.row_length=9999"], ["data.row_length = 9999", "lower it"]),
        (
            "cli.eval",
            [*evaluate, "--set", 'likelihood={kind="sampler", generation={remasking_strategy="random"}}'],
            ['"random" has no exact likelihood', "choose one of"],
        ),
        ("cli.convert", ["--source", infer[1], "--target", infer[1]], ["target = ", "is the source", "name a"]),
        ("cli.convert", ["--source", infer[1], "--target", proc], ["target = ", "choose another"]),
        *(
            (module, [*arguments, "--adapter", folder_of_adapter], texts)
            for module, arguments in (
                ("cli.infer", [*infer, "--prompt", "a", "--max-new-tokens", "4"]),
                ("cli.eval", evaluate),
                ("cli.convert", ["--source", infer[1], "--target", str(folder / "new")]),
            )
            for folder_of_adapter, texts in (
                (str(folder / "none"), ["adapter_config.json", "PEFT adapter"]),
                (str(folder / "adapter"), ['peft_type = "IA3"', "lora_bias"]),
            )
        ),
        ("cli.train", [*train(folder), "--set", f"run.directory={file}/run"], ["run.directory", "choose another"]),
        ("cli.train", [*train(folder), "--set", f"run.directory={proc}/run"], ["run.directory", "choose another"]),
        ("cli.train", [*train(folder), "--set", f'tokenizer={{path="{folder}"}}'], ["tokenizer.path", "no model at"]),
        ("cli.train", [*train(folder), "--set", "data.source.paths=/none/*"], ["data.source.paths", "matches no file"]),
        *(
            (module, [*arguments, "--set", f"data.source.paths={folder}/image.txt"], ["image.txt: binary data", "skip"])
            for module, arguments in (("cli.train", train(folder)), ("cli.eval", evaluate))
        ),
        (
            "cli.train_ddp",
            [*train(folder), "--set", f"run.directory={file}/run", "--set", "parallel.local_ranks=2"],
            ["run.directory", "choose another"],
        ),
        ("cli.train_ddp", [*train(folder), "--nodes", "2"], ["--nodes 2", "add --rendezvous"]),
    ]


def test_errors_before_the_work(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(path for path in folder.rglob("*"))
    problems = []
    for module, arguments, texts in [*calls_of_models(folder), *calls_of_inputs(folder)]:
        with pytest.raises(SystemExit) as caught:
            importlib.import_module(module).main(arguments)
        message = capsys.readouterr().err
        num_lines = 2 if "is not a valid TrainConfig" in message else 1
        is_short = message.count("\n") == num_lines and message.startswith("diffusionlm-")
        if caught.value.code != 2 or not is_short or any(text not in message for text in texts):
            problems.append((module, arguments, texts, caught.value.code, message))
    assert not problems, "\n".join(map(str, problems))
    assert sorted(path for path in folder.rglob("*")) == before, "nothing is written"
