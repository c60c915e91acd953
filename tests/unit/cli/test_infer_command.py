"""``diffusionlm-infer`` on a tiny model."""

from __future__ import annotations

import contextlib
import html
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from cli.infer import main
from config.infer import InferConfig
from config.load import load_config
from diffusionlm.checkpoints.huggingface import load_model
from diffusionlm.inference.generate import generate
from files.terminal_text import escape_control_characters
from tests.unit.cli.conftest import Fails, MakeDirectory
from tokenizer import Tokenizer, load_tokenizer

RESOURCE = Path(__file__).parents[3] / "config" / "resources" / "infer.toml"


@pytest.fixture(scope="module")
def model_dir(make_directory: MakeDirectory, tokenizer: Tokenizer) -> Path:
    """An untrained model whose embedding has five rows more than its tokenizer has tokens."""
    return make_directory(vocab_size=tokenizer.vocab_size + 5, max_position_embeddings=48)


def run(*argv: object) -> None:
    main([str(item) for item in argv])


def records(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_prompts_and_infills_as_json(capsys: pytest.CaptureFixture[str], model_dir: Path) -> None:
    common = ("--model", model_dir, "--json", "--seed", 5, "--set", "generation.max_new_tokens=6")
    more = ("--set", "generation.temperature=2.0", "--set", "model.device=cpu")
    run(*common, *more, "--prompt", "the cat", "--infill", r"the [MASK:2]\nsat", "--prompt", "")
    first, second, hole = records(capsys)
    for answer in (first, hole):
        assert list(answer) == ["kind", "text", "params", "metrics", "tokens"]
        assert list(answer["tokens"]) == ["token_ids", "logprobs", "step_map", "num_repeated_bytes"]
    assert [answer["kind"] for answer in (first, second, hole)] == ["prompt", "prompt", "infill"]
    assert [answer["text"]["prompt"] for answer in (first, second, hole)] == ["the cat", "", "the [MASK:2]\nsat"]
    assert [answer["params"]["seed"] for answer in (first, second, hole)] == [5, 6, 7]

    tokenizer, model = load_tokenizer(model_dir), load_model(model_dir)
    unknown = range(tokenizer.vocab_size, model.config.vocab_size)
    settings = InferConfig().generation.model_copy(
        update={"max_new_tokens": 6, "temperature": 2.0, "suppress_token_ids": tuple(unknown)}
    )
    [expected] = generate(model, [tokenizer.encode("the cat")], settings, [5])
    assert first["tokens"]["token_ids"] == list(expected.token_ids)
    assert first["text"]["output"] == tokenizer.decode(expected.token_ids)
    assert first["tokens"]["step_map"] == list(expected.step_map)
    assert first["tokens"]["logprobs"] == pytest.approx(expected.logprobs, abs=1e-4)
    assert hole["text"]["output"].startswith("the ")
    assert hole["text"]["output"].endswith("\nsat")
    assert (hole["metrics"]["num_tokens"], hole["metrics"]["num_forwards"]) == (2, 2)
    assert (hole["metrics"]["finish_reason"], hole["metrics"]["tokens_per_forward"]) == ("length", 1.0)


def test_token_healing(capsys: pytest.CaptureFixture[str], model_dir: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    texts = ("--prompt", "the cat ", "--prompt", "the c", "--infill", "the [MASK:2] sat", "--max-new-tokens", 5)
    arguments = ("--model", model_dir, *texts, "--temperature", 1.0)
    run(*arguments, "--json", "--html", page)
    healed = records(capsys)
    tokenizer = load_tokenizer(model_dir)
    assert [record["tokens"]["num_repeated_bytes"] for record in healed] == [1, 1, 0]
    replay = re.sub("<sub>.*?</sub>|<[^>]*>", "", page.read_text(encoding="utf-8"))
    for record, prompt in zip(healed, ("the cat ", "the c"), strict=False):
        assert record["text"]["prompt"] == prompt
        whole = prompt[:-1] + tokenizer.decode(record["tokens"]["token_ids"])
        assert prompt + record["text"]["output"] == whole
        assert html.escape(escape_control_characters(whole.partition("\n")[0])) in replay
    run(*arguments, "--json", "--set", "input.token_healing=false")
    assert [record["tokens"]["num_repeated_bytes"] for record in records(capsys)] == [0, 0, 0]


def test_constraints(capsys: pytest.CaptureFixture[str], model_dir: Path, tmp_path: Path) -> None:
    """On prompts, also healed ones, and on each masked span."""
    common = ("--model", model_dir, "--json", "--temperature", 1.0, "--max-new-tokens", 12)
    texts = ("--prompt", "the cat ", "--prompt", "the c", "--prompt", "")
    run(*common, *texts, "--choice", "sat too", "--choice", r"mat\n")
    answers = records(capsys)
    assert {answer["text"]["output"] for answer in answers} <= {"sat too", "mat\n"}
    assert [answer["tokens"]["num_repeated_bytes"] for answer in answers] == [1, 1, 0]
    run(*common, "--prompt", "sat", "--infill", "the [MASK:3] [MASK:2]. [MASK:2]", "--regex", r"[a-d ]+|x\w*")
    answer, filled = records(capsys)
    assert re.fullmatch(r"[a-d ]+|x\w*", answer["text"]["output"])
    assert re.fullmatch(r"the ([a-d ]+|x\w*) ([a-d ]+|x\w*)\. ([a-d ]+|x\w*)", filled["text"]["output"])
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "object", "properties": {"cat": {"type": "boolean"}}, "required": ["cat"]}')
    run(*common, *texts, "--max-new-tokens", 20, "--json-schema", schema)
    assert all(type(json.loads(answer["text"]["output"])["cat"]) is bool for answer in records(capsys))
    never_stop = ("--set", "generation.stop_token_ids=[]")
    run(*common, "--prompt", "the c", "--max-new-tokens", 2, *never_stop, "--regex", "[!?]{2}")
    [answer] = records(capsys)  # with a token that repeats "c" there would be three
    assert re.fullmatch("[!?]{2}", answer["text"]["output"]) and answer["tokens"]["num_repeated_bytes"] == 0


def test_wrong_constraints(fails: Fails, model_dir: Path, tmp_path: Path) -> None:
    schema = tmp_path / "schema.json"
    schema.write_text('{"not": []}')
    common = ("--model", model_dir, "--max-new-tokens", 4)
    for argv, message in (
        (("--prompt", "the", "--regex", "(?=a)"), "constraint.regex: the regular expression has a construct"),
        (("--prompt", "the", "--json-schema", schema), f"{schema}: the schema: not is not supported here: remove it"),
        (("--prompt", "the", "--choice", "a" * 40), "prompt 1 of 1: the constraint needs at least"),
        (("--chat", "--choice", "a"), "[constraint] has no effect on an interactive chat"),
    ):
        assert message in fails(main, *common, *argv)


def test_json_output_has_settings_and_metrics_of_the_batch(capsys: pytest.CaptureFixture[str], model_dir: Path) -> None:
    prompts = [item for text in ("the", "cat", "a dog") for item in ("--prompt", text)]
    arguments = ("--model", model_dir, *prompts, "--json", "--max-new-tokens", 4, "--temperature", 1.0)
    run(*arguments)
    together = records(capsys)
    run(*arguments, "--batch-size", 2)
    apart = records(capsys)
    assert [answer["metrics"]["batch_size"] for answer in apart] == [2, 2, 1]
    for one, other in zip(together, apart, strict=True):
        assert (one["text"], one["params"]) == (other["text"], other["params"])
        assert one["tokens"]["token_ids"] == other["tokens"]["token_ids"]
        assert one["tokens"]["step_map"] == other["tokens"]["step_map"]
    params = together[0]["params"]
    assert (params["max_new_tokens"], params["remasking_strategy"], params["temperature"]) == (4, "low_confidence", 1.0)
    assert (params["attention"], params["cache"], params["suppress_token_ids"]) == ("bidirectional", "none", [])
    assert params["stop_token_ids"] == [load_tokenizer(model_dir).eos_token_id]
    first, second = (answer["metrics"] for answer in apart[:2])
    logprobs = apart[0]["tokens"]["logprobs"]
    assert first["mean_logprob"] == pytest.approx(sum(logprobs) / len(logprobs))
    new_tokens = first["num_tokens"] + second["num_tokens"]
    assert first["seconds"] == second["seconds"]
    assert first["tokens_per_second"] == pytest.approx(new_tokens / first["seconds"], rel=0.01)


def test_chats_are_answered_through_the_template(
    capsys: pytest.CaptureFixture[str], fails: Fails, model_dir: Path, tmp_path: Path
) -> None:
    arguments = ("--model", model_dir, "--max-new-tokens", 3, "--json")
    (tmp_path / "chats.jsonl").write_text(
        '{"messages": [{"role": "user", "content": "<|endoftext|>"}], "id": 7}\n', encoding="utf-8"
    )
    own = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
    template = model_dir / "chat_template.jinja"
    template.write_text(own, encoding="utf-8")
    try:
        run(*arguments, "--chat", "hi", "--chat", "ho", "--system", "s", "--prompts", tmp_path / "chats.jsonl")
        of_file, first, second = records(capsys)
        assert [answer["text"]["prompt"] for answer in (first, second)] == [
            "<system>s<user>hi<a>",
            "<system>s<user>ho<a>",
        ]
        assert first["text"]["messages"][1] == {"role": "user", "content": "hi"}
        assert (first["kind"], first["metrics"]["num_tokens"] <= 3) == ("chat", True)
        assert (of_file["text"]["prompt"], of_file["extra"]) == ("<user><|endoftext|><a>", {"id": 7})
        run("--model", model_dir, "--max-new-tokens", 3, "--chat", "hi", "--system", "s")
        assert capsys.readouterr().out == f"{first['text']['output']}\n"
    finally:
        template.unlink()
    written = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"  # too long for this model
    message = fails(main, *arguments, "--chat", "hi", "--set", "input.chat_template=chatml")
    assert f"chat 1 of 1: {len(load_tokenizer(model_dir).encode(written))} tokens" in message


def test_a_chat_in_the_terminal(
    capsys: pytest.CaptureFixture[str], fails: Fails, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ("--model", model_dir, "--max-new-tokens", 3, "--chat")
    assert "needs a terminal: use --chat TEXT" in fails(main, *arguments)
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    assert "[output] has no effect on an interactive chat" in fails(main, *arguments, "--json")
    assert "interactive takes no prompts" in fails(main, *arguments, "--prompt", "a")
    assert "the model has no chat template" in fails(main, *arguments)

    own = "{% for m in messages %}{{ m.role[0] }}{{ m.content }};{% endfor %}"
    template = model_dir / "chat_template.jinja"
    template.write_text(own, encoding="utf-8")
    lines = iter(["hi", "  ", "x" * 50, "ho"])

    def ask(prompt: str) -> str:
        with contextlib.suppress(StopIteration):
            return next(lines)
        raise EOFError

    monkeypatch.setattr("builtins.input", ask)
    try:
        run(*arguments, "--system", "S")
        first, wrong, second, *end = capsys.readouterr().out.split("\n")
        assert wrong.startswith("failed; the conversation continues without this turn: the prompt: ")
        assert end == ["", ""]
        run("--model", model_dir, "--max-new-tokens", 3, "--prompt", "sS;uhi;", "--json")
        expected = records(capsys)[0]["text"]["output"]
        assert first == expected
        # The same seed as in the chat, whose third turn it is.
        run("--model", model_dir, "--max-new-tokens", 3, "--prompt", f"sS;uhi;a{expected};uho;", "--seed", 2, "--json")
        assert second == records(capsys)[0]["text"]["output"]
    finally:
        template.unlink()


def test_output_files(capsys: pytest.CaptureFixture[str], model_dir: Path, tmp_path: Path) -> None:
    lines, page = tmp_path / "new" / "answers.jsonl", tmp_path / "new" / "replay.html"
    (tmp_path / "prompts.txt").write_bytes("the cat\n\nthe dög\r\n".encode())
    arguments = ("--model", model_dir, "--prompts", tmp_path / "prompts.txt", "--output", lines)
    run(*arguments, "--html", page, "--batch-size", 1, "--max-new-tokens", 4, "--strategy", "random", "--steps", 2)
    output = capsys.readouterr()
    assert output.out == ""
    assert [line.partition(",")[0] for line in output.err.splitlines()] == ["decoding: 2 of 2 inputs"]
    answers = [json.loads(line) for line in lines.read_text(encoding="utf-8").splitlines()]
    assert [answer["text"]["prompt"] for answer in answers] == ["the cat", "the dög"]
    assert [answer["params"]["remasking_strategy"] for answer in answers] == ["random", "random"]
    html = page.read_text(encoding="utf-8")
    assert html.count('<article class="sample card"') == 2
    assert [path.name for path in sorted(lines.parent.iterdir())] == ["answers.jsonl", "replay.html"]


def test_show_prints_one_line_a_forward(capsys: pytest.CaptureFixture[str], model_dir: Path) -> None:
    run("--model", model_dir, "--infill", "the [MASK:3] sat", "--show")
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines[:3]] == [f"infill 1, forward {n}" for n in (1, 2, 3)]
    assert [line.count("░") for line in lines[:3]] == [2, 1, 0]
    run("--model", model_dir, "--infill", "the [MASK:3] sat", "--show", "--json")
    output = capsys.readouterr()
    assert len(output.out.splitlines()) == 1
    assert len(output.err.splitlines()) == 3


def printed_config(fails: Fails, path: Path, *argv: object) -> InferConfig:
    path.write_text(fails(main, *argv, "--print-config", code=0), encoding="utf-8")
    return load_config(InferConfig, path)


def test_escapes_are_read(fails: Fails, tmp_path: Path) -> None:
    text = r'a\nb\tc\\n "q" \x [é]' + "\x7f"
    path = tmp_path / "c.toml"
    read = 'a\nb\tc\\n "q" \\x [é]\x7f'
    config = printed_config(fails, path, "--infill", text, "--infill", "[1]", "--prompt", text, "--chat", text)
    assert (config.input.infills, config.input.prompts, config.input.chats) == ((read, "[1]"), (read,), (read,))
    assert printed_config(fails, path, "--chat", text, "--system", r"\n").input.system == r"\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "1.5"], "--set generation.steps=1.5: expected an integer"),
        (["--prompt", "a", "--system", "x"], "system has no effect without chats"),
        (["--set", "input.prompts_format=jsonl"], 'prompts_format = "jsonl" needs prompts_file'),
        (["--prompt", "a", "--output", "."], "output.file = . is a directory"),
        (["--prompt", "a", "--output", "a", "--html", "a"], "set two paths"),
        (
            ["--prompt", "", "--prompt", "a"],
            "prompt 1 of 2: 0 tokens and max_new_tokens = 64: 64 tokens are more than",
        ),
    ],
)
def test_usage_errors(arguments: list[str], message: str, fails: Fails, model_dir: Path) -> None:
    assert message in fails(main, "--model", model_dir, *arguments)
