"""Token healing, against lists of tokens made by brute force and distributions computed in NumPy."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from config.generation import GenerationConfig
from diffusionlm.inference.generate import generate, stream
from diffusionlm.inference.healing import HealedText, TokenHealer, encode_pieces, split_infill
from diffusionlm.inference.request_builder import prepare_request
from diffusionlm.inference.requests import RequestOptions
from diffusionlm.inference.settings import resolve_settings
from diffusionlm.models.transformer import Transformer
from tokenizer import Tokenizer, train_bpe

CODE = """def name(self, names):
    for i in range(10):
        if i is not None:
            return name in names
    return äöü
"""


@pytest.fixture(scope="module")
def code() -> Tokenizer:
    return train_bpe([CODE] * 3, vocab_size=320)


@pytest.fixture(scope="module")
def model(tiny_model: Callable[..., Transformer], code: Tokenizer) -> Transformer:
    return tiny_model(
        vocab_size=code.vocab_size,
        mask_token_id=code.mask_token_id,
        eos_token_id=code.eos_token_id,
        max_position_embeddings=64,
    )


def tokens_from(tokenizer: Tokenizer, start: bytes) -> set[int]:
    return {token for text, token in tokenizer.vocab.items() if text.startswith(start)}


def random_texts(count: int) -> list[str]:
    rng = random.Random(0)
    starts = [rng.randrange(len(CODE)) for _ in range(count)]
    return [CODE[start : start + rng.randrange(1, 30)] + rng.choice(["", " ", "  ", "\n    "]) for start in starts]


@pytest.mark.parametrize(
    ("text", "kept", "start"),
    [
        ("for i in ", "for i in", " "),
        ("def name(", "def name", "("),
        ("def name.", "def name.", ""),  # no longer token begins with a dot
        ("for i in nam", "for i in", " nam"),
        ("def name(self):\n    ", "def name(self):\n   ", " "),  # of several spaces the last one
        ("def\n", "def\n", ""),
        ("de", "de", ""),  # the only token
        ("", "", ""),
    ],
)
def test_what_is_taken_back(code: Tokenizer, text: str, kept: str, start: str) -> None:
    healed = TokenHealer(code).heal_prompt(text)
    assert list(healed.token_ids) == code.encode(kept)
    assert healed.num_repeated_bytes == len(start)
    assert list(healed.plain_token_ids) == code.encode(text)
    allowed = {position: set(ids.tolist()) for position, ids in healed.allowed_token_ids.items()}
    assert allowed == ({len(healed.token_ids): tokens_from(code, start.encode())} if start else {})


def test_a_first_token_is_taken_back_after_a_prefix(code: Tokenizer) -> None:
    """Without one it stays, since a shifted model cannot predict it."""
    healed = TokenHealer(code).heal_prompt("de", [3])
    assert healed.token_ids == (3,)
    assert set(healed.allowed_token_ids[1].tolist()) == tokens_from(code, b"de")


def test_a_single_new_token_adds_text(code: Tokenizer) -> None:
    healer = TokenHealer(code)
    assert not healer.heal_prompt("for i in nam", max_new_tokens=1).allowed_token_ids, (
        "it might repeat the text and add nothing"
    )
    healed = healer.heal_prompt("def name ", max_new_tokens=1)
    assert set(healed.allowed_token_ids[2].tolist()) == tokens_from(code, b" ") - {code.vocab[b" "]}


def test_excluded_tokens(code: Tokenizer) -> None:
    name = code.vocab[b" name"]
    assert name not in TokenHealer(code, [name]).heal_prompt("def ").allowed_token_ids[1]
    assert not TokenHealer(code, [code.vocab[b" "]]).heal_prompt("def ").allowed_token_ids, "the text may not change"


def test_prompts_keep_their_text(code: Tokenizer) -> None:
    healer, num_healed = TokenHealer(code), 0
    for text in random_texts(300):
        healed = healer.heal_prompt(text)
        kept, data = code.decode_bytes(healed.token_ids), text.encode()
        start = data[len(kept) :]
        assert kept + start == data and len(start) == healed.num_repeated_bytes
        for position, ids in healed.allowed_token_ids.items():
            num_healed += 1
            assert position == len(healed.token_ids)
            assert set(ids.tolist()) == tokens_from(code, start) and len(set(ids.tolist())) == len(ids) > 1
    assert num_healed > 100


def test_the_space_before_a_span_is_taken_back(code: Tokenizer) -> None:
    mask, space = code.mask_token_id, code.vocab[b" "]
    healed = TokenHealer(code).heal_infill("if i is [MASK:1] None: return [MASK:2][MASK:1]in[MASK:1]\n    [MASK:2]")
    pieces = ["if i is", " None: return", "in", "\n   "]
    spans = [1, 3, 1, 2]
    expected = [token for piece, n in zip(pieces, spans, strict=True) for token in [*code.encode(piece), *[mask] * n]]
    assert list(healed.token_ids) == expected
    starts = [position for position in range(1, len(expected)) if expected[position - 1] != mask == expected[position]]
    allowed = {position: set(ids.tolist()) for position, ids in healed.allowed_token_ids.items()}
    with_space = tokens_from(code, b" ")
    assert allowed == {starts[0]: with_space - {space}, starts[1]: with_space, starts[3]: with_space}
    assert healed.num_repeated_bytes == 0
    for text in ("[MASK:2] name", "in[MASK:1](10)", "na[MASK:1]"):
        unhealed = TokenHealer(code).heal_infill(text, [3])
        assert unhealed.token_ids == (3, *encode_pieces(code, split_infill(text)).token_ids)
        assert not unhealed.allowed_token_ids


@pytest.mark.parametrize("remasking_strategy", ["low_confidence", "p2"])
def test_streams_do_not_repeat_the_prompt(model: Transformer, code: Tokenizer, remasking_strategy: str) -> None:
    config = GenerationConfig(
        max_new_tokens=8, block_length=2, temperature=1.0, remasking_strategy=remasking_strategy, stop_token_ids=()
    )
    healed = TokenHealer(code).heal_prompt("return i not i")
    assert healed.num_repeated_bytes > 1
    allowed = [healed.allowed_token_ids]
    [whole] = generate(model, [healed.token_ids], config, [3], allowed_token_ids=allowed)
    expected = code.decode_bytes(whole.token_ids)[healed.num_repeated_bytes :].decode(errors="replace")
    assert "".join(stream(model, code, healed, config, 3)) == expected
    assert "".join(stream(model, code, HealedText(healed.token_ids), config, 3)) == "".join(
        stream(model, code, healed.token_ids, config, 3)
    )


def test_allowed_tokens_are_checked(model: Transformer) -> None:
    settings = resolve_settings(GenerationConfig(max_new_tokens=4, suppress_token_ids=(5, 6)), model.config)
    mask = model.config.required_mask_token_id
    with pytest.raises(ValueError, match=r"prompt 0: allowed_token_ids names position 1, which is not masked"):
        prepare_request(settings, [1, 2], options=RequestOptions(allowed_token_ids={1: [3]}))
    with pytest.raises(ValueError, match=r"canvas 0: allowed_token_ids leaves no token at position 1: add"):
        prepare_request(
            settings, [1, mask], options=RequestOptions(is_infill=True, allowed_token_ids={1: [5, 6, mask]})
        )
    with pytest.raises(ValueError, match="allowed_token_ids: token 9999 is outside the model's vocabulary"):
        prepare_request(settings, [1, 2], options=RequestOptions(allowed_token_ids={2: [9999, 3]}))
