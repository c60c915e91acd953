"""Forwards with a key-value cache against the full forward without one."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from config.model import LinearRope
from diffusionlm.kernels.cross_entropy import LossInputs
from diffusionlm.models.cache import PagedCache
from diffusionlm.models.patterns import (
    AttentionPattern,
    Bidirectional,
    BlockCausal,
    BlockDiffusion,
    Causal,
    DenseBias,
)
from diffusionlm.models.transformer import Transformer
from diffusionlm.models.varlen import SequenceSlice, VarlenBatch, prepare_varlen_attention
from tests.conftest import MakeModel

FULL, SLIDING = "full_attention", "sliding_attention"
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "biases": {"attention_bias": True, "attention_output_bias": True, "qk_norm": False},
    "one key head": {"num_key_value_heads": 1},
    "no groups": {"num_key_value_heads": 4},
    "eager": {"backend": "eager"},
    "soft caps": {"attn_logit_softcapping": 0.7, "final_logit_softcapping": 2.0, "query_pre_attn_scalar": 3.0},
    "windows": {"layer_types": (SLIDING, FULL), "sliding_window": 3},
    "last window": {"layer_types": (FULL, SLIDING), "sliding_window": 4},
    "rope scaling": {"rope_scaling": LinearRope(factor=3.0)},
    "gemma": {"sandwich_norms": True, "norm_offset": True, "scale_embeddings": True},
    "experts": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8},
}
LENGTH = 12


@pytest.fixture(autouse=True)
def _without_gradient() -> Iterator[None]:
    with torch.inference_mode():
        yield


def texts(batch: int = 2, length: int = LENGTH, seed: int = 3) -> torch.Tensor:
    return torch.randint(0, 19, (batch, length), generator=torch.Generator().manual_seed(seed))


PAGE = 4


def cache_of(model: Transformer, batch: int = 2, length: int = LENGTH) -> PagedCache:
    weight = model.lm_head.weight
    return PagedCache(model.config, batch * -(-length // PAGE), PAGE, weight.device, weight.dtype)


def pages_of(cache: PagedCache, batch: int, text: int) -> list[int]:
    """Pages of one of several texts, out of order and not adjacent."""
    return list(range(text, cache.num_pages, batch))[::-1]


def feed(
    model: Transformer,
    cache: PagedCache,
    tokens_BL: torch.Tensor,
    span: tuple[int, int],
    pattern: AttentionPattern,
    *,
    visible: int | None = None,
    outputs: list[list[int]] | None = None,
) -> torch.Tensor:
    """Logits of the tokens of a span, the same in all texts, [B, Q, V]; they see what is before its end, or before
    ``visible``. With ``outputs`` only of some positions of each text, [N, V]."""
    batch, num_visible = len(tokens_BL), span[1] if visible is None else visible
    sequences = [
        SequenceSlice(
            *span,
            num_visible,
            pattern,
            pages=pages_of(cache, batch, text),
            outputs=None if outputs is None else np.array(outputs[text], dtype=np.int64),
        )
        for text in range(batch)
    ]
    logits = model(tokens_BL[:, slice(*span)].reshape(1, -1), pattern=VarlenBatch(sequences, cache))
    return logits.view(batch, span[1] - span[0], -1) if outputs is None else logits


def close(ours: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)


CASES = [(BlockCausal(4), option) for option in OPTIONS] + [(Causal(), "plain"), (Bidirectional(), "last window")]
"""Options meet every pattern in the tests of whole texts."""
SPANS: dict[str, tuple[AttentionPattern, list[tuple[int, int]]]] = {
    "block by block": (BlockCausal(3), [(0, 3), (3, 6), (6, 9), (9, 12)]),
    "blocks together": (BlockCausal(3), [(0, 6), (6, 12)]),
    "fed again with the next": (BlockCausal(3), [(0, 3), (0, 6), (3, 9), (6, 12)]),
    "inside a block": (BlockCausal(3), [(0, 12), (4, 5), (10, 12)]),
    "at once": (BlockCausal(3), [(0, 12)]),
    "token by token": (Causal(), [(0, 4), *((place, place + 1) for place in range(4, LENGTH))]),
    "slices of a text again": (Bidirectional(), [(0, LENGTH), (4, 7), (0, 1), (6, LENGTH)]),
}
OF_EACH_OPTION = ("fed again with the next", "token by token", "slices of a text again")


@pytest.mark.parametrize(
    ("spans", "option"),
    [(spans, option) for spans in OF_EACH_OPTION for option in OPTIONS]
    + [(spans, "last window") for spans in SPANS if spans not in OF_EACH_OPTION],
)
def test_texts_fed_in_parts_are_the_whole_forward(tiny_model: MakeModel, spans: str, option: str) -> None:
    """All logits of a part, then those of some positions, or of none."""
    model = tiny_model(torch.float64, **OPTIONS[option])
    tokens, cache, pattern = texts(), cache_of(model), SPANS[spans][0]
    whole = model(tokens, pattern=pattern)
    for start, end in SPANS[spans][1]:
        end_of_block = -(-end // 3) * 3
        visible = LENGTH if isinstance(pattern, Bidirectional) else end if isinstance(pattern, Causal) else end_of_block
        every = feed(model, cache, tokens, (start, end), pattern, visible=visible)
        close(every, whole[:, start:end])
        some_and_none: list[list[list[int]]] = [[[start], [end - 1]], [[end - 1], []], [[], []]]
        for outputs in some_and_none:
            some = feed(model, cache, tokens, (start, end), pattern, visible=visible, outputs=outputs)
            close(some, torch.cat([whole[text, rows] for text, rows in enumerate(outputs)]))


def test_invisible_keys_have_no_effect(tiny_model: MakeModel) -> None:
    """A text that is truncated, or grows: bidirectional attention over its first places alone."""
    model = tiny_model(torch.float64)
    tokens, cache = texts(), cache_of(model)
    feed(model, cache, tokens, (0, LENGTH), Bidirectional())
    short = model(tokens[:, :7], pattern=Bidirectional())
    close(feed(model, cache, tokens[:, :7], (0, 7), Bidirectional()), short)
    hidden = [slot for text in range(2) for slot in cache.slots(pages_of(cache, 2, text), 7, LENGTH)]
    for storage in (*cache.keys_KTH, *cache.values_KTH):
        storage[:, hidden] = torch.nan
    close(feed(model, cache, tokens, (3, 7), Bidirectional()), short[:, 3:])


VARLEN_ROWS: list[list[tuple[int, int] | None]] = [
    [(0, 4), (0, 2), (0, 3)],
    [(4, 6), (0, 4), None],
    [(2, 8), (4, 8), (3, 7)],
    [None, (8, 10), (7, 9)],
]
"""Inputs of three texts in each forward; None: the text is not in it. The last two may be computed together: a page of
the shorter text has a slot that nobody has written."""


def varlen_slices(
    cache: PagedCache, row: list[tuple[int, int] | None], pattern: AttentionPattern, outputs: slice
) -> list[SequenceSlice]:
    return [
        SequenceSlice(
            *span,
            span[1],
            pattern,
            pages=pages_of(cache, len(row), text),
            outputs=np.arange(*span)[outputs],
        )
        for text, span in enumerate(row)
        if span is not None
    ]


@pytest.mark.parametrize("share_kernels", [False, True])
@pytest.mark.parametrize(("pattern", "option"), CASES, ids=str)
def test_sequences_of_different_length_do_not_affect_each_other(
    tiny_model: MakeModel,
    pattern: AttentionPattern,
    option: str,
    share_kernels: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prepare = functools.partial(prepare_varlen_attention, share_kernels=share_kernels)
    monkeypatch.setattr("diffusionlm.models.transformer.prepare_varlen_attention", prepare)
    model = tiny_model(torch.float64, **OPTIONS[option])
    tokens, together, alone = texts(3), cache_of(model, 3), [cache_of(model, 3) for _ in range(3)]
    for cache in (together, *alone):
        for storage in (*cache.keys_KTH, *cache.values_KTH):
            storage[:] = torch.nan  # of pages that nobody has written
    for row in VARLEN_ROWS:
        inputs = torch.cat([tokens[text, slice(*span)] for text, span in enumerate(row) if span is not None])[None]
        everything = VarlenBatch(varlen_slices(together, row, pattern, slice(None)), together)
        logits = model(inputs, pattern=everything)
        some = VarlenBatch(varlen_slices(together, row, pattern, slice(1, None, 2)), together)
        rows = some.output_positions()
        assert rows is not None
        close(model(inputs, pattern=some), logits[rows])
        expected = []
        for text, cache in enumerate(alone):
            span = row[text]
            if span is not None:
                only = [span if index == text else None for index in range(len(row))]
                own = VarlenBatch(varlen_slices(cache, only, pattern, slice(None)), cache)
                expected.append(model(tokens[text : text + 1, slice(*span)], pattern=own))
        close(logits, torch.cat(expected))


@pytest.mark.parametrize("share_kernels", [False, True])
def test_texts_with_and_without_a_cache_in_one_forward(
    tiny_model: MakeModel, share_kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare = functools.partial(prepare_varlen_attention, share_kernels=share_kernels)
    monkeypatch.setattr("diffusionlm.models.transformer.prepare_varlen_attention", prepare)
    model = tiny_model(torch.float64)
    tokens, cache, bidirectional = texts(4), cache_of(model, 1), Bidirectional()
    mask = torch.ones(7, 7, dtype=torch.bool).tril()
    sequences = [
        SequenceSlice(0, 5, 5, bidirectional),
        SequenceSlice(0, 5, 5, BlockCausal(3), pages=range(3), outputs=np.array([1, 4])),
        SequenceSlice(0, 5, 5, bidirectional, outputs=np.array([2])),
        SequenceSlice(0, 7, 7, DenseBias(mask)),
    ]
    inputs = torch.cat([tokens[text, : part.end] for text, part in enumerate(sequences)])[None]
    expected = [
        model(tokens[:1, :5], pattern=bidirectional)[0],
        model(tokens[1:2, :5], pattern=BlockCausal(3))[0, [1, 4]],
        model(tokens[2:3, :5], pattern=bidirectional)[0, [2]],
        model(tokens[3:, :7], pattern=Causal())[0],
    ]
    close(model(inputs, pattern=VarlenBatch(sequences, cache)), torch.cat(expected))


@pytest.mark.parametrize("queries", [1, 3, 40])
def test_bfloat16_is_near(tiny_model: MakeModel, queries: int) -> None:
    """Each of the ways that short and long bf16 queries take."""
    model = tiny_model(torch.float64, scale=0.1)
    tokens, pattern = texts(2, 48), BlockCausal(queries)
    whole = model(tokens, pattern=pattern)
    half = model.to(torch.bfloat16)
    cache = cache_of(half, 2, 48)
    spans = [(start, min(48, start + queries)) for start in range(0, 48, queries)]
    ours = torch.cat([feed(half, cache, tokens, span, pattern) for span in spans], dim=1).double()
    # Of all positions together: at 150 random models of this size the error is 1.4 %, at most 2.3 %.
    assert (ours - whole).norm() < 0.03 * whole.norm()


def test_autocast_keeps_its_dtype_in_the_cache(tiny_model: MakeModel) -> None:
    model = tiny_model()
    tokens, pattern = texts(), BlockCausal(3)
    cache = PagedCache(model.config, 2 * LENGTH // PAGE, PAGE, "cpu", torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        whole = model(tokens, pattern=pattern)
        ours = torch.cat([feed(model, cache, tokens, span, pattern) for span in SPANS["block by block"][1]], dim=1)
    assert (ours - whole).norm() < 0.03 * whole.norm()


def test_no_mask_where_all_is_seen(tiny_model: MakeModel, monkeypatch: pytest.MonkeyPatch) -> None:
    masks: list[torch.Tensor | None] = []
    original: Any = F.scaled_dot_product_attention

    def spy(*args: Any, attn_mask: torch.Tensor | None = None, **kwargs: Any) -> torch.Tensor:
        masks.append(attn_mask)
        return original(*args, attn_mask=attn_mask, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", spy)
    model = tiny_model(torch.float64)
    tokens, cache = texts(), cache_of(model)
    for pattern, spans in (
        (BlockCausal(3), [(0, 3), (3, 6), (7, 8)]),
        (Bidirectional(), [(0, 12), (4, 7)]),
        (Causal(), [(4, 5)]),
    ):
        for span in spans:
            feed(model, cache, tokens, span, pattern)
    assert masks and all(mask is None for mask in masks)
    feed(model, cache, tokens, (0, 4), BlockCausal(3))
    last = masks[-2 * model.config.num_hidden_layers :]
    assert len({id(mask) for mask in last}) == 2 and None not in last, "one of each text for all layers of a window"


def test_errors_of_cache_and_sequences(tiny_model: MakeModel) -> None:
    model, pattern = tiny_model(), Causal()
    for num_pages, size in ((0, 4), (2, 0)):
        with pytest.raises(ValueError, match="at least one page of one position"):
            PagedCache(model.config, num_pages, size, "cpu", torch.float32)
    for start, end, num_visible in ((0, 0, 4), (2, 1, 4), (-1, 2, 4), (0, 4, 3)):
        with pytest.raises(ValueError, match="a sequence needs at least one input"):
            SequenceSlice(start, end, num_visible, pattern, pages=[0])
    for start, end, num_visible in ((1, 4, 4), (0, 3, 4)):
        with pytest.raises(ValueError, match="without a cache all visible positions are inputs"):
            SequenceSlice(start, end, num_visible, pattern)
    cache = cache_of(model, 1)
    with pytest.raises(ValueError, match="at least one sequence"):
        VarlenBatch([], cache)
    with pytest.raises(ValueError, match="need a cache"):
        VarlenBatch([SequenceSlice(0, 4, 4, pattern, pages=[0])])
    for pages in ([0], [0, 3], [-1, 0]):
        with pytest.raises(ValueError, match=r"pages of 4 positions, out of 3, do not hold 5"):
            VarlenBatch([SequenceSlice(0, 5, 5, pattern, pages=pages)], cache)


def test_errors_of_a_varlen_forward(tiny_model: MakeModel) -> None:
    model = tiny_model()
    tokens, cache = texts(1, 4), cache_of(model, 1)
    documents = torch.zeros(1, 4, dtype=torch.int64)
    bias = DenseBias(torch.zeros(4, 4))
    for pattern in (BlockDiffusion(2), Causal(documents), BlockCausal(2, documents), Bidirectional(documents), bias):
        with pytest.raises(ValueError, match=type(pattern).__name__ + " .*cannot be used with a cache"):
            model(tokens, pattern=VarlenBatch([SequenceSlice(0, 4, 4, pattern, pages=[0])], cache))
    batch = VarlenBatch([SequenceSlice(0, 4, 4, Causal(), pages=[0])], cache)
    rows = torch.tensor([0])
    more: Any
    for more in (
        {"output_positions": rows, "loss_inputs": LossInputs(rows, torch.ones(1))},
        {"output_positions": rows},
        {"positions": torch.arange(4)},
    ):
        with pytest.raises(ValueError, match="neither positions nor output_positions"):
            model(tokens, pattern=batch, **more)
    for others in (tokens[:, :3], tokens.repeat(2, 1)):
        with pytest.raises(ValueError, match=r"must be \[1, 4\]"):
            model(others, pattern=batch)
    long = texts(1, 65)
    with pytest.raises(ValueError, match="max_position_embeddings = 64"):
        model(long, pattern=VarlenBatch([SequenceSlice(0, 65, 65, Causal())]))
    with torch.inference_mode(False), pytest.raises(ValueError, match="no gradient"):
        model(tokens, pattern=batch)
    with pytest.raises(ValueError, match='"tiled" has no cached form'):
        tiny_model(backend="tiled")(tokens, pattern=batch)
