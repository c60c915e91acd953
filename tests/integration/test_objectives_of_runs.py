"""Runs of every objective and state in one process: accumulation, resuming, summaries, and what is said of the loss."""

from __future__ import annotations

import math
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from cli.train import format_summary
from config.generation import GenerationConfig
from config.train import TrainConfig
from diffusionlm.checkpoints.huggingface import load_model
from diffusionlm.checkpoints.model_files import load_tokenizer
from diffusionlm.data.pipeline import open_components
from diffusionlm.diffusion.noised_batch import NoisedBatch
from diffusionlm.evaluation.nelbo import nelbo
from diffusionlm.evaluation.validation import Validator
from diffusionlm.inference.generate import generate
from diffusionlm.models.patterns import Causal
from diffusionlm.training.loop import train
from diffusionlm.training.reporting import RunSummary
from logger.pages.terminal import render_text
from tests.tiny_run import build_changed_run, change_config, failing_at, make_first_step, read_records
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
ONE_FORWARD = WITH_NEXT_TOKEN | {"clean_attention": "token", "normalizer": "masked"}
OBJECTIVES: dict[str, dict[str, Any]] = {
    "one forward": ONE_FORWARD,
    "one forward, balanced": ONE_FORWARD | {"balance": True, "estimator": {"kind": "all_masked"}},
    "several blocks": BLOCKS,
    "stages": STAGES,
    "next token": NEXT,
    "masked": WHOLE,
    "annealed": ANNEALED,
    "next token, too": WITH_NEXT_TOKEN,
}
STATES: dict[str, dict[str, Any]] = {
    "bfloat16 weights": {
        "runtime": {"weights": "bfloat16_with_master"},
        "training": {"precision": "bfloat16"},
    },
    # Experts without tokens have a state of the optimizer as well: a checkpoint without it would be refused.
    "experts": {"model": {"num_experts": 40, "num_experts_per_tok": 2, "moe_intermediate_size": 8}},
}
CLOCK = {"tokens_per_second", "step_seconds", "seconds_left", "data/tokens_per_second", "data/wait_seconds"}
CLOCK |= {"memory/peak_resident"}


def with_objective(config: TrainConfig, objective: dict[str, Any], **sections: dict[str, Any]) -> TrainConfig:
    """The same run with another objective, in which `sections` are changed (and the tokenizer is another)."""
    if objective["kind"] == "next_token":
        sections["model"] = {"logit_alignment": "shifted"} | sections.get("model", {})
        sections["data"] = {"begin_with_eos": True} | sections.get("data", {})
    if objective.get("clean_attention") == "token":
        sections["model"] = {"clean_alignment": "shifted"} | sections.get("model", {})
    values: dict[str, Any] = config.model_dump(exclude_unset=True, exclude={"objective"})
    for name, changes in sections.items():
        values[name] = changes if name == "tokenizer" else values.get(name, {}) | changes
    return TrainConfig.model_validate(values | {"objective": objective})


def records(config: TrainConfig) -> list[dict[str, Any]]:
    """The metrics of steps and of the final evaluation, without those of the clock."""
    return [
        {key: value for key, value in record["metrics"].items() if key not in CLOCK} for record in read_records(config)
    ]


