"""Runs of every objective in one process: accumulation, resuming, summaries, and what is said of the loss."""

from __future__ import annotations

import json
import math
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cli.train import format_summary
from config.generation import GenerationConfig
from config.load import load_config
from config.train import TrainConfig
from diffusionlm.checkpoints.huggingface import load_model
from diffusionlm.checkpoints.model_files import load_tokenizer
from diffusionlm.data.loader import Loader
from diffusionlm.data.pipeline import open_components
from diffusionlm.diffusion.noised_batch import NoisedBatch
from diffusionlm.evaluation.nelbo import nelbo
from diffusionlm.evaluation.validation import Validator
from diffusionlm.inference.generate import generate
from diffusionlm.training.checkpointing.run_directory import open_run_directory
from diffusionlm.training.loop import train
from diffusionlm.training.reporting import RunSummary
from diffusionlm.training.run import Run, build_run
from diffusionlm.training.signals import StopRequest
from diffusionlm.training.step import load_step_batch, train_step
from logger.pages.terminal import render_text
from tokenizer import Tokenizer, save_tokenizer, train_bpe

BLOCKS = {"kind": "block_diffusion", "block_length": [1, 4, 16]}
STAGES = {
    "kind": "block_diffusion",
    "stages": [{"from_step": 0, "block_length": 16}, {"from_step": 3, "block_length": 5}],
    "estimator": {"kind": "counts", "complementary": True},
}
NEXT = {"kind": "next_token"}
WHOLE = {
    "kind": "masked_diffusion",
    "normalizer": "rows",
    "estimator": {"kind": "bernoulli", "schedule": "cosine", "replace_with": "random"},
}
ANNEALED = {
    "kind": "masked_diffusion",
    "anneal_attention_steps": 6,
    "mask_noise_steps": 4,
    "estimator": {"kind": "counts", "weight": "cart"},
}
WITH_NEXT_TOKEN = {"kind": "block_diffusion", "block_length": 4, "next_token_weight": 0.3, "mask_noise_steps": 1}
OBJECTIVES: dict[str, dict[str, Any]] = {
    "several blocks": BLOCKS,
    "stages": STAGES,
    "next token": NEXT,
    "masked": WHOLE,
    "annealed": ANNEALED,
    "next token, too": WITH_NEXT_TOKEN,
}


def with_objective(config: TrainConfig, objective: dict[str, Any], **sections: dict[str, Any]) -> TrainConfig:
    """The same run with another objective, in which `sections` are changed (and the tokenizer is another)."""
    values: dict[str, Any] = config.model_dump(exclude_unset=True)
    values["objective"] = objective
    if objective["kind"] == "next_token":
        values["model"]["logit_alignment"] = "shifted"
        values["data"]["begin_with_eos"] = True
    for name, changes in sections.items():
        values[name] = changes if name == "tokenizer" else values[name] | changes
    return TrainConfig.model_validate(values)


def in_directory(config: TrainConfig, directory: Path) -> TrainConfig:
    return config.model_copy(update={"run": config.run.model_copy(update={"directory": directory})})


