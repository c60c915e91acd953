"""Commands that end with an exit code, and model directories."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import pytest
import torch

from diffusionlm.checkpoints.huggingface import save_model_directory
from tests.conftest import MakeModel
from tokenizer import Tokenizer

MakeDirectory = Callable[..., Path]


class Fails(Protocol):
    """``fails(main, *arguments, code=2)``: call a command that ends with an exit code, and return what it printed."""

    def __call__(self, main: Callable[[Sequence[str]], object], *arguments: object, code: int = 2) -> str: ...


@pytest.fixture
def fails(capsys: pytest.CaptureFixture[str]) -> Fails:
    def call(main: Callable[[Sequence[str]], object], *arguments: object, code: int = 2) -> str:
        capsys.readouterr()
        with pytest.raises(SystemExit) as caught:
            main([str(argument) for argument in arguments])
        output = capsys.readouterr()
        assert (caught.value.code or 0) == code, output.err
        assert "Traceback" not in output.err
        assert not (code and output.out), "an error comes alone"
        return output.err if code else output.out

    return call


@pytest.fixture(scope="session")
def make_directory(
    tiny_model: MakeModel, tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory
) -> MakeDirectory:
    """``make_directory(words, noise=..., **config)``: an untrained model, with its tokenizer beside it."""

    def make(words: Tokenizer = tokenizer, noise: float = 0.0, **config: Any) -> Path:
        ids = {"mask_token_id": words.mask_token_id, "eos_token_id": words.eos_token_id}
        model = tiny_model(**{"vocab_size": words.vocab_size, **ids, **config})
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(noise * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
        folder = tmp_path_factory.mktemp("models") / "tiny"
        save_model_directory(model, words, folder)
        return folder

    return make
