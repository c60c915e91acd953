"""Groups are complete, a restored optimizer goes on bit for bit, and the learning rate's factor."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from config.training.optimizer import (
    AdamWConfig,
    LionConfig,
    LRScheduleConfig,
    MuonConfig,
    OptimizerConfig,
    ParameterGroup,
)
from diffusionlm.models.patterns import Bidirectional
from diffusionlm.models.transformer import Transformer
from diffusionlm.optim.build import Optimizers, build_optimizers, requires_whole_matrix
from diffusionlm.optim.lr_schedule import lr_factor
from tests.conftest import MakeModel

CONFIGS: list[Any] = [
    AdamWConfig(weight_decay=0.3),
    LionConfig(weight_decay=0.3),
    MuonConfig(weight_decay=0.2, rest=AdamWConfig(weight_decay=0.1)),
]
EVERY_KIND = CONFIGS + [kind() for kind in get_args(get_args(OptimizerConfig)[0]) if kind not in map(type, CONFIGS)]
MIXTURE = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8}


def named(model: Transformer) -> dict[str, nn.Parameter]:
    return dict(model.named_parameters())


def train(model: Transformer, optimizers: Optimizers, steps: range) -> None:
    for step in steps:
        tokens = torch.randint(0, 19, (2, 7), generator=torch.Generator().manual_seed(step))
        model(tokens, pattern=Bidirectional()).pow(2).mean().backward()
        optimizers.step(1.0 / (1 + step))


def settings_of(optimizers: Optimizers) -> dict[str, dict[str, Any]]:
    """Torch's settings by name of parameter."""
    options: dict[str, dict[str, Any]] = {}
    for optimizer in optimizers.optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                assert optimizers.names[parameter] not in options
                options[optimizers.names[parameter]] = group
    return options


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c.kind)
@pytest.mark.parametrize("tied", [True, False])
def test_every_parameter_is_in_one_group(
    config: AdamWConfig | LionConfig | MuonConfig, tied: bool, tiny_model: MakeModel
) -> None:
    model = tiny_model(tie_word_embeddings=tied, attention_bias=True, **MIXTURE)
    frozen = "model.layers.0.mlp.experts.1.up_proj.weight"
    model.get_parameter(frozen).requires_grad_(False)
    optimizers = build_optimizers(config, named(model))
    options = settings_of(optimizers)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert options.keys() == trained and frozen not in options
    is_muon = isinstance(config, MuonConfig)
    for name, settings in options.items():
        if name.endswith(("norm.weight", ".bias")):
            expected = ("scalar", 0.0)
        elif name in ("model.embed_tokens.weight", "lm_head.weight"):
            expected = ("head" if "head" in name else "embed", 0.1 if is_muon else 0.0)
        elif name.endswith("mlp.gate.weight"):
            expected = ("router", 0.1 if is_muon else 0.3)
        else:
            expected = ("hidden", 0.2 if is_muon else 0.3)
        assert (settings["name"], settings["weight_decay"]) == expected, name
    assert optimizers.learning_rates().keys() == {"hidden", "embed", "router", "scalar"} | (set() if tied else {"head"})


def test_groups_may_differ_from_the_rest(tiny_model: MakeModel) -> None:
    config = MuonConfig(
        learning_rate=0.3,
        momentum=0.75,
        precision="float32",
        rest=AdamWConfig(learning_rate=0.01, betas=(0.5, 0.75), eps=1e-3, weight_decay=0.25),
        head=ParameterGroup(learning_rate=0.02),
        router=ParameterGroup(weight_decay=0.0),
        scalar=ParameterGroup(weight_decay=0.125),
    )
    optimizers = build_optimizers(config, named(tiny_model(tie_word_embeddings=False, **MIXTURE)))
    groups = {group["name"]: group for optimizer in optimizers.optimizers for group in optimizer.param_groups}
    hidden = groups.pop("hidden")
    keys = ("lr", "momentum", "weight_decay", "dtype")
    assert tuple(hidden[key] for key in keys) == (0.3, 0.75, 0.1, torch.float32)
    options = {
        name: tuple(group[key] for key in ("lr", "betas", "eps", "weight_decay")) for name, group in groups.items()
    }
    assert options == {
        "head": (0.02, (0.5, 0.75), 1e-3, 0.25),
        "embed": (0.01, (0.5, 0.75), 1e-3, 0.25),
        "router": (0.01, (0.5, 0.75), 1e-3, 0.0),
        "scalar": (0.01, (0.5, 0.75), 1e-3, 0.125),
    }
    optimizers.step(0.5)
    assert optimizers.learning_rates() == {
        "hidden": 0.15,
        "head": 0.01,
        "embed": 0.005,
        "router": 0.005,
        "scalar": 0.005,
    }


def test_groups_of_one_kind_may_differ(tiny_model: MakeModel) -> None:
    config = LionConfig(learning_rate=0.5, embed=ParameterGroup(learning_rate=0.25, weight_decay=0.75))
    [optimizer] = build_optimizers(config, named(tiny_model())).optimizers
    options = {group["name"]: (group["lr"], group["betas"], group["weight_decay"]) for group in optimizer.param_groups}
    rest = (0.5, (0.9, 0.99))
    assert options == {"hidden": (*rest, 1.0), "embed": (0.25, (0.9, 0.99), 0.75), "scalar": (*rest, 0.0)}