def records(config: TrainConfig) -> list[dict[str, Any]]:
    """The steps' numbers, without those of the clock, and behind them those of the final evaluation."""
    lines = (config.run.directory / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    clock = {"tokens_per_second", "step_seconds", "seconds_left", "data/tokens_per_second", "data/wait_seconds"}
    clock |= {"memory/peak_resident"}
    steps = [json.loads(line) for line in lines]
    return [
        {key: value for key, value in step["metrics"].items() if key not in clock}
        for step in steps
        if "metrics" in step
    ]


# ----------------------------------------------------------------------------------------------------------------------
# One step


class Keep:
    """In place of the optimizers: gradients as they are when the step would be made."""

    can_skip_on_device = True

    def __init__(self, run: Run) -> None:
        self.parameters = dict(run.state.model.named_parameters())
        self.gradients: dict[str, torch.Tensor] = {}

    def step(self, factor: float, skip: torch.Tensor | None) -> None:
        self.gradients = {
            name: parameter.grad.clone() for name, parameter in self.parameters.items() if parameter.grad is not None
        }
        for parameter in self.parameters.values():
            parameter.grad = None


def one_step(
    config: TrainConfig, micro: int, directory: Path
) -> tuple[float, dict[str, torch.Tensor], list[NoisedBatch]]:
    training = config.training.model_copy(update={"micro_batch_size": micro, "max_grad_norm": 1e9})
    config = in_directory(config.model_copy(update={"training": training}), directory)
    with open_run_directory(config) as opened:
        run = build_run(config, opened)
        # Output projections start at zero, and would give no gradient to what is before them.
        rng = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in run.state.model.parameters():
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=rng))
        keep: Any = Keep(run)
        run.state.optimizers = keep
        batch = load_step_batch(run.loader, 0, run.world, StopRequest())
        metrics = train_step(run.state, run.loader, batch, run.settings, run.monitor)
        return metrics.loss, keep.gradients, batch.noised_batches


@pytest.mark.parametrize("name", ["stages", "masked", "annealed", "next token, too"])
def test_micro_batches_give_the_same_loss_and_gradients(config: TrainConfig, name: str, tmp_path: Path) -> None:
    """Of objectives that change a step besides its loss; `reference/test_invariance.py` has the others.

    One text a row: the rows' numbers of targets differ, and so do the micro-batches'.
    """
    source = {"kind": "grammar", "depth": 2, "documents_per_epoch": 60, "validation_documents": 8}
    data = {"rows": "padded", "source": source}
    config = with_objective(
        config, OBJECTIVES[name], data=data, training={"batch_size": 6}, tokenizer={"vocab_size": 258}
    )
    loss, gradients, _ = one_step(config, 6, tmp_path / "whole")
    parts_loss, parts, draws = one_step(config, 2, tmp_path / "parts")
    draws = [draw for draw in draws if not draw.is_auxiliary]
    assert len(draws) == 3 and len({draw.num_targets for draw in draws}) > 1, "equal counts would hide a mean of means"
    assert math.isfinite(loss) and loss == pytest.approx(parts_loss, rel=1e-5)
    assert gradients.keys() == parts.keys() and len(gradients) > 5
    for name, gradient in gradients.items():
        assert float(gradient.abs().max()) > 0, name
        torch.testing.assert_close(gradient, parts[name], rtol=1e-4, atol=2e-6 + 1e-5 * float(gradient.abs().max()))


