"""What is said of two model directories."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from cli.analyze import format_analysis, main
from diffusionlm.checkpoints.analyze import analyze, list_tensors
from logger.pages.terminal import render_text

Tensors = dict[str, Tensor]


def directory(path: Path, files: dict[str, Tensors], **config: object) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    for name, tensors in files.items():
        save_file(tensors, path / name)
    return path


@pytest.fixture
def tensors() -> Tensors:
    rng = torch.Generator().manual_seed(0)
    shapes = {"embed": (5, 4), "layer.q": (4, 4), "layer.k": (4, 4), "norm": (4,)}
    return {name: torch.randn(shape, generator=rng) for name, shape in shapes.items()}


def test_equal_directories_are_equal_however_they_are_sharded(tensors: Tensors, tmp_path: Path) -> None:
    one = directory(tmp_path / "one", {"model.safetensors": tensors}, a=1, b=2)
    names = list(tensors)
    shards = {
        f"model-{index}.safetensors": {name: tensors[name] for name in part}
        for index, part in enumerate((names[:1], names[1:]))
    }
    two = directory(tmp_path / "two", shards, a=1, b=3, c=4)
    result = analyze(one, two)
    assert result.is_equal and len(result.pairs) == 4 and not result.only_a + result.only_b
    assert result.config_differences == (("b", 2, 3), ("c", None, 4))
    assert {info.file for info in list_tensors(two).values()} == set(shards)
    halves = {name: tensor.bfloat16() for name, tensor in tensors.items()}
    half = directory(tmp_path / "half", {"model.safetensors": halves})
    wide = directory(tmp_path / "wide", {"model.safetensors": {name: half.float() for name, half in halves.items()}})
    assert analyze(half, wide).is_equal, "a wider dtype is no difference"
    assert "4 tensors are equal" in render_text(format_analysis(result, 40), StringIO())


def test_differences_are_measured(tensors: Tensors, tmp_path: Path) -> None:
    one = directory(tmp_path / "one", {"model.safetensors": tensors})
    changed = {**tensors, "norm": tensors["norm"] + torch.tensor([0.0, 0.5, 0.0, -0.25])}
    result = analyze(one, directory(tmp_path / "two", {"model.safetensors": changed}))
    [pair] = [pair for pair in result.pairs if pair.max_difference]
    assert pair.a.name == "norm" and pair.max_difference == pytest.approx(0.5, rel=1e-6)
    expected = (0.5**2 + 0.25**2) ** 0.5 / float(tensors["norm"].double().norm())
    assert pair.relative_difference == pytest.approx(expected, rel=1e-6)
    assert not result.is_equal
    grown = directory(tmp_path / "three", {"model.safetensors": {**tensors, "embed": torch.zeros(6, 4)}})
    result = analyze(one, grown)
    [pair] = [pair for pair in result.pairs if pair.max_difference is None]
    assert (pair.a.shape, pair.b.shape) == ((5, 4), (6, 4)) and not result.is_equal
    assert "5x4 / 6x4" in render_text(format_analysis(result, 40), StringIO())


def test_names_of_another_family(tmp_path: Path) -> None:
    table, norm = torch.randn(5, 4), torch.randn(4)
    llada = {"model.transformer.wte.weight": table, "model.transformer.ln_f.weight": norm + 1.0}
    own = {"model.embed_tokens.weight": table, "model.norm.weight": norm, "new": torch.ones(7)}
    one = directory(tmp_path / "one", {"model.safetensors": llada})
    result = analyze(one, directory(tmp_path / "two", {"weights.safetensors": own}))
    text = render_text(format_analysis(result, 40), StringIO())
    assert "1 tensors are equal" in text and "model.transformer.ln_f.weight = model.norm.weight" in text
    assert not result.only_a and [info.name for info in result.only_b] == ["new"] and "only in b:" in text


def test_the_command(tensors: Tensors, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = directory(tmp_path / "one", {"model.safetensors": tensors})
    main([str(one)])
    assert "4 tensors, 56 values" in capsys.readouterr().out
    main([str(one), str(one), "--json"])
    assert json.loads(capsys.readouterr().out)["is_equal"] is True
    main([str(one), "--set", "max_rows=1"])
    assert "and 3 more" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "name one or two model directories"),
        (["nowhere"], "nowhere"),
        (["{one}", "{empty}"], "convert it with diffusionlm-convert"),
    ],
)
def test_incomparable_directories_are_rejected(
    arguments: list[str], message: str, tensors: Tensors, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = directory(tmp_path / "one", {"model.safetensors": tensors})
    empty = directory(tmp_path / "empty", {})
    with pytest.raises(SystemExit) as caught:
        main([argument.format(one=one, empty=empty) for argument in arguments])
    assert caught.value.code == 2 and message in capsys.readouterr().err


def test_damaged_files_are_named(tensors: Tensors, tmp_path: Path) -> None:
    one = directory(tmp_path / "one", {"model.safetensors": tensors})
    (one / "model.safetensors").write_bytes(b"no tensors")
    with pytest.raises(ValueError, match=r"model\.safetensors: cannot be read"):
        analyze(one, one)
