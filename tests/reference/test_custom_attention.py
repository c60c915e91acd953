"""Independent answer blocks and a user's bias: training, validation and decoding see the same keys. fp64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from config.generation import GenerationConfig
from config.load import ConfigError, load_config
from config.train import TrainConfig
from config.training.objective import BlockDiffusionConfig, MaskedDiffusionConfig, ObjectiveConfig
from diffusionlm.diffusion.layout import find_prompts
from diffusionlm.diffusion.noised_batch import CleanBatch, NoiseKey
from diffusionlm.diffusion.objectives import build_layout, build_objective
from diffusionlm.evaluation.nelbo import compute_masked_nll
from diffusionlm.inference.generate import decode
from diffusionlm.inference.request_builder import prepare_request
from diffusionlm.inference.requests import RequestOptions
from diffusionlm.inference.settings import resolve_settings
from diffusionlm.models.patterns import PromptAndOwnBlock
from diffusionlm.models.transformer import Transformer
from tests.conftest import MakeModel
from tests.reference.enumeration import PlainModel, log_probabilities
from tests.tiny_run import write_train_config

VOCAB, MASK, L = 9, 8, 16
EXACT: dict[str, Any] = {"rtol": 0.0, "atol": 1e-12}
BLOCKS = BlockDiffusionConfig(block_length=3, attention="prompt_and_own_block")


@pytest.fixture(scope="module")
def model(tiny_model: MakeModel) -> Transformer:
    vocabulary = {"vocab_size": VOCAB, "mask_token_id": MASK, "eos_token_id": 0, "pad_token_id": 0}
    return tiny_model(torch.float64, scale=0.4, max_position_embeddings=L, **vocabulary)


@pytest.fixture
def bias_file(tmp_path: Path) -> Path:
    bias = torch.randn(L, L, generator=torch.Generator().manual_seed(1))
    bias[torch.rand(L, L, generator=torch.Generator().manual_seed(2)) < 0.3] = -torch.inf
    bias.fill_diagonal_(0.0)
    np.save(tmp_path / "bias.npy", bias.numpy())
    return tmp_path / "bias.npy"


def two_answers() -> CleanBatch:
    """Two documents and padding: prompts of 4 and 2, answers of 5 and 4."""
    documents = torch.tensor([[0] * 9 + [1] * 6 + [-1]])
    targets = torch.tensor([[False] * 4 + [True] * 5 + [False] * 2 + [True] * 4 + [False]])
    tokens = torch.randint(0, MASK, (1, L), generator=torch.Generator().manual_seed(0))
    return CleanBatch(tokens, targets, documents)


def test_prompts_end_before_the_first_target() -> None:
    batch = two_answers()
    expected = [True] * 4 + [False] * 5 + [True] * 2 + [False] * 4 + [True]
    assert find_prompts(batch).tolist() == [expected]
    assert find_prompts(CleanBatch(batch.tokens_BL, batch.loss_mask_BL)).tolist() == [[True] * 4 + [False] * 12]


@torch.no_grad()
def test_loss_of_independent_blocks_equals_a_forward_of_each(model: Transformer) -> None:
    """Prompt and noisy block alone, at their positions in the row."""
    batch, layout = two_answers(), build_layout(BLOCKS, model.config, 3)
    masked = batch.loss_mask_BL & (torch.rand(1, L) < 0.7)
    nll = torch.from_numpy(compute_masked_nll(model, layout, batch, masked.numpy()))[0]
    plain, count = PlainModel(model), 0
    for start, prompt_end, end in ((0, 4, 9), (9, 11, 15)):
        for first in range(prompt_end, end, 3):
            block = torch.arange(first, min(first + 3, end))
            positions = torch.cat([torch.arange(start, prompt_end), block])
            inputs = torch.where(masked[0, positions], MASK, batch.tokens_BL[0, positions])[None]
            is_prompt = positions < prompt_end
            logits, _ = plain(inputs, positions, is_prompt[None] | ~is_prompt[:, None])
            log_p = log_probabilities(logits)[0].gather(1, batch.tokens_BL[0, positions][:, None])[:, 0]
            for index, position in enumerate(positions.tolist()):
                if masked[0, position]:
                    torch.testing.assert_close(nll[position], -log_p[index], **EXACT)
                    count += 1
    assert count == int(masked.sum()) > 3


def test_noise_groups_are_the_attention_blocks(model: Transformer) -> None:
    """With every count 1 ... n of a block, the weight is n / k: block sizes 3 and 2, 3 and 1."""
    batch, objective = two_answers(), build_objective(BLOCKS, model.config)
    draw = objective.build_noised_batch(batch, NoiseKey(0, 0, 0, 1))
    assert isinstance(draw.pattern, PromptAndOwnBlock) and draw.inputs_BS.shape == (1, L)
    sizes = {4: 3, 5: 3, 6: 3, 7: 2, 8: 2, 11: 3, 12: 3, 13: 3, 14: 1}
    masked = draw.positions_N.tolist()
    starts = {place: {4: 0, 5: 0, 6: 0, 7: 1, 8: 1, 11: 2, 12: 2, 13: 2, 14: 3}[place] for place in masked}
    for place, weight in zip(masked, draw.weights_N.tolist(), strict=True):
        count = sum(other == starts[place] for other in starts.values())
        assert weight == pytest.approx(sizes[place] / count)
    assert set(starts.values()) == {0, 1, 2, 3}, "every block has at least one mask"


@torch.no_grad()
@pytest.mark.parametrize("kind", ["blocks", "bias"])
def test_decoding_sees_what_training_saw(model: Transformer, kind: str, bias_file: Path) -> None:
    """The log-probability of each committed token is that of the training forward with the same masks."""
    prompt = [1, 5, 2, 7]
    if kind == "blocks":
        objective: ObjectiveConfig = BLOCKS
        options: dict[str, Any] = {"attention": "prompt_and_own_block", "block_length": 3}
    else:
        objective = MaskedDiffusionConfig(attention_bias=bias_file)
        options = {"attention_bias": bias_file, "block_length": 3}
    layout = build_layout(objective, model.config, objective.final_block_length)
    settings = resolve_settings(
        GenerationConfig(max_new_tokens=7, stop_token_ids=(), steps=7, remasking_strategy="low_confidence", **options),
        model.config,
    )
    others = prepare_request(settings, [3, 3], seed=1)
    [result, _] = decode(model, [prepare_request(settings, prompt), others])
    tokens = torch.tensor([[*prompt, *result.token_ids]])
    batch = CleanBatch(tokens, torch.arange(11)[None] >= 4)
    for position, (step, logprob) in enumerate(zip(result.step_map, result.logprobs, strict=True), start=4):
        masked = np.zeros((1, 11), dtype=np.bool_)
        masked[0, 4:] = np.array(result.step_map) >= step
        nll = compute_masked_nll(model, layout, batch, masked)[0, position]
        assert logprob == pytest.approx(-nll, abs=1e-9)


@torch.no_grad()
def test_infilling_counts_blocks_from_the_first_mask(model: Transformer) -> None:
    settings = resolve_settings(
        GenerationConfig(attention="prompt_and_own_block", block_length=3, steps=3), model.config
    )
    request = prepare_request(settings, [1, 2, MASK, 4, MASK, MASK, 3, 3, MASK], options=RequestOptions(is_infill=True))
    assert [block.positions.tolist() for block in request.blocks] == [[2, 4], [5], [8]]


def test_bias_files(model: Transformer, tmp_path: Path) -> None:
    heads = model.config.num_attention_heads
    good = {"a.safetensors": torch.zeros(heads, L, L), "b.npy": torch.ones(L + 4, L + 4, dtype=torch.bool)}
    bad = {
        "two.safetensors": (None, "2 tensors"),
        "shape.npy": (torch.zeros(L, L + 1), r"give \[L, L\]"),
        "heads.npy": (torch.zeros(heads + 1, L, L), "one for each"),
        "short.npy": (torch.zeros(L - 1, L - 1), "positions: give as many as the model's context"),
        "empty.npy": (torch.full((L, L), -torch.inf), "each query needs a key"),
        "nan.npy": (torch.full((L, L), torch.nan), "must be finite"),
        "missing.npy": (None, "cannot be read"),
    }
    for name, tensor in good.items():
        save = save_file if name.endswith("safetensors") else lambda tensors, path: np.save(path, tensors["x"].numpy())
        save({"x": tensor}, tmp_path / name)
        layout = build_layout(MaskedDiffusionConfig(attention_bias=tmp_path / name), model.config, None)
        assert layout.bias is not None and layout.bias.shape == (1, *tensor.shape)
    save_file({"x": torch.zeros(L, L), "y": torch.zeros(L, L)}, tmp_path / "two.safetensors")
    for name, (tensor_or_none, message) in bad.items():
        if tensor_or_none is not None:
            np.save(tmp_path / name, tensor_or_none.numpy())
        with pytest.raises(ValueError, match=f"{name}.*{message}"):
            build_objective(MaskedDiffusionConfig(attention_bias=tmp_path / name), model.config)


INDEPENDENT = {"kind": "block_diffusion", "block_length": 4, "attention": "prompt_and_own_block"}


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"objective": {"kind": "masked_diffusion", "attention_bias": "b.npy"}}, 'set data.rows = "padded"'),
        ({"objective": INDEPENDENT, "model": {"logit_alignment": "shifted"}}, 'logit_alignment = "same_position"'),
        ({"objective": INDEPENDENT, "data": {"source": {"kind": "chat_tasks"}}}, 'chat.turns = "expand"'),
        (
            {"objective": INDEPENDENT, "data": {"source": {"kind": "chat_tasks", "chat": {"turns": "last"}}}},
            'chat.eos_padding = "length:N"',
        ),
        (
            {"objective": {"kind": "masked_diffusion", "attention_bias": "b.npy", "anneal_attention_steps": 3}},
            "remove one",
        ),
    ],
)
def test_config_errors(sections: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(TrainConfig, write_train_config(tmp_path, **sections))


def test_generation_errors(model: Transformer, bias_file: Path) -> None:
    with pytest.raises(ValueError, match='set cache = "none"'):
        GenerationConfig(attention="prompt_and_own_block", cache="block")
    with pytest.raises(ValueError, match="remove one of them"):
        GenerationConfig(attention="block_causal", attention_bias=bias_file)
    with pytest.raises(ValueError, match="has no cache"):
        GenerationConfig(attention_bias=bias_file, cache="dual")
    with pytest.raises(ValueError, match="needs block_length"):
        resolve_settings(GenerationConfig(attention="prompt_and_own_block"), model.config)
    with pytest.raises(ValueError, match="does not exist"):
        resolve_settings(GenerationConfig(attention_bias=bias_file / "no"), model.config)