# ----------------------------------------------------------------------------------------------------------------------
# Whole runs


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name == "several blocks" else [pytest.mark.slow]) for name in OBJECTIVES],
)
def test_a_run_resumes_bit_for_bit(
    name: str, config: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = with_objective(config, OBJECTIVES[name], training={"micro_batch_size": 2, "ema_decay": 0.9})
    whole, broken = in_directory(config, tmp_path / "whole"), in_directory(config, tmp_path / "broken")
    expected = train(whole)
    original = Loader.next_step

    def next_step(self: Loader, step: int) -> list[NoisedBatch]:
        if step == 5:
            raise RuntimeError("the machine goes down")
        return original(self, step)

    with monkeypatch.context() as patch:
        patch.setattr(Loader, "next_step", next_step)
        with pytest.raises(RuntimeError, match="goes down"):
            train(broken)
    result = train(broken)
    assert records(broken) == records(whole) and len(records(whole)) == 9
    for file in ("model.safetensors", "training_state/.metadata", "training_state/__0_0.distcp"):
        one, other = (config_of_run.run.directory / "checkpoints/latest" / file for config_of_run in (whole, broken))
        assert one.read_bytes() == other.read_bytes(), file
    assert result.summary is not None and expected.summary is not None
    assert result.summary.evaluation == expected.summary.evaluation
    assert result.summary.other_block_lengths == expected.summary.other_block_lengths


@pytest.mark.slow
def test_a_model_of_several_block_lengths_is_judged_by_all(config: TrainConfig) -> None:
    config = with_objective(config, BLOCKS)
    result = train(config)
    summary = result.summary
    assert summary is not None
    assert summary.evaluation.block_length == 16
    assert [other.block_length for other in summary.other_block_lengths] == [1, 4]
    saved = json.loads((config.run.directory / "summary.json").read_text(encoding="utf-8"))
    assert RunSummary.from_json(saved) == summary
    assert not summary.evaluation.fills
    text = render_text(format_summary(summary, config.run.directory), StringIO())
    for part in (
        "validation bound, blocks of 16",
        "loss, token by token",
        "  bound, blocks of 4",
        "share of the block",
    ):
        assert part in text
    is_trained = summary.evaluation.nats_per_token < summary.evaluation.unigram_entropy
    assert ("train longer (training.max_steps)" in text) != is_trained
    model = load_model(config.run.directory)
    assert (model.config.block_length, model.config.logit_alignment) == (16, "same_position")
    # The table's numbers are what the library says of the saved model.
    tokenizer = load_tokenizer(config.run.directory)
    rows = Validator.open(config, tokenizer, open_components(config.data, "train")).rows[:8]
    batch: dict[str, Any] = {
        "tokens_BL": torch.from_numpy(np.stack([row.tokens_L for row in rows])).long(),
        "loss_mask_BL": torch.from_numpy(np.stack([row.loss_mask_L for row in rows])),
        "document_BL": torch.from_numpy(np.stack([row.document_ids_L for row in rows])),
    }
    for evaluation in (summary.evaluation, *summary.other_block_lengths):
        report = nelbo(
            model,
            block_length=evaluation.block_length,
            num_mc_samples=config.validation.num_mc_samples,
            batch_size=8,
            **batch,
        )
        assert report.nats_per_token == pytest.approx(evaluation.nats_per_token, rel=1e-5)
    [done] = generate(model, [tokenizer.encode("the")], GenerationConfig(max_new_tokens=6))
    assert len(done.token_ids) <= 6


@pytest.mark.slow
def test_stages_end_with_the_last_block_length(config: TrainConfig) -> None:
    summary = train(with_objective(config, STAGES)).summary
    assert summary is not None
    assert (
        summary.evaluation.block_length,
        [evaluation.block_length for evaluation in summary.other_block_lengths],
    ) == (5, [16])


def test_next_token_from_a_tokenizer_without_mask_token(config: TrainConfig, tmp_path: Path) -> None:
    trained = train_bpe(["the cat sat on the mat"], vocab_size=262)
    special = {"<|endoftext|>": trained.special_tokens["<|endoftext|>"]}
    bare = Tokenizer(trained.vocab, trained.merges, special, "qwen", eos_token="<|endoftext|>")
    save_tokenizer(bare, tmp_path / "bare")
    config = with_objective(config, NEXT, tokenizer={"path": str(tmp_path / "bare")}, validation={"every_steps": 4})
    summary = train(config).summary
    assert summary is not None and summary.evaluation.block_length == 1
    text = render_text(format_summary(summary, config.run.directory), StringIO())
    assert "validation loss, token by token" in text and "cross-entropy by" not in text and "masked" not in text
    model = load_model(config.run.directory)
    assert model.config.is_autoregressive and model.config.mask_token_id is None
    assert len(generate(model, [[1, 2]], GenerationConfig(max_new_tokens=3, stop_token_ids=()))[0].token_ids) == 3
    refused = with_objective(config, {"kind": "masked_diffusion"}, model={"logit_alignment": "same_position"})
    with pytest.raises(ValueError, match=r'no mask token, which objective\.kind = "masked_diffusion" needs'):
        train(in_directory(refused, tmp_path / "refused"))


def test_the_loss_of_next_token_is_its_validation_loss(config: TrainConfig) -> None:
    """Over the same rows both are the same number: the training loss of a step without noise is exact."""
    config = with_objective(config, NEXT)
    with open_run_directory(config) as opened:
        run = build_run(config, opened)
        keep: Any = Keep(run)
        run.state.optimizers = keep
        assert isinstance(run.loader, Loader)
        rows = run.loader.rows.read(0, None, config.training.batch_size)[0]
        batch = load_step_batch(run.loader, 0, run.world, StopRequest())
        loss = train_step(run.state, run.loader, batch, run.settings, run.monitor).loss
        stack = [
            np.stack([getattr(row, name) for row in rows]) for name in ("tokens_L", "loss_mask_L", "document_ids_L")
        ]
        tokens, targets, documents = map(torch.from_numpy, stack)
        report = nelbo(run.state.model, tokens.long(), targets, 1, document_BL=documents)
    assert loss == pytest.approx(report.nats_per_token, rel=1e-5)


@pytest.mark.parametrize(
    ("objective", "message"),
    [
        pytest.param(BLOCKS, None, marks=pytest.mark.slow),
        (NEXT, None),
        (WHOLE, "undo a linear schedule only; rows weigh the same whatever their number of targets; noise is random"),
        pytest.param(
            {"kind": "masked_diffusion", "normalizer": "masked"},
            "masked tokens are not weighted; the sum is divided by",
            marks=pytest.mark.slow,
        ),
    ],
    ids=["blocks", "next token", "rows", "mean"],
)
def test_loss_without_bound_is_reported_once(
    config: TrainConfig, objective: dict[str, Any], message: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    train(with_objective(config, objective))
    lines = [line for line in capsys.readouterr().err.splitlines() if "NELBO" in line]
    if message is None:
        assert not lines
    else:
        [line] = lines
        assert line.startswith("the training loss is no estimate of the NELBO: ") and message in line
        assert line.endswith(". Validation always is")


def test_the_entropy_of_the_source_is_named_where_it_is_the_floor(config: TrainConfig, tmp_path: Path) -> None:
    def entropy(objective: dict[str, Any], source: dict[str, Any], **data: Any) -> float | None:
        changed = with_objective(config, objective, data={"rows": "padded", "source": source, **data})
        tokenizer = train_bpe(["abc"], vocab_size=258)
        return Validator.open(changed, tokenizer, open_components(changed.data, "train")).source_entropy

    markov = {"kind": "markov", "symbols": "ab", "length": 4, "stay": 0.5}
    whole = {"kind": "masked_diffusion"}
    exact = 4 * math.log(2)
    assert entropy(whole, markov) == pytest.approx(exact)
    assert entropy({"kind": "block_diffusion", "block_length": 3}, markov) == pytest.approx(exact)
    assert entropy(NEXT, markov, begin_with_eos=True) == pytest.approx(exact)
    assert entropy(NEXT, markov, begin_with_eos=False) is None, "nothing predicts the first token"
    assert entropy(whole, {**markov, "length": 16}) is None, "documents are cut"
    assert entropy(whole, {**markov, "length": 16}, end_with_eos=False) == pytest.approx(16 * math.log(2))
    assert entropy(whole, markov, rows="packed") is None
    grammar = {"kind": "grammar", "depth": 1}
    entropy_of_source = entropy(whole, grammar)
    assert entropy_of_source is not None and entropy_of_source > 0.0
    assert entropy({"kind": "block_diffusion", "block_length": 3}, grammar) is None


def test_the_resolved_config_of_a_run_loads(config: TrainConfig) -> None:
    for objective in OBJECTIVES.values():
        changed = with_objective(config, objective)
        with open_run_directory(in_directory(changed, config.run.directory.parent / objective["kind"])) as opened:
            assert load_config(TrainConfig, opened.path / "config.toml").objective == changed.objective
