"""Forwards with a key-value cache against the full forward without one, and the effect of stale keys."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from config.model import LinearRope, ModelConfig
from diffusionlm.kernels.cross_entropy import LossInputs
from diffusionlm.models.cache import CacheSlots, KeyValueCache
from diffusionlm.models.cached_attention import prepare_cached_attention
from diffusionlm.models.dense_attention import AttentionScale, attend, attend_cached
from diffusionlm.models.layers import rotate
from diffusionlm.models.patterns import (
    AttentionPattern,
    Bidirectional,
    BlockCausal,
    BlockDiffusion,
    Causal,
    DenseBias,
)
from diffusionlm.models.transformer import Block, Transformer

MakeModel = Callable[..., Transformer]
MakeConfig = Callable[..., ModelConfig]

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


def cache_of(model: Transformer, batch: int = 2, length: int = LENGTH) -> KeyValueCache:
    weight = model.lm_head.weight
    return KeyValueCache(model.config, batch, length, weight.device, weight.dtype)


def feed(
    model: Transformer,
    cache: KeyValueCache,
    tokens_BL: torch.Tensor,
    span: tuple[int, int],
    pattern: AttentionPattern,
    *,
    visible: int | None = None,
    rows: torch.Tensor | None = None,
) -> torch.Tensor:
    """Logits of the tokens of a span, the same in all texts; they see what is before its end, or before ``visible``."""
    positions = torch.arange(*span).repeat(len(tokens_BL), 1)
    num_visible = torch.full((len(tokens_BL),), span[1] if visible is None else visible)
    return model(
        tokens_BL[:, slice(*span)],
        pattern=pattern,
        output_positions=rows,
        cache=CacheSlots(cache, positions, num_visible),
    )


def close(ours: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)


CASES = [(BlockCausal(4), option) for option in OPTIONS] + [(Causal(), "plain"), (Bidirectional(), "last window")]
"""Options meet every pattern in the tests of whole texts."""
SPANS = {
    "block by block": [(0, 3), (3, 6), (6, 9), (9, 12)],
    "blocks together": [(0, 6), (6, 12)],
    "fed again with the next": [(0, 3), (0, 6), (3, 9), (6, 12)],
    "inside a block": [(0, 12), (4, 5), (10, 12)],
    "at once": [(0, 12)],
}


@pytest.mark.parametrize(
    ("spans", "option"),
    [("fed again with the next", option) for option in OPTIONS] + [(spans, "last window") for spans in SPANS],
)
def test_blocks_fed_one_after_another_are_the_whole_forward(tiny_model: MakeModel, spans: str, option: str) -> None:
    model = tiny_model(torch.float64, **OPTIONS[option])
    tokens, pattern = texts(), BlockCausal(3)
    whole = model(tokens, pattern=pattern)
    cache = cache_of(model)
    for span in SPANS[spans]:
        visible = -(-span[1] // 3) * 3
        close(feed(model, cache, tokens, span, pattern, visible=visible), whole[:, slice(*span)])


@pytest.mark.parametrize("option", OPTIONS)
def test_causal_token_by_token(tiny_model: MakeModel, option: str) -> None:
    model = tiny_model(torch.float64, **OPTIONS[option])
    tokens, cache = texts(), cache_of(model)
    whole = model(tokens, pattern=Causal())
    close(feed(model, cache, tokens, (0, 4), Causal()), whole[:, :4])
    for place in range(4, LENGTH):
        close(feed(model, cache, tokens, (place, place + 1), Causal()), whole[:, place : place + 1])


@pytest.mark.parametrize("option", OPTIONS)
def test_a_slice_of_a_bidirectional_text_again(tiny_model: MakeModel, option: str) -> None:
    model = tiny_model(torch.float64, **OPTIONS[option])
    tokens, cache = texts(), cache_of(model)
    whole = model(tokens, pattern=Bidirectional())
    close(feed(model, cache, tokens, (0, LENGTH), Bidirectional()), whole)
    for span in [(4, 7), (0, 1), (6, LENGTH)]:
        close(feed(model, cache, tokens, span, Bidirectional(), visible=LENGTH), whole[:, slice(*span)])


def plainly(
    model: Transformer, tokens_L: torch.Tensor, places: range, reference: list[tuple[torch.Tensor, torch.Tensor]] | None
) -> tuple[torch.Tensor, list[tuple[torch.Tensor, torch.Tensor]]]:
    """Logits of some places of one text, and all layers' keys and values: new ones there, ``known`` ones elsewhere."""
    x = model.model.embed_tokens(tokens_L[list(places)])
    rope, results = model.rope(torch.tensor(places)), []
    for index, block in enumerate(model.model.layers):
        assert isinstance(block, Block)
        attention, normed = block.self_attn, block.input_layernorm(x)
        q, k, v = (
            projection(normed).view(len(places), -1, attention.head_dim)
            for projection in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        q, k = rotate(attention.q_norm(q), rope), rotate(attention.k_norm(k), rope)
        keys, values = (value.clone() for value in ((k, v) if reference is None else reference[index]))
        keys[list(places)], values[list(places)] = k, v
        results.append((keys, values))
        heads = []
        for head in range(q.shape[1]):
            group = head // (q.shape[1] // k.shape[1])
            scores = q[:, head] @ keys[:, group].T / attention.head_dim**0.5
            heads.append(torch.softmax(scores, dim=-1) @ values[:, group])
        x = x + attention.o_proj(torch.cat(heads, dim=-1))
        x = x + block.mlp(block.post_attention_layernorm(x))
    return model.lm_head(model.model.norm(x)), results


def test_changed_tokens_beside_stale_keys(tiny_model: MakeModel) -> None:
    model = tiny_model(torch.float64)
    tokens, changed, cache = texts(1), texts(1, seed=4), cache_of(model, 1)
    whole, reference = plainly(model, tokens[0], range(LENGTH), None)
    close(feed(model, cache, tokens, (0, LENGTH), Bidirectional())[0], whole)
    for places in (range(4, 7), range(5, 6), range(6, LENGTH)):
        expected, reference = plainly(model, changed[0], places, reference)
        span = (places.start, places.stop)
        close(feed(model, cache, changed, span, Bidirectional(), visible=LENGTH)[0], expected)
        tokens = torch.cat([tokens[:, : span[0]], changed[:, slice(*span)], tokens[:, span[1] :]], dim=1)
        fresh = model(tokens, pattern=Bidirectional())[0, slice(*span)]
        assert not torch.allclose(expected, fresh, atol=1e-3), "nothing was stale"


def test_invisible_keys_have_no_effect(tiny_model: MakeModel) -> None:
    """A text that is truncated, or grows: bidirectional attention over its first places alone."""
    model = tiny_model(torch.float64)
    tokens, cache = texts(), cache_of(model)
    feed(model, cache, tokens, (0, LENGTH), Bidirectional())
    short = model(tokens[:, :7], pattern=Bidirectional())
    close(feed(model, cache, tokens[:, :7], (0, 7), Bidirectional()), short)
    for storage in (*cache.keys_BKTH, *cache.values_BKTH):
        storage[:, :, 7:] = torch.inf
    close(feed(model, cache, tokens, (3, 7), Bidirectional()), short[:, 3:])


RAGGED = [
    [[0, 1, 2, 3], [0, 1, -1, -1], [0, 1, 2, -1]],
    [[4, 5, -1, -1], [0, 1, 2, 3], [-1, -1, -1, -1]],
    [[-1, 6, 7, 8], [4, 5, -1, 6], [3, 4, 5, 6]],
    [[9, -1], [7, 8], [7, 8]],
]
"""Places of the inputs of three texts in each forward, with padding anywhere."""


def slots(cache: KeyValueCache, positions_BQ: torch.Tensor, block: int) -> CacheSlots:
    """Inputs that see until the end of the furthest one's block; padding alone sees nothing."""
    return CacheSlots(cache, positions_BQ, (positions_BQ.amax(dim=1) // block + 1) * block)


@pytest.mark.parametrize(("pattern", "option"), CASES, ids=str)
def test_sequences_of_different_length_do_not_affect_each_other(
    tiny_model: MakeModel, pattern: AttentionPattern, option: str
) -> None:
    block = 4 if isinstance(pattern, BlockCausal) else 1
    model = tiny_model(torch.float64, **OPTIONS[option])
    tokens, together, alone = texts(3), cache_of(model, 3), [cache_of(model, 1) for _ in range(3)]
    for positions in map(torch.tensor, RAGGED):
        inputs, is_input = tokens.gather(1, positions.clamp(min=0)), positions >= 0
        logits = model(inputs, pattern=pattern, cache=slots(together, positions, block))
        assert logits.isfinite().all(), "padding computes numbers, too"
        rows = is_input.flatten().nonzero().flatten()[1::2]
        close(
            model(inputs, pattern=pattern, cache=slots(together, positions, block), output_positions=rows),
            logits.flatten(0, 1)[rows],
        )
        for text, cache in enumerate(alone):
            if is_input[text].any():
                saved = is_input[text]
                own = slots(cache, positions[text : text + 1, saved], block)
                close(logits[text, saved], model(inputs[text : text + 1, saved], pattern=pattern, cache=own)[0])


def test_selected_texts_go_on(tiny_model: MakeModel) -> None:
    model = tiny_model(torch.float64)
    tokens, cache, pattern = texts(4), cache_of(model, 4), BlockCausal(3)
    feed(model, cache, tokens, (0, 6), pattern)
    cache.select([0, 1, 2, 3])
    chosen = [3, 0]
    cache.select(chosen)
    assert cache.batch == 2
    assert {len(value) for value in (*cache.keys_BKTH, *cache.values_BKTH)} == {2}
    whole = model(tokens[chosen], pattern=pattern)
    close(feed(model, cache, tokens[chosen], (6, 9), pattern), whole[:, 6:9])
    cache.select([1])
    close(feed(model, cache, tokens[:1], (9, 12), pattern), whole[1:, 9:])


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize(("pattern", "option"), CASES, ids=str)
def test_output_positions_equal_all_logits_with_a_cache(
    tiny_model: MakeModel, pattern: AttentionPattern, option: str, batch: int
) -> None:
    model = tiny_model(torch.float64, **OPTIONS[option])
    tokens, cache = texts(batch), cache_of(model, batch)
    for span in [(0, 6), (3, 9), (9, 12)]:
        every = feed(model, cache, tokens, span, pattern).flatten(0, 1)
        for rows in ([0], [1, 2], list(range(batch * (span[1] - span[0]))), []):
            index = torch.tensor(rows, dtype=torch.int64)
            close(feed(model, cache, tokens, span, pattern, rows=index), every[index])


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
@pytest.mark.parametrize("queries", [1, 5])
@pytest.mark.parametrize("heads", [2, 4])
@pytest.mark.parametrize("is_masked", [False, True])
def test_attention_over_a_cache_is_attention(backend: Any, queries: int, heads: int, is_masked: bool) -> None:
    q = torch.randn(3, queries, heads, 6, dtype=torch.float64)
    keys_values = torch.randn(2, 3, 2, 12, 6, dtype=torch.float64)
    k, v = keys_values[:, :, :, :9]
    bias = torch.randn(3, queries, 9, dtype=torch.float64) if is_masked else None
    expected = attend(q, k.transpose(1, 2), v.transpose(1, 2), bias, "eager", AttentionScale(scale=0.3))
    stacked = None if bias is None else bias[:, None].repeat(1, 1, heads // 2, 1)
    close(attend_cached(q, k, v, stacked, backend, AttentionScale(scale=0.3)), expected)


@pytest.mark.parametrize("queries", [1, 3, 40])
def test_bfloat16_is_near(tiny_model: MakeModel, queries: int) -> None:
    """Each of the ways that short and long bf16 queries take."""
    model = tiny_model(torch.float64, scale=0.1)
    tokens, pattern = texts(2, 48), BlockCausal(queries)
    whole = model(tokens, pattern=pattern)
    half = model.to(torch.bfloat16)
    cache = cache_of(half, 2, 48)
    for start in range(0, 48, queries):
        span = (start, min(48, start + queries))
        ours = feed(half, cache, tokens, span, pattern).double()
        expected = whole[:, slice(*span)]
        assert (ours - expected).norm() < 0.03 * expected.norm()


def test_autocast_keeps_its_dtype_in_the_cache(tiny_model: MakeModel) -> None:
    model = tiny_model()
    tokens, pattern = texts(), BlockCausal(3)
    cache = KeyValueCache(model.config, 2, LENGTH, "cpu", torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        whole = model(tokens, pattern=pattern)
        for span in SPANS["block by block"]:
            torch.testing.assert_close(
                feed(model, cache, tokens, span, pattern), whole[:, slice(*span)], rtol=0.05, atol=0.05
            )


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
    assert masks[-1] is not None and masks[-1] is masks[-2], "one for all layers of a window"


def test_errors_of_cache_and_slots(tiny_model: MakeModel, make_config: MakeConfig) -> None:
    model = tiny_model()
    for batch, length in ((0, 4), (2, 0), (2, 65)):
        with pytest.raises(ValueError, match=r"at least one|max_position_embeddings = 64"):
            cache_of(model, batch, length)
    cache = cache_of(model, 2, 4)
    for rows in ([], [2], [-1]):
        with pytest.raises(ValueError, match="at least one of 0 to 1"):
            cache.select(rows)
    two = torch.tensor([4, 4])
    for positions, visible, message in (
        ([[0, 4], [0, 1]], two, "from 0 to 3"),
        ([[0, -2], [0, 1]], two, "from 0 to 3"),
        ([[0], [1]], torch.tensor([4, 5]), "from 0 to 4"),
        ([[0], [1]], torch.tensor([-1, 4]), "from 0 to 4"),
        ([[0, 1], [1, 2]], torch.tensor([2, 2]), r"hides inputs.* \[1, 2\]"),
        ([[0]], two, "the 2 sequences of the cache"),
        ([[0], [1]], two[:1], "the 2 sequences of the cache"),
        ([[], []], two, "no inputs"),
    ):
        with pytest.raises(ValueError, match=message):
            CacheSlots(cache, torch.tensor(positions, dtype=torch.int64), visible)
    with pytest.raises(AssertionError, match="int64"):
        CacheSlots(cache, torch.zeros(2, 1, dtype=torch.int32), two)


def test_errors_of_a_forward_with_a_cache(tiny_model: MakeModel) -> None:
    model = tiny_model()
    tokens, cache = texts(2, 4), cache_of(model, 2, 4)
    slots = CacheSlots(cache, torch.arange(4).repeat(2, 1), torch.tensor([4, 4]))
    documents = torch.zeros(2, 4, dtype=torch.int64)
    bias = DenseBias(torch.zeros(4, 4))
    for pattern in (BlockDiffusion(2), Causal(documents), BlockCausal(2, documents), Bidirectional(documents), bias):
        with pytest.raises(ValueError, match=type(pattern).__name__ + " .*cannot be used with a cache"):
            model(tokens, pattern=pattern, cache=slots)
    rows = torch.tensor([0])
    loss_inputs: Any = {"output_positions": rows, "loss_inputs": LossInputs(rows, torch.ones(1))}
    for more in (loss_inputs, {"positions": torch.arange(4)}):
        with pytest.raises(ValueError, match="neither positions nor loss_inputs"):
            model(tokens, pattern=Causal(), cache=slots, **more)
    for others in (tokens[:1], tokens[:, :3]):
        with pytest.raises(ValueError, match="must have the same shape"):
            model(others, pattern=Causal(), cache=slots)
    with torch.inference_mode(False), pytest.raises(ValueError, match="no gradient"):
        model(tokens, pattern=Causal(), cache=slots)
    for backend in ("tiled", "flex"):
        with pytest.raises(ValueError, match=f'attention_backend = "{backend}".*generation.cache'):
            prepare_cached_attention(Causal(), slots, [None], "cpu", backend)
    with pytest.raises(ValueError, match="cannot cap"):
        prepare_cached_attention(Causal(), slots, [None], "cpu", "sdpa", AttentionScale(softcap=1.0))
    model.to(torch.float64)
    with pytest.raises(ValueError, match="float32"):
        model(tokens, pattern=Causal(), cache=slots)