@pytest.mark.parametrize(
    "name", ["stages", "masked", "annealed", "next token, too", "one forward", "one forward, balanced"]
)
def test_micro_batches_give_the_same_loss_and_gradients(config: TrainConfig, name: str, tmp_path: Path) -> None:
    """Of objectives that change a step besides its loss; `reference/test_invariance.py` has the others. With NEFTune.

    One text a row: the rows' numbers of targets differ, and so do the micro-batches'.
    """
    texts = tmp_path / "texts.txt"
    texts.write_text("\n".join(f"{index}" + "ab" * (index % 7) for index in range(60)), encoding="utf-8")
    source = {"kind": "files", "paths": [str(texts)], "sample_by": "line", "validation_fraction": 0.2}

    def step(micro: int) -> tuple[float, dict[str, torch.Tensor], list[NoisedBatch]]:
        changed = with_objective(
            config,
            OBJECTIVES[name],
            run={"directory": tmp_path / str(micro)},
            data={"rows": "padded", "source": source},
            training={"batch_size": 6, "micro_batch_size": micro, "max_grad_norm": 1e9, "neftune_alpha": 5.0},
            tokenizer={"vocab_size": 258},
        )
        metrics, gradients, batches, _ = make_first_step(changed)
        return metrics.loss, gradients, batches

    loss, gradients, _ = step(6)
    parts_loss, parts, draws = step(2)
    draws = [draw for draw in draws if not draw.is_auxiliary]
    if name.startswith("one forward"):  # the next tokens of the step have a divisor of their own
        sums = [
            float((draw.weights_N * draw.is_next_token_N).sum()) for draw in draws if draw.is_next_token_N is not None
        ]
        assert sum(sums) / sum(draw.denominator for draw in draws) == pytest.approx(0.3)
    assert len(draws) == 3 and len({draw.num_targets for draw in draws}) > 1, "equal counts would hide a mean of means"
    assert math.isfinite(loss) and loss == pytest.approx(parts_loss, rel=1e-5)
    assert gradients.keys() == parts.keys() and len(gradients) > 5
    for name, gradient in gradients.items():
        assert float(gradient.abs().max()) > 0, name
        torch.testing.assert_close(gradient, parts[name], rtol=1e-4, atol=2e-6 + 1e-5 * float(gradient.abs().max()))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name == "several blocks" else [pytest.mark.slow])
        for name in [*OBJECTIVES, *STATES]
    ],
)
def test_a_run_resumes_bit_for_bit(name: str, config: TrainConfig, tmp_path: Path) -> None:
    sections = STATES.get(name, {})
    training = sections.get("training", {}) | {"micro_batch_size": 2, "ema_decay": 0.9, "neftune_alpha": 5.0}
    whole, broken = (
        with_objective(
            config,
            OBJECTIVES.get(name, {"kind": "masked_diffusion"}),
            **(sections | {"training": training, "run": {"directory": tmp_path / directory}}),
        )
        for directory in ("whole", "broken")
    )
    expected = train(whole)
    with failing_at(5):
        train(broken)
    result = train(broken)
    assert records(broken) == records(whole) and len(records(whole)) == 9
    for file in ("training_state/.metadata", "training_state/__0_0.distcp", "model.safetensors"):
        one, other = (config_of_run.run.directory / "checkpoints/latest" / file for config_of_run in (whole, broken))
        assert one.read_bytes() == other.read_bytes(), file
    if name == "bfloat16 weights":  # the file has the float32 values
        weight = load_file(one.with_name("model.safetensors"))["model.layers.0.mlp.up_proj.weight"]
        assert weight.dtype == torch.float32 and not torch.equal(weight, weight.bfloat16().float())
    assert result.summary is not None and expected.summary is not None
    assert result.summary.evaluation == expected.summary.evaluation
    assert result.summary.other_block_lengths == expected.summary.other_block_lengths


def test_token_causal_text_has_a_bound_and_a_likelihood(config: TrainConfig) -> None:
    """Validated by both, and its checkpoint says what it is; a step logs the loss of each term."""
    config = with_objective(config, ONE_FORWARD | {"normalizer": "targets"})
    summary = train(config).summary
    assert summary is not None
    model = load_model(config.run.directory)
    assert (model.config.logit_alignment, model.config.clean_alignment) == ("same_position", "shifted")
    tokenizer = load_tokenizer(config.run.directory)
    validator = Validator(config, tokenizer, open_components(config.data, "train"))
    rows = validator.rows[: config.validation.final_rows]
    tokens, targets, documents = (
        torch.from_numpy(np.stack([getattr(row, name) for row in rows]))
        for name in ("tokens_L", "loss_mask_L", "document_ids_L")
    )
    logits = model(tokens.long(), pattern=Causal(documents)).detach()
    logits[..., model.config.required_mask_token_id] = -math.inf
    nll = torch.nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), tokens[:, 1:].long().flatten(), reduction="none"
    )
    is_scored = (targets[:, 1:] & (documents[:, 1:] == documents[:, :-1])).flatten()
    assert summary.evaluation.next_token_nats_per_token == pytest.approx(float(nll[is_scored].mean()), rel=1e-4)
    assert summary.evaluation.nats_per_token != pytest.approx(float(nll[is_scored].mean()), rel=1e-4)
    assert len(summary.evaluation.draft_acceptance) == 3
    assert all(0.0 < rate <= 1.0 and 0.0 <= agreement <= 1.0 for rate, agreement in summary.evaluation.draft_acceptance)
    assert RunSummary.read(config.run.directory / "summary.json") == summary
    steps = [record for record in records(config) if "loss" in record]
    assert all(0.0 < record["mask_ratio"] <= 1.0 and record["loss_next_token"] > 0.0 for record in steps) and steps
    last = steps[-1]
    assert last["loss"] > 0.3 * last["loss_next_token"], "the loss has both terms"


