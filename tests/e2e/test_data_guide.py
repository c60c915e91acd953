"""Each example of docs/data.md is a valid config, and its sources give rows of both splits."""

from __future__ import annotations

import gzip
import json
import re
import shutil
import sysconfig
import tomllib
from pathlib import Path
from typing import Any

import pytest
import zstandard

from config.data import DataConfig, LocalFiles
from config.make_data import MakeDataConfig, MakeDataOutputConfig
from config.tokenizer import TokenizerConfig
from diffusionlm.data.make_data import make_data
from diffusionlm.data.pipeline import build_row_reader, open_components
from diffusionlm.vision.messages import IMAGE_TOKENS
from tests.unit.data.chat_cases import image_processor, picture
from tokenizer import load_tokenizer

GUIDE = Path(__file__).parents[2] / "docs" / "data.md"
EXAMPLES = [tomllib.loads(block) for block in re.findall(r"```toml\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.S)]
LINES = [json.dumps({"text": f"the cat {index} sat on the mat {index * index}"}) for index in range(120)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Small versions of the files that the examples name."""
    folder = tmp_path_factory.mktemp("guide")
    for name in ("texts", "more", "books", "held-out", "crawl", "tiny", "chats", "questions", "pictures"):
        (folder / name).mkdir()
    plain = "\n".join(LINES)
    for package in ("json", "email"):
        shutil.copytree(Path(sysconfig.get_paths()["stdlib"]) / package, folder / "stdlib" / package)
    (folder / "texts/a.jsonl").write_text(plain, encoding="utf-8")
    (folder / "more/b.json").write_text("[" + ",".join(LINES) + "]", encoding="utf-8")
    (folder / "books/a.txt.gz").write_bytes(gzip.compress("\n\n".join(LINES).encode()))
    (folder / "held-out/a.txt").write_text("one\n\ntwo\n", encoding="utf-8")
    broken = f"{plain}\nthis is no JSON\n".encode()
    (folder / "crawl/a.jsonl.zst").write_bytes(zstandard.ZstdCompressor().compress(broken))
    for split in ("train", "validation"):
        (folder / f"tiny/{split}.jsonl").write_text(plain, encoding="utf-8")
    pairs = [{"question": f"what is {index}?", "answer": f"it is {index}"} for index in range(120)]
    (folder / "questions/a.jsonl").write_text("\n".join(map(json.dumps, pairs)), encoding="utf-8")
    chats = [{"instruction": pair["question"], "output": pair["answer"]} for pair in pairs]
    (folder / "chats/a.jsonl").write_text("\n".join(map(json.dumps, chats)), encoding="utf-8")
    (folder / "pictures/1.png").write_bytes(picture(1, 2))
    chats = [{"prompt": f"<image>{index}", "completion": "it", "image": "1.png"} for index in range(120)]
    (folder / "pictures/a.jsonl").write_text("\n".join(map(json.dumps, chats)), encoding="utf-8")
    source = LocalFiles(paths=(str(folder / "texts/a.jsonl"),))
    output = MakeDataOutputConfig(directory=folder / "data/stdlib", workers=0)
    tokenizer = TokenizerConfig(vocab_size=300, special_tokens=("<|im_start|>", "<|im_end|>", *IMAGE_TOKENS))
    make_data(MakeDataConfig(source=source, tokenizer=tokenizer, output=output), lambda _: None)
    return folder


def test_there_are_examples() -> None:
    assert len(EXAMPLES) >= 8


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: str(example)[:60])
def test_examples_give_rows(example: dict[str, Any], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    paths = sysconfig.get_paths() | {"stdlib": str(folder / "stdlib")}
    monkeypatch.setattr(sysconfig, "get_paths", lambda *_: paths)
    values = example["data"]
    source = values.get("source")
    if isinstance(source, dict) and source["kind"] == "hub":
        source |= {"dataset": "./tiny"}  # the same reader, without the Hub
        del source["revision"]
    config = DataConfig.model_validate({"source": "python-stdlib"} | values if "mixture" not in values else values)
    tokenizer = load_tokenizer(folder / "data/stdlib/tokenizer")
    for split in ("train", "validation"):
        components = open_components(config, split, processor=image_processor())
        rows, _ = build_row_reader(
            components, config, tokenizer, config.row_length or 64, seed=0, repeat=split == "train"
        ).read(0, None, 4)
        assert rows and all(row.loss_mask_L.any() for row in rows)
        assert all(row.images for row in rows) == ("images" in values)
        assert all(component.source.provenance and component.source.identity for component in components)