@pytest.mark.parametrize("config", EVERY_KIND, ids=lambda c: c.kind)
def test_frozen_parameters_need_no_optimizer(
    config: AdamWConfig | LionConfig | MuonConfig, tiny_model: MakeModel
) -> None:
    model = tiny_model(tie_word_embeddings=False)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name == "lm_head.weight")
    assert build_optimizers(config, named(model)).learning_rates().keys() == {"head"}


@pytest.mark.parametrize("config", EVERY_KIND, ids=lambda c: c.kind)
def test_restored_optimizer_continues_bit_equal(
    config: AdamWConfig | LionConfig | MuonConfig, tiny_model: MakeModel, tmp_path: Path
) -> None:
    model = tiny_model()
    optimizers = build_optimizers(config, named(model))
    train(model, optimizers, range(4))
    save_file(optimizers.state_dict(), tmp_path / "o.safetensors")
    weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    train(model, optimizers, range(4, 8))

    again = tiny_model(seed=5)
    with torch.no_grad():
        for name, parameter in again.named_parameters():
            parameter.copy_(weights[name])
    restored = build_optimizers(config, named(again))
    restored.load_state_dict(load_file(tmp_path / "o.safetensors"))
    train(again, restored, range(4, 8))
    for (name, one), other in zip(model.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(one, other), name
        assert not torch.equal(one, weights[name]), f"{name} was not trained"


@pytest.mark.parametrize("config", EVERY_KIND, ids=lambda c: c.kind)
def test_resume_keeps_the_loaded_state(config: AdamWConfig | LionConfig | MuonConfig, tiny_model: MakeModel) -> None:
    model = tiny_model()
    optimizers = build_optimizers(config, named(model))
    train(model, optimizers, range(2))
    state = {name: value.clone() for name, value in optimizers.state_dict().items()}
    copies = {name: value.clone() for name, value in state.items()}
    optimizers.load_state_dict(state)
    train(model, optimizers, range(2, 4))
    assert all(torch.equal(state[name], copies[name]) for name in copies)
    assert any(not torch.equal(value, copies[name]) for name, value in optimizers.state_dict().items())


def test_state_of_another_kind_is_refused_in_few_words(tiny_model: MakeModel) -> None:
    model = tiny_model()
    optimizers = build_optimizers(AdamWConfig(), named(model))
    train(model, optimizers, range(1))
    with pytest.raises(ValueError, match="does not fit the model") as caught:
        build_optimizers(MuonConfig(), named(tiny_model())).load_state_dict(optimizers.state_dict())
    text = str(caught.value)
    assert "missing model.layers.0.mlp.down_proj.weight.momentum_buffer; " in text and "and 10 more; unexpected" in text
    assert text.endswith("another optimizer.kind") and len(text) < 700


def changed(state: dict[str, torch.Tensor], change: str) -> dict[str, torch.Tensor]:
    name = next(key for key in state if key.endswith("exp_avg"))
    if change == "unknown":
        return {**state, "model.layers.9.mlp.up_proj.weight.exp_avg": torch.zeros(1)}
    if change == "missing":
        return {key: value for key, value in state.items() if key != name}
    return {**state, name: torch.zeros(3)}


@pytest.mark.parametrize("change", ["unknown", "missing", "misshapen"])
def test_state_that_does_not_fit_is_refused(change: str, tiny_model: MakeModel) -> None:
    """A parameter whose moments are lost starts anew without a word; one of another shape fails much later."""
    model = tiny_model()
    optimizers = build_optimizers(CONFIGS[0], named(model))
    train(model, optimizers, range(1))
    with pytest.raises(ValueError, match="exp_avg"):
        build_optimizers(CONFIGS[0], named(tiny_model())).load_state_dict(changed(optimizers.state_dict(), change))


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c.kind)
def test_factor_scales_the_full_rate_each_time(
    config: AdamWConfig | LionConfig | MuonConfig, tiny_model: MakeModel
) -> None:
    optimizers = build_optimizers(config, named(tiny_model()))
    full = optimizers.learning_rates()
    for factor in (0.5, 0.1, 1.0):
        optimizers.step(factor)
        assert optimizers.learning_rates() == pytest.approx({name: rate * factor for name, rate in full.items()})


