"""lm-evaluation-harness as a client (`local-completions`): options are scored through the server as by hand."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from config.generation import GenerationConfig
from diffusionlm.checkpoints.huggingface import save_model_directory
from diffusionlm.evaluation.sampler_likelihood import sampler_likelihood
from tests.unit.serving.http.conftest import NAME, RunningServer

pytest.importorskip("lm_eval")
pytestmark = pytest.mark.lm_eval


def test_options_are_scored(server: RunningServer, tmp_path: Path) -> None:
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    save_model_directory(server.model, server.tokenizer, tmp_path)
    url = f"{server.url}/completions"
    client = LocalCompletionsAPI(
        base_url=url, model=NAME, tokenizer=str(tmp_path), tokenizer_backend="huggingface", batch_size=2
    )
    pairs = [("the cat", " sat on the mat"), ("the dog", " was flat"), ("the", " cat")]
    requests: Any = [SimpleNamespace(args=pair, kwargs={}) for pair in pairs]
    for (context, option), (score, is_greedy) in zip(pairs, client.loglikelihood(requests), strict=True):
        ids = server.tokenizer.encode(context + option)
        start = len(server.tokenizer.encode(context))
        is_option = torch.arange(len(ids)) >= start
        config = GenerationConfig(remasking_strategy="sequential")
        report = sampler_likelihood(server.model, torch.tensor([ids]), is_option[None], config)
        assert score == pytest.approx(-report.nats_per_token * (len(ids) - start), abs=1e-4)
        assert isinstance(is_greedy, bool)
