"""``diffusionlm-infer`` with images: the flag, lines of a file, and the chat in the terminal."""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from cli.infer import main
from config.generation import GenerationConfig
from diffusionlm.checkpoints.huggingface import load_model
from diffusionlm.inference.generate import generate, infill
from diffusionlm.inference.request_builder import suppress_ids_without_text
from diffusionlm.vision.messages import IMAGE_PLACEHOLDER
from diffusionlm.vision.processor import save_processor
from tests.image_chats import BLUE, MODEL_KEYS, NUM_TOKENS, PROCESSOR, RED, TOKENIZER, to_data_url, to_jpeg
from tests.unit.cli.conftest import Fails, MakeDirectory

JPEG = to_jpeg(BLUE)


@pytest.fixture(scope="module")
def model_dir(make_directory: MakeDirectory) -> Path:
    directory = make_directory(TOKENIZER, **MODEL_KEYS)
    save_processor(PROCESSOR, directory)
    return directory


@pytest.fixture
def pictures(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / "red.png", tmp_path / "blue.jpg"]
    for path, file in zip(paths, (RED, JPEG), strict=True):
        path.write_bytes(file)
    return paths


def ask(capsys: pytest.CaptureFixture[str], directory: Path, *argv: object) -> list[dict[str, Any]]:
    main(["--model", str(directory), "--json", "--max-new-tokens", "6", *map(str, argv)])
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def encode(text: str, answer: str = "") -> list[int]:
    """A message and the beginning of its answer, with a placeholder token for each image."""
    chat = f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n{answer}"
    return TOKENIZER.encode(chat, allow_special=True)


def decode_alone(directory: Path, ids: list[int], files: list[bytes], *, seed: int = 0) -> list[int]:
    model = load_model(directory)
    is_infill = TOKENIZER.mask_token_id in ids
    config = GenerationConfig(max_new_tokens=None if is_infill else 6)
    config = suppress_ids_without_text(config, TOKENIZER, model.config)
    function = infill if is_infill else generate
    return list(function(model, [ids], config, [seed], images=[files], processor=PROCESSOR)[0].token_ids)


def test_images_precede_the_message(capsys: pytest.CaptureFixture[str], model_dir: Path, pictures: list[Path]) -> None:
    """Of each chat, in their order; the answer is that of `generate`."""
    images = ["--image", pictures[0], "--image", pictures[1]]
    first, second = ask(capsys, model_dir, *images, "--chat", "the cat", "--chat", "the dog")
    written = IMAGE_PLACEHOLDER * 2
    assert first["text"]["prompt"] == f"<|im_start|>user\n{written}the cat<|im_end|>\n<|im_start|>assistant\n"
    [message] = first["text"]["messages"]
    assert message["content"][1] == {"type": "image", "image": str(pictures[1])}
    for seed, (record, text) in enumerate(((first, "the cat"), (second, "the dog"))):
        ids = encode(written + text)
        assert record["tokens"]["token_ids"] == decode_alone(model_dir, ids, [RED, JPEG], seed=seed)
    [swapped] = ask(capsys, model_dir, *images[2:], *images[:2], "--chat", "the cat")
    assert swapped["tokens"]["logprobs"] != first["tokens"]["logprobs"]


def test_lines_of_a_file_name_images_below_its_folder(
    capsys: pytest.CaptureFixture[str], fails: Fails, model_dir: Path, pictures: list[Path], tmp_path: Path
) -> None:
    """As in training data. A path, a data URL and the flag give one answer."""
    path = tmp_path / "chats.jsonl"

    def write(*parts: Any) -> None:
        messages = [{"role": "user", "content": [*parts, {"type": "text", "text": "the cat"}]}]
        path.write_text(json.dumps("the") + "\n" + json.dumps({"messages": messages, "id": 3}) + "\n")

    [expected] = ask(capsys, model_dir, "--image", pictures[0], "--chat", "the cat", "--seed", 1)
    for part in (
        {"type": "image", "image": "red.png"},
        {"type": "image_url", "image_url": {"url": to_data_url(RED)}},
    ):
        write(part)
        _, record = ask(capsys, model_dir, "--prompts", path)
        assert record["tokens"]["token_ids"] == expected["tokens"]["token_ids"] and record["extra"] == {"id": 3}
    for name, problem in (
        ("gone.png", "the image cannot be read"),
        ("../red.png", "outside of"),
        ("https://a.org/b.png", "is not fetched"),
    ):
        write({"type": "image", "image": name})
        message = fails(main, "--model", model_dir, "--prompts", path)
        assert f"{path}:2: messages[0].content[0]: " in message and problem in message