@pytest.mark.slow
def test_a_model_of_several_block_lengths_is_judged_by_all(config: TrainConfig) -> None:
    config = with_objective(config, BLOCKS)
    result = train(config)
    summary = result.summary
    assert summary is not None
    assert summary.evaluation.block_length == 16
    assert [other.block_length for other in summary.other_block_lengths] == [1, 4]
    assert RunSummary.read(config.run.directory / "summary.json") == summary
    assert not summary.evaluation.fills
    text = render_text(format_summary(config.run.directory), StringIO())
    assert all(part in text for part in ("bound, blocks of 16", "blocks of 1\n", "blocks of 4\n", "% masked"))
    is_trained = summary.evaluation.nats_per_token < summary.evaluation.unigram_entropy
    assert ("train longer (training.max_steps)" in text) != is_trained
    model = load_model(config.run.directory)
    assert (model.config.block_length, model.config.logit_alignment) == (16, "same_position")
    # The table's numbers are what the library says of the saved model.
    tokenizer = load_tokenizer(config.run.directory)
    rows = Validator(config, tokenizer, open_components(config.data, "train")).rows[:8]
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


def test_next_token_from_a_tokenizer_without_mask_token(config: TrainConfig, tmp_path: Path) -> None:
    trained = train_bpe(["the cat sat on the mat"], vocab_size=262)
    special = {"<|endoftext|>": trained.special_tokens["<|endoftext|>"]}
    bare = Tokenizer(trained.vocab, trained.merges, special, "qwen", eos_token="<|endoftext|>")
    save_tokenizer(bare, tmp_path / "bare")
    config = with_objective(config, NEXT, tokenizer={"path": str(tmp_path / "bare")}, validation={"every_steps": 4})
    summary = train(config).summary
    assert summary is not None and summary.evaluation.block_length == 1
    text = render_text(format_summary(config.run.directory), StringIO())
    assert "loss, token by token" in text and "masked" not in text
    model = load_model(config.run.directory)
    assert model.config.is_autoregressive and model.config.mask_token_id is None
    assert len(generate(model, [[1, 2]], GenerationConfig(max_new_tokens=3, stop_token_ids=()))[0].token_ids) == 3
    aligned = {"logit_alignment": "same_position"}
    refused = with_objective(
        config, {"kind": "masked_diffusion"}, model=aligned, run={"directory": tmp_path / "refused"}
    )
    with pytest.raises(ValueError, match=r'no mask token, which objective\.kind = "masked_diffusion" needs'):
        train(refused)


@pytest.mark.parametrize(("objective", "is_reported"), [(NEXT, False), (WHOLE, True)])
def test_loss_without_bound_is_reported_once(
    objective: dict[str, Any], is_reported: bool, config: TrainConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    train(with_objective(config, objective, training={"max_steps": 1}))
    lines = [line for line in capsys.readouterr().err.splitlines() if "NELBO" in line]
    assert [line.partition(": ")[0] for line in lines] == [
        "the training loss is no estimate of the NELBO"
    ] * is_reported


def test_the_entropy_of_the_source_is_named_where_it_is_the_floor(config: TrainConfig, tmp_path: Path) -> None:
    def entropy(objective: dict[str, Any], source: dict[str, Any], **data: Any) -> float | None:
        changed = with_objective(config, objective, data={"rows": "padded", "source": source, **data})
        tokenizer = train_bpe(["abc"], vocab_size=258)
        return Validator(changed, tokenizer, open_components(changed.data, "train")).source_entropy

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


def test_other_products_than_bfloat16_are_refused(config: TrainConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    narrow = STATES["bfloat16 weights"]["runtime"]
    with pytest.raises(ValueError, match=r'training\.precision = "float32": set runtime\.weights = "float32"'):
        change_config(config, runtime=narrow, training={"precision": "float32"})
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    with pytest.raises(ValueError, match=r'training\.precision = "auto" is float32 on this processor'):
        build_changed_run(config, config.run.directory, runtime=narrow, training={"precision": "auto"})
