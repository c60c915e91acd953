"""Acceptance of drafts against forwards of decoding: causal text, then the masks of one block."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
import torch

from diffusionlm.diffusion.layout import InputLayout
from diffusionlm.diffusion.noised_batch import CleanBatch
from diffusionlm.evaluation.draft_acceptance import measure_draft_acceptance
from diffusionlm.models.patterns import Causal, CausalThenBlock
from diffusionlm.models.transformer import Transformer
from tests.conftest import MakeModel

L, BLOCK, MASK = 14, 4, 18
OPTIONS: dict[str, dict[str, Any]] = {
    "Nemotron": {"clean_alignment": "shifted"},
    "I-DLM": {"logit_alignment": "shifted", "clean_alignment": "shifted", "noisy_attention": "token"},
    "WeDLM": {"clean_alignment": "shifted", "noisy_attention": "visible_first"},
}


def law(model: Transformer, tokens: torch.Tensor, pattern: Any, position: int) -> torch.Tensor:
    logits = model(tokens[None], pattern=pattern)[0, position]
    logits[MASK] = -torch.inf
    return logits.softmax(-1)


@torch.no_grad()
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("prompt", [0, 6])
def test_acceptance_is_that_of_decoding(tiny_model: MakeModel, name: str, prompt: int) -> None:
    model, shift = tiny_model(torch.float64, scale=1.0, **OPTIONS[name]), int(name == "I-DLM")
    tokens = torch.randint(0, 17, (3, L), generator=torch.Generator().manual_seed(4))
    is_target = (torch.arange(L) >= prompt).expand(3, L)
    expected: defaultdict[int, list[tuple[float, float]]] = defaultdict(list)
    for row in tokens:
        for start in range(0, L, BLOCK):
            end, first = min(start + BLOCK, L), start + 1 - shift
            if first < max(prompt, 1):
                continue  # a mask of the block is in the prompt, or is the first token of the text
            text = torch.cat([row[:first], torch.full((end - first,), MASK)])
            pattern = CausalThenBlock(start, end) if name == "Nemotron" else Causal()
            for target in range(start + 1, min(end + shift, L)):
                p, q = law(model, row[:target], Causal(), target - 1), law(model, text, pattern, target - shift)
                expected[target - start].append((float(torch.minimum(p, q).sum()), float(p.argmax() == q.argmax())))
    batch, layout = CleanBatch(tokens, is_target), InputLayout.from_config(model.config, BLOCK)
    result = measure_draft_acceptance(model, layout, batch, 2)
    assert len(result) == BLOCK - 1 + shift
    for offset, values in enumerate(result, start=1):
        assert values == pytest.approx(torch.tensor(expected[offset]).mean(0).tolist(), abs=1e-6), offset
    assert len({round(rate, 4) for rate, _ in result}) == len(result) and 0.0 < result[0][0] < 1.0