def test_an_infill_is_an_answer_to_the_images(
    capsys: pytest.CaptureFixture[str], model_dir: Path, pictures: list[Path], tmp_path: Path
) -> None:
    """With a question by a line of a file. The chat is not displayed."""
    path = tmp_path / "infills.jsonl"
    content = [{"type": "image", "image": "red.png"}, {"type": "text", "text": "the mat?"}]
    line = {"messages": [{"role": "user", "content": content}], "infill": "the[MASK:2] sat"}
    path.write_text(json.dumps(line) + "\n")
    [plain] = ask(capsys, model_dir, "--image", pictures[0], "--infill", "the[MASK:2] sat")
    [asked] = ask(capsys, model_dir, "--prompts", path)
    for record, question in ((plain, ""), (asked, "the mat?")):
        canvas = encode(IMAGE_PLACEHOLDER + question, "the<|mask|><|mask|> sat")
        expected = decode_alone(model_dir, canvas, [RED])
        assert record["tokens"]["token_ids"] == expected
        assert len(expected) == len(canvas) + NUM_TOKENS - 1
        text, output = record["text"]["prompt"], record["text"]["output"]
        assert text == "the[MASK:2] sat" and output.startswith("the") and output.endswith(" sat")
        assert "im_start" not in output
    assert plain["tokens"] != asked["tokens"]


def test_a_chat_in_the_terminal(
    capsys: pytest.CaptureFixture[str],
    fails: Fails,
    model_dir: Path,
    pictures: list[Path],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """The flag's images belong to the first message, those of /image to the next one; a wrong one is reported. Answers
    are those to the whole conversation."""
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    lines = iter(["the cat", "/image gone.png", f"/image {pictures[1]}", "the dog", "the mat"])

    def read_line(prompt: str) -> str:
        with contextlib.suppress(StopIteration):
            return next(lines)
        raise EOFError

    monkeypatch.setattr("builtins.input", read_line)
    arguments = ["--model", str(model_dir), "--max-new-tokens", "6", "--image", str(pictures[0]), "--chat"]
    main(arguments)
    printed = capsys.readouterr().out
    path, messages, outputs = tmp_path / "chat.jsonl", [], []
    red, blue = ({"type": "image", "image": picture.name} for picture in pictures)
    for parts, text in (([red], "the cat"), ([blue], "the dog"), ([], "the mat")):
        messages.append({"role": "user", "content": [*parts, {"type": "text", "text": text}]})
        path.write_text(json.dumps({"messages": messages}))
        outputs.append(ask(capsys, model_dir, "--prompts", path)[0]["text"]["output"])
        messages.append({"role": "assistant", "content": outputs[-1]})
    start, end = printed.split("failed; the conversation continues without this turn: ")
    assert "gone.png: the image cannot be read" in end.partition("\n")[0]
    assert start + end.partition("\n")[2] == "\n".join([*outputs, "", ""])
    pictures[0].unlink()
    assert "red.png: the image cannot be read" in fails(main, *arguments)


def test_what_is_refused(fails: Fails, model_dir: Path, make_directory: MakeDirectory, pictures: list[Path]) -> None:
    image = ("--image", pictures[0])
    assert "add --chat TEXT" in fails(main, "--model", model_dir, *image)
    assert "images (--image) belong to a chat or an infill" in fails(
        main, "--model", model_dir, *image, "--prompt", "a"
    )
    assert "gone.png: the image cannot be read" in fails(
        main, "--model", model_dir, "--image", "gone.png", "--chat", "a"
    )
    pictures[0].write_bytes(RED[:-30])
    assert "red.png: the image is damaged or truncated" in fails(main, "--model", model_dir, *image, "--chat", "a")
    text_model = make_directory(max_position_embeddings=128)
    arguments = ("--chat", "a", "--set", "input.chat_template=chatml")
    assert "the model has no vision tower" in fails(main, "--model", text_model, *image, *arguments)
    (model_dir / "preprocessor_config.json").rename(model_dir / "moved")
    try:
        assert "has no preprocessor_config.json" in fails(main, "--model", model_dir, "--prompt", "a")
    finally:
        (model_dir / "moved").rename(model_dir / "preprocessor_config.json")
