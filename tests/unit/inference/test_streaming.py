"""Text that comes while it is decoded."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from config.generation import GenerationConfig
from diffusionlm.inference import generate as generate_module
from diffusionlm.inference.generate import decode_steps, generate, stream
from diffusionlm.inference.requests import ActiveRequest
from diffusionlm.inference.text import decode_continuation
from diffusionlm.models.transformer import Transformer
from tests.conftest import MakeModel
from tokenizer import Tokenizer


@pytest.fixture(scope="module")
def model(tiny_model: MakeModel, tokenizer: Tokenizer) -> Transformer:
    """Of a tokenizer of bytes, so that nearly all that it says is parts of characters."""
    ids = {"mask_token_id": tokenizer.mask_token_id, "eos_token_id": tokenizer.eos_token_id}
    size = tokenizer.vocab_size
    return tiny_model(torch.float64, vocab_size=size, max_position_embeddings=64, pad_token_id=None, **ids).eval()


def settings(**keys: Any) -> GenerationConfig:
    return GenerationConfig(**{"max_new_tokens": 8, "block_length": 4, "temperature": 1.0, **keys})


@pytest.mark.parametrize("strategy", ["low_confidence", "threshold", "p2", "remdm_loop"])
@pytest.mark.parametrize("attention", ["bidirectional", "block_causal"])
def test_the_pieces_are_the_text(model: Transformer, tokenizer: Tokenizer, strategy: str, attention: Any) -> None:
    config = settings(remasking_strategy=strategy, attention=attention)
    prompt = tokenizer.encode("abc")
    [whole] = generate(model, [prompt], config, [3])
    pieces = list(stream(model, tokenizer, prompt, config, 3))
    assert "".join(pieces) == decode_continuation(tokenizer, whole.token_ids)
    assert all(pieces) and len(pieces) > 1
    stop = whole.token_ids[5]
    [cut] = generate(model, [prompt], ended := config.model_copy(update={"stop_token_ids": (stop,)}), [3])
    assert "".join(stream(model, tokenizer, prompt, ended, 3)) == decode_continuation(tokenizer, cut.token_ids)


FINAL_AT_ONCE = ["xa__a____", "xa_\xa9a____", "xa\xc3\xa9a____", "xa\xc3\xa9ab___", "xa\xc3\xa9abcde"]
TAKEN_BACK = ["xa\xc3\xa9_____", "xa_\xa9a____", "xa\xc3\xa9a____", "xa\xc3\xa9ab___", "xa\xc3\xa9abcde"]


@pytest.mark.parametrize(
    ("strategy", "canvases", "pieces"),
    [
        ("low_confidence", FINAL_AT_ONCE, ["a", "éa", "b", "cde"]),
        # What a block has may be taken back until the next block has begun.
        ("p2", TAKEN_BACK, ["aéa", "bcde"]),
    ],
)
def test_final_text_is_emitted_immediately(
    model: Transformer,
    tokenizer: Tokenizer,
    monkeypatch: pytest.MonkeyPatch,
    strategy: str,
    canvases: list[str],
    pieces: list[str],
) -> None:
    """Of a prompt x and two blocks of four bytes; _ is a mask."""

    def fake(model: Any, requests: list[ActiveRequest]) -> Iterator[int]:
        [request] = requests
        assert (request.tokens_L.tolist(), request.prepared.seed) == (
            [*tokenizer.encode("x"), *[tokenizer.mask_token_id] * 8],
            7,
        )
        blocks = request.blocks
        for number, text in enumerate(canvases, 1):
            request.is_masked_L[:] = [byte == "_" for byte in text]
            request.tokens_L[:] = [tokenizer.vocab[byte.encode("latin-1")] for byte in text]
            if strategy == "p2":
                num_complete = sum(not set(part) <= {"_"} for part in (text[5:], text[8:]))
            else:
                num_complete = sum("_" not in part for part in (text[1:5], text[5:]))
            request.blocks = blocks[num_complete:]
            yield number

    monkeypatch.setattr(generate_module, "decode_steps", fake)
    assert list(stream(model, tokenizer, tokenizer.encode("x"), settings(remasking_strategy=strategy), 7)) == pieces


def test_no_forward_is_computed_before_its_piece_is_asked_for(
    model: Transformer, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: list[int] = []

    def count(*args: Any) -> Iterator[int]:
        for number in decode_steps(*args):
            counts.append(number)
            yield number

    monkeypatch.setattr(generate_module, "decode_steps", count)
    pieces = stream(model, tokenizer, [5], settings(remasking_strategy="sequential", top_k=1))
    assert not counts
    next(pieces)
    num_forwards = len(counts)
    pieces.close()  # type: ignore[attr-defined]
    assert 0 < len(counts) == num_forwards < 8
