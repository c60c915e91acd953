"""A call of ``diffusionlm-infer`` from its inputs on."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from cli.infer import session
from cli.infer.inputs import Input
from cli.infer.session import answer
from config.generation import GenerationConfig
from config.infer import InferConfig, InferInputConfig, InferOutputConfig
from diffusionlm.models.transformer import Transformer
from tokenizer import Tokenizer, train_bpe


@pytest.fixture(scope="module")
def words() -> Tokenizer:
    """Of 23 tokens is the model; of bytes a tokenizer has 256 at least. Prompts are empty, so none of them is used."""
    return train_bpe(["a"], vocab_size=258)


class Calls:
    """Stands for ``generate`` and ``infill``: takes down the batches, and fails in one of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, failing: int | None = None) -> None:
        self.batches: list[tuple[str, list[int]]] = []
        self._failing = failing
        for name in ("generate", "infill"):
            monkeypatch.setattr(session, name, self._replacement(name, getattr(session, name)))

    def _replacement(self, name: str, real: Any) -> Any:
        def decode(model: Transformer, inputs: Sequence[Any], config: Any, seeds: list[int], on_step: Any) -> Any:
            if len(self.batches) == self._failing:
                raise ValueError("the model's probabilities are not finite")
            self.batches.append((name, seeds))
            return real(model, inputs, config, seeds, on_step)

        return decode


def settings(**output: Any) -> InferConfig:
    generation = GenerationConfig(max_new_tokens=3, denoising_steps=1)
    return InferConfig(generation=generation, input=InferInputConfig(batch_size=2), output=InferOutputConfig(**output))


def test_what_is_done_is_kept_when_decoding_breaks_off(
    model: Transformer, words: Tokenizer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    calls = Calls(monkeypatch, failing=1)
    config = settings(file=tmp_path / "a.jsonl", html=tmp_path / "a.html")
    with pytest.raises(ValueError, match="not finite"):
        answer(model, words, [Input("prompt")] * 3, config)
    assert calls.batches == [("generate", [0, 1])]
    lines = (tmp_path / "a.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["params"]["seed"] for line in lines] == [0, 1]
    assert (tmp_path / "a.html").read_text(encoding="utf-8").count('<section class="request"') == 2


def test_nothing_is_decoded_when_a_later_request_does_not_fit(
    model: Transformer, words: Tokenizer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    calls = Calls(monkeypatch)
    config = settings(html=tmp_path / "a.html")
    long = Input("prompt", "a" * 38, place="prompts.txt:7")
    message = r"^prompts.txt:7 \(38 tokens\) and max_new_tokens = 3: 41 tokens are more than the model's context"
    with pytest.raises(ValueError, match=message):
        answer(model, words, [Input("prompt"), Input("prompt"), long], config)
    whole = config.model_copy(update={"generation": GenerationConfig(total_length=38)})
    with pytest.raises(ValueError, match=r"prompts.txt:7: its 38 tokens leave nothing of total_length = 38"):
        answer(model, words, [Input("prompt"), long], whole)
    with pytest.raises(ValueError, match="has no hole"):
        answer(model, words, [Input("prompt"), Input("infill", "x")], config)
    with pytest.raises(ValueError, match=r'output.html = ".*no/a.html": there is no directory'):
        answer(model, words, [Input("prompt")], settings(html=tmp_path / "no" / "a.html"))
    assert calls.batches == []
    assert not list(tmp_path.iterdir())
