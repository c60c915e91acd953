"""Decoding of a model with known answers: seeds, stop tokens, masked spans, requests that do not fit.

Shapes: B requests, L positions, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from config.generation import GenerationConfig
from diffusionlm.inference.generate import decode, generate, infill
from diffusionlm.inference.request_builder import prepare_request
from diffusionlm.inference.requests import RequestOptions
from diffusionlm.inference.settings import resolve_settings
from diffusionlm.models.transformer import Transformer
from tests.decoding_jobs import assert_same

MASK, EOS, VOCAB = 22, 21, 23


def settings(**values: Any) -> GenerationConfig:
    return GenerationConfig.model_validate({"max_new_tokens": 12, "stop_token_ids": (), **values})


class Oracle(Transformer):
    """Knows the answer: position i is ``answer[i]``, with certainty that falls with i. The mask gets more still."""

    answer: tuple[int, ...] = ()
    rows_seen: list[int]

    def forward(self, tokens_BL: Tensor, **options: Any) -> Any:
        logits, num_rows = [], 0
        for part in options["pattern"].sequences:
            L = part.num_visible
            logits_LV = torch.zeros(L, VOCAB, dtype=torch.float64)
            logits_LV[torch.arange(L), torch.tensor(self.answer[:L])] = 9.0 - torch.arange(L, dtype=torch.float64) / L
            logits_LV[:, MASK] = 99.0
            logits.append(logits_LV[part.output_offsets + part.start])
            num_rows += len(part.output_offsets)
        self.rows_seen.append(num_rows)
        return torch.cat(logits)


@pytest.fixture
def oracle(model: Transformer) -> Oracle:
    oracle = Oracle(model.config)
    oracle.answer = tuple(position * 7 % 20 for position in range(40))
    oracle.rows_seen = []
    return oracle


def test_the_most_confident_first_and_only_open_rows_are_computed(oracle: Oracle) -> None:
    [done] = generate(oracle, [[1, 2]], settings(block_length=6, denoising_steps=4))
    assert done.step_map == (1, 1, 2, 2, 3, 4, 5, 5, 6, 6, 7, 8)
    assert oracle.rows_seen == [6, 4, 2, 1, 6, 4, 2, 1]


def test_seeds_decide_the_samples(model: Transformer) -> None:
    config = settings(temperature=1.0)
    first, second, again = generate(model, [[1], [1], [1]], config, [5, 6, 5])
    assert_same(first, again)
    assert first.token_ids != second.token_ids
    default = generate(model, [[1], [1]], config)
    assert default == generate(model, [[1], [1]], config, [0, 1])


def test_a_stop_token_waits_for_what_is_before_it(oracle: Oracle) -> None:
    # One forward settles the stop token alone; the text is over only when all before it is settled.
    class Backwards(Oracle):
        def forward(self, tokens_BL: Tensor, **options: Any) -> Any:
            logits = super().forward(tokens_BL, **options)
            return logits * (1.0 + torch.from_numpy(options["pattern"].sequences[0].outputs)[:, None] / 40)

    backwards = Backwards(oracle.config)
    backwards.answer, backwards.rows_seen = oracle.answer, []
    [done] = generate(backwards, [[1]], settings(stop_token_ids=(oracle.answer[4],), denoising_steps=12))
    assert done.token_ids == oracle.answer[1:4]
    assert done.step_map == (12, 11, 10)
    assert done.num_forwards == 12


def test_a_stop_token_in_the_last_block_of_a_strategy_that_remasks(oracle: Oracle) -> None:
    stop = oracle.answer[6]
    for name in ("p2", "remdm_cap"):
        [done] = generate(oracle, [[1]], settings(stop_token_ids=(stop,), remasking_strategy=name, temperature=1e-3))
        assert (done.token_ids, done.finish_reason) == (oracle.answer[1:6], "stop")


def test_the_models_end_of_text_is_the_default_stop(oracle: Oracle) -> None:
    oracle.answer = (1, 2, 3, EOS, *[5] * 30)
    config = GenerationConfig(max_new_tokens=6)
    assert generate(oracle, [[1]], config)[0].token_ids == (2, 3)
    assert generate(oracle, [[1]], settings(max_new_tokens=6))[0].token_ids == (2, 3, EOS, 5, 5, 5)
    empty = generate(oracle, [[1, 2, 3]], config)[0]
    assert (empty.token_ids, empty.logprobs, empty.finish_reason) == ((), (), "stop")


def test_a_canvas_without_masks_takes_no_forward(model: Transformer) -> None:
    canvases = [[9, MASK], [EOS, 2, 3], []]
    results = infill(model, canvases, settings(stop_token_ids=None))
    assert [(result.num_forwards, len(result.logprobs)) for result in results] == [(1, 1), (0, 0), (0, 0)]
    assert [list(result.token_ids) for result in results[1:]] == canvases[1:]


def test_requests_that_do_not_fit_the_model(model: Transformer) -> None:
    config = settings()
    with pytest.raises(ValueError, match=r"prompt 1: 29 tokens and max_new_tokens = 12: 41 .* = 40: shorten"):
        generate(model, [[1], [1] * 29], config)
    with pytest.raises(ValueError, match=r"canvas 0: 41 tokens.*max_position_embeddings = 40: shorten"):
        infill(model, [[MASK] * 41], config)
    with pytest.raises(ValueError, match=r"prompt 0: 3 tokens.*total_length = 3"):
        generate(model, [[1, 2, 3]], settings(total_length=3, max_new_tokens=None))
    with pytest.raises(ValueError, match=r"min_new_tokens .* = 3 is more than the 2 new tokens of total_length = 5"):
        generate(model, [[1, 2, 3]], settings(total_length=5, max_new_tokens=None, min_new_tokens=3))
    with pytest.raises(ValueError, match="prompt 0: token 23"):
        generate(model, [[23]], config)
    with pytest.raises(ValueError, match="seeds: 2 for 1 requests"):
        generate(model, [[1]], config, [1, 2])
    assert generate(model, [], config) == infill(model, [], config) == []
    with pytest.raises(ValueError, match="prompt 0: seed = -1"):
        generate(model, [[1]], config, [-1])


def test_chunks_of_logits_begin_anywhere(model: Transformer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between requests, and within one whose logits are changed."""
    resolved = resolve_settings(settings(temperature=1.0), model.config)
    options = [
        RequestOptions(allowed_token_ids={2: [9], 3: range(12)}),
        RequestOptions(logit_bias={7: 1.5, 3: -2.0}, num_top_logprobs=2),
        RequestOptions(),
    ]
    jobs = [prepare_request(resolved, [1, 1], seed, each) for seed, each in enumerate(options)]
    whole = decode(model, jobs)
    monkeypatch.setattr("diffusionlm.inference.sampling.distributions.PROBABILITY_CHUNK_BYTES", 8 * VOCAB * 5)
    assert decode(model, jobs) == whole