@pytest.mark.parametrize("config", CONFIGS[:2], ids=lambda c: c.kind)
def test_rows_are_updated_as_in_the_whole(config: AdamWConfig | LionConfig, tiny_model: MakeModel) -> None:
    """Number by number: optimizers over two parts of every parameter do, and restore, what one over the whole does."""
    models = tiny_model(), tiny_model()
    whole = build_optimizers(config, named(models[0]))
    halves = [
        {name: nn.Parameter(parameter.detach()[rows]) for name, parameter in models[1].named_parameters()}
        for rows in (slice(5), slice(5, None))
    ]
    assert all(not requires_whole_matrix(config, *item) for item in named(models[0]).items())
    optimizers = [build_optimizers(config, half) for half in halves]
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        for name, parameter in models[0].named_parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
            halves[0][name].grad, halves[1][name].grad = parameter.grad[:5].clone(), parameter.grad[5:].clone()
        for every in (whole, *optimizers):
            every.step(1.0)
        if step == 1:
            states = [optimizer.state_dict() for optimizer in optimizers]
            optimizers = [build_optimizers(config, half) for half in halves]
            for restored, state in zip(optimizers, states, strict=True):
                restored.load_state_dict(state)
    for name, parameter in models[0].named_parameters():
        assert torch.equal(torch.cat([half[name].detach() for half in halves]), parameter), name
    with pytest.raises(ValueError, match=r"exp_avg has shape \[5, 24\], the parameter \[14, 24\]"):
        optimizers[1].load_state_dict(states[0])


def test_parameters_that_require_whole_matrices(tiny_model: MakeModel) -> None:
    parameters = named(tiny_model(tie_word_embeddings=False, **MIXTURE))

    def whole(config: AdamWConfig | LionConfig | MuonConfig) -> set[str]:
        return {name for name, parameter in parameters.items() if requires_whole_matrix(config, name, parameter)}

    wide = {name for name in parameters if "norm" in name} | {"model.embed_tokens.weight"}
    apart = {name for name in parameters if name.endswith("mlp.gate.weight")} | {"lm_head.weight"}
    assert whole(MuonConfig()) == parameters.keys() - wide - apart
    assert whole(AdamWConfig(kind="adamw8bit")) == whole(LionConfig(kind="lion8bit")) == parameters.keys() - wide
    assert whole(MuonConfig(rest=AdamWConfig(kind="adamw8bit"))) == parameters.keys() - wide


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (LRScheduleConfig(kind="constant", warmup_steps=0), {0: 1.0, 5: 1.0, 9: 1.0}),
        (LRScheduleConfig(kind="linear", warmup_steps=0), {0: 1.0, 5: 0.5, 9: 0.1}),
        (LRScheduleConfig(kind="linear", warmup_steps=0, final_factor=0.2), {0: 1.0, 5: 0.6, 9: 0.28}),
        (LRScheduleConfig(kind="cosine", warmup_steps=0), {0: 1.0, 5: 0.5, 9: 0.0244717}),
        (LRScheduleConfig(kind="linear", warmup_steps=4), {0: 0.2, 1: 0.4, 3: 0.8, 4: 1.0, 7: 0.5, 9: 1 / 6}),
        (LRScheduleConfig(kind="constant", warmup_fraction=0.4), {0: 0.2, 3: 0.8, 4: 1.0, 9: 1.0}),
        (LRScheduleConfig(kind="cosine", warmup_steps=4, final_factor=0.5), {3: 0.8, 4: 1.0, 7: 0.75}),
        (
            LRScheduleConfig(kind="warmup_stable_decay", warmup_steps=2, decay_fraction=0.4),
            {0: 1 / 3, 1: 2 / 3, 2: 1.0, 5: 1.0, 6: 1.0, 7: 0.75, 8: 0.5, 9: 0.25, 10: 0.0},
        ),
        (
            LRScheduleConfig(kind="warmup_stable_decay", warmup_fraction=0.1, decay_fraction=0.4, decay_shape="sqrt"),
            {0: 0.5, 1: 1.0, 6: 1.0, 7: 0.5, 8: 1 - 0.5**0.5, 9: 1 - 0.75**0.5, 10: 0.0},
        ),
        (
            LRScheduleConfig(
                kind="warmup_stable_decay", warmup_steps=0, decay_fraction=0.4, decay_shape="cosine", final_factor=0.2
            ),
            {0: 1.0, 6: 1.0, 7: 0.2 + 0.4 * (1 + 0.5**0.5), 8: 0.6, 9: 0.2 + 0.4 * (1 - 0.5**0.5), 10: 0.2},
        ),
        (LRScheduleConfig(kind="warmup_stable_decay", warmup_steps=0), {0: 1.0, 8: 1.0, 9: 0.5, 10: 0.0}),
        (LRScheduleConfig(kind="warmup_stable_decay", warmup_steps=9, decay_fraction=0.1), {8: 0.9, 9: 1.0, 10: 0.0}),
    ],
    ids=str,
)
def test_values(schedule: LRScheduleConfig, expected: dict[int, float]) -> None:
    assert {step: lr_factor(schedule, step, 10) for step in expected} == pytest.approx(expected, abs=1e-6)


def test_single_step_run() -> None:
    assert 0 < lr_factor(LRScheduleConfig(), 0, 1) <= 1


def test_a_run_too_short_for_its_schedule_is_refused() -> None:
    """Where epochs give the length of a run, the config alone does not know it."""
    schedule = LRScheduleConfig(kind="warmup_stable_decay", warmup_steps=6, decay_fraction=0.5)
    assert lr_factor(schedule, 6, 12) == 1.0
    with pytest.raises(ValueError, match=r"schedule\.warmup_steps"):
        lr_factor(schedule, 0, 10)
