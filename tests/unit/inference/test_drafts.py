"""Drafts: decoding that begins with tokens in place of masks."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from config.generation import GenerationConfig
from diffusionlm.inference.decoder import Decoder
from diffusionlm.inference.generate import Generation, infill
from diffusionlm.inference.request_builder import prepare_request
from diffusionlm.inference.requests import ActiveRequest, RequestOptions
from diffusionlm.inference.settings import resolve_settings
from diffusionlm.inference.strategies import STRATEGIES
from diffusionlm.models.patterns import Bidirectional
from diffusionlm.models.transformer import Transformer

MASK = 22
DRAFT = [3, 9, 9, 14, 2, 7, 1, 19]
CANVAS = [1, 4, *[MASK] * 5, 2, *[MASK] * 3, 8]
POSITIONS = [index for index, token in enumerate(CANVAS) if token == MASK]


def edit(model: Transformer, remask: float, seed: int = 0, draft: list[int] = DRAFT, **keys: Any) -> Generation:
    options = RequestOptions(draft_token_ids=draft, remask=remask)
    [result] = infill(model, [CANVAS], GenerationConfig(**keys), [seed], options=options)
    return result


def kept_tokens(result: Generation) -> dict[int, int]:
    """Index of each drafted token that stayed -> the token."""
    return {index: result.token_ids[POSITIONS[index]] for index, step in enumerate(result.step_map) if step == 0}


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_draft_that_is_masked_again_is_an_infill(model: Transformer, blocks: Transformer, name: str) -> None:
    for network, block_length in ((model, 3), (blocks, None)):
        keys: dict[str, Any] = {"remasking_strategy": name, "temperature": 0.9, "block_length": block_length}
        [expected] = infill(network, [CANVAS], GenerationConfig(**keys), [5])
        assert edit(network, 1.0, seed=5, **keys) == expected


@pytest.mark.parametrize("kind", ["one block", "blocks", "block-causal"])
def test_the_others_stay(model: Transformer, blocks: Transformer, kind: str) -> None:
    """The rest is that of an infill in which they are given, forward by forward."""
    network = blocks if kind == "block-causal" else model
    keys: dict[str, Any] = {"block_length": 2} if kind == "blocks" else {}
    sets = []
    for seed in range(6):
        result = edit(network, 0.25, seed, **keys)
        kept = kept_tokens(result)
        assert len(kept) == 6 and all(DRAFT[index] == token for index, token in kept.items())
        assert [math.isnan(value) for value in result.logprobs] == [index in kept for index in range(8)]
        assert repr(edit(network, 0.25, seed, **keys)) == repr(result)
        assert set(kept) >= set(kept_tokens(edit(network, 0.5, seed, **keys)))
        sets.append(tuple(kept))
        given = [kept.get(POSITIONS.index(i), token) if token == MASK else token for i, token in enumerate(CANVAS)]
        if kind != "blocks":  # whose blocks of masks would be others
            [expected] = infill(network, [given], GenerationConfig(**keys))
            assert (result.token_ids, result.num_forwards) == (expected.token_ids, expected.num_forwards)
            np.testing.assert_allclose([x for x in result.logprobs if x == x], expected.logprobs, atol=1e-12)
            assert [step for step in result.step_map if step] == list(expected.step_map)
    assert len(set(sets)) > 3
    # Drafted tokens beside masks.
    result = edit(network, 0.5, draft=[3, 9, -1, -1, -1, -1, -1, -1], **keys)
    assert len(kept_tokens(result)) == 1


def test_p2_keeps_the_most_probable_drafted_tokens(model: Transformer) -> None:
    """After the first of 4 forwards a quarter of the tokens is left; at the end all positions have one."""
    settings = resolve_settings(GenerationConfig(remasking_strategy="p2", steps=4), model.config)
    options = RequestOptions(is_infill=True, draft_token_ids=DRAFT)
    request = ActiveRequest(prepare_request(settings, CANVAS, 0, options))
    drafted = CANVAS.copy()
    for position, token in zip(POSITIONS, DRAFT, strict=True):
        drafted[position] = token
    assert request.tokens_L.tolist() == drafted and not request.is_masked_L.any()
    logits_LV = model(torch.tensor([drafted]), pattern=Bidirectional())[0].detach()
    logits_LV[:, MASK] = -torch.inf
    probs = logits_LV.softmax(-1)[POSITIONS, DRAFT]
    steps = Decoder.for_requests(model, [request]).steps()
    next(steps)
    best = set(np.array(POSITIONS)[probs.topk(2).indices].tolist())
    assert {position for position in POSITIONS if not request.is_masked_L[position]} == best
    assert all(request.tokens_L[position] == drafted[position] for position in best)
    assert [output.has_forward for output in steps] == [True] * 3
    assert not request.is_masked_L.any() and request.is_done


def test_remdm_revises_a_whole_draft(model: Transformer) -> None:
    keys: dict[str, Any] = {"remasking_strategy": "remdm_cap", "remdm_eta": 0.05, "steps": 16, "temperature": 0.0}
    kept = [kept_tokens(edit(model, 0.0, seed, **keys)) for seed in range(6)]
    assert all(tokens.items() <= dict(enumerate(DRAFT)).items() for tokens in kept)
    assert 0 < sum(map(len, kept)) < 6 * 8 and len({*map(tuple, kept)}) > 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"remask": 0.0},
            r'remask = 0.0 masks no drafted token, and remasking_strategy = "low_confidence".*p2, remdm_cap',
        ),
        ({"remask": 0.05}, "masks no drafted token"),
        ({"remask": 1.5}, "remask = 1.5 must be 0 to 1"),
        ({"remask": 0.5, "draft_token_ids": []}, "needs a draft"),
        ({"draft_token_ids": [1, 2]}, "has 2 entries for 8 masks"),
        ({"draft_token_ids": [99] * 8}, "draft_token_ids: token 99 is outside"),
        ({"is_read": True}, "a draft excludes reads"),
    ],
)
def test_wrong_drafts_are_refused(model: Transformer, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        infill(model, [CANVAS], GenerationConfig(), options=RequestOptions(**{"draft_token_ids": DRAFT, **options}))
