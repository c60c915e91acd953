"""Losses and gradients of texts with images: plain autograd, other images, frozen towers, stored features."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from config.model import VisionPart
from config.training.objective import BlockDiffusionConfig, MaskedDiffusionConfig, NextTokenConfig
from config.training.optimizer import AdamWConfig, MuonConfig
from diffusionlm.diffusion.layout import InputLayout, target_positions
from diffusionlm.diffusion.noised_batch import CleanBatch, NoisedBatch, NoiseKey
from diffusionlm.diffusion.objectives import Objective, build_objective
from diffusionlm.evaluation.nelbo import NelboEstimator
from diffusionlm.kernels.loss_types import LossOutput
from diffusionlm.models.transformer import Transformer
from diffusionlm.optim.build import build_optimizers
from diffusionlm.optim.ema import WeightAverage
from diffusionlm.training.skipped_batches import SkippedBatches, load_skipped_step
from diffusionlm.vision.batches import build_image_inputs
from diffusionlm.vision.features import FeatureStore
from diffusionlm.vision.images import PlacedImage
from tests.image_rows import (
    SMALL,
    Turn,
    build_batch,
    build_example,
    compute_patches,
    make_image,
    make_model,
    swap_image,
)

KEY = NoiseKey(seed=3, step=1, first_sequence=0, num_sequences_in_step=8)
OBJECTIVES: dict[str, Any] = {
    "masked": MaskedDiffusionConfig(),
    "block": BlockDiffusionConfig(block_length=3),
    "next token": NextTokenConfig(),
}
TOWER = "model.visual."


def build(name: str) -> Objective:
    alignment = "shifted" if name == "next token" else "same_position"
    return build_objective(OBJECTIVES[name], SMALL.model_copy(update={"logit_alignment": alignment}))


def run_forward(model: Transformer, objective: Objective, noised: NoisedBatch) -> LossOutput:
    """The forward of a step with this micro-batch alone."""
    return model(
        noised.inputs_BS,
        pattern=noised.pattern,
        images=noised.images,
        output_positions=noised.positions_N,
        loss_inputs=objective.build_loss_inputs(noised, noised.denominator),
    )


def take_gradients(model: Transformer) -> dict[str, Tensor]:
    gradients = {name: value.grad for name, value in model.named_parameters() if value.grad is not None}
    model.zero_grad(set_to_none=True)
    return gradients


@pytest.mark.parametrize("name", OBJECTIVES)
def test_gradients_are_those_of_plain_autograd(name: str) -> None:
    objective, model = build(name), make_model()
    noised = objective.build_noised_batch(build_example(), KEY)
    output = run_forward(model, objective, noised)
    output.total_loss.backward()
    gradients = take_gradients(model)
    logits_BSV = model(noised.inputs_BS, pattern=noised.pattern, images=noised.images)
    logits_NV = logits_BSV.flatten(0, 1)[noised.positions_N]
    excluded = torch.zeros_like(logits_NV).index_fill(1, torch.tensor([SMALL.required_mask_token_id]), -torch.inf)
    costs_N = F.cross_entropy(logits_NV + excluded, noised.targets_N, reduction="none")
    loss = (noised.weights_N * costs_N).sum() / noised.denominator
    loss.backward()
    torch.testing.assert_close(output.total_loss.double(), loss, rtol=1e-5, atol=0.0)
    expected = take_gradients(model)
    assert gradients.keys() == expected.keys() == {name for name, _ in model.named_parameters()}
    for parameter, gradient in gradients.items():
        scale = float(expected[parameter].abs().max())
        assert scale > 0.0, parameter
        torch.testing.assert_close(gradient, expected[parameter], rtol=1e-4, atol=1e-5 * scale, msg=parameter)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_an_image_changes_the_losses_of_its_own_document_alone(name: str) -> None:
    """The first image is in the first documents of rows 0 and 2; a neighbor in the row does not see it."""
    objective, model, batch = build(name), make_model(), build_example()
    noised = objective.build_noised_batch(batch, KEY)
    assert noised.images is not None
    swapped = replace(noised, images=swap_image(noised.images, 1, 9))
    with torch.no_grad():
        changes_N = run_forward(model, objective, noised).nll_N - run_forward(model, objective, swapped).nll_N
    assert batch.document_BL is not None
    targets_N = target_positions(noised, "shifted" if name == "next token" else "same_position")
    rows_N, documents_N = targets_N // batch.tokens_BL.shape[1], batch.document_BL.flatten()[targets_N]
    is_own_N = (documents_N == 0) & ((rows_N == 0) | (rows_N == 2))
    assert is_own_N.any() and (~is_own_N).any()
    assert (changes_N[is_own_N].abs() > 1e-4).all()
    assert (changes_N[~is_own_N] == 0.0).all()


def test_a_neighbor_of_another_size_changes_nothing_but_rounding() -> None:
    """Positions after a larger image are later, and attention depends on their differences."""
    objective, model = build("masked"), make_model()
    losses = []
    for grid in ((1, 1), (3, 4)):
        batch = build_batch([[Turn((5, 6), (), make_image(1, grid)), Turn((7, 8), (20, 21, 22), make_image(2))]])
        losses.append(run_forward(model, objective, objective.build_noised_batch(batch, KEY)).nll_N)
    torch.testing.assert_close(*losses, rtol=1e-5, atol=1e-5)


def test_a_trained_tower_has_gradients_without_images() -> None:
    """So that a step has the same gradients, whatever micro-batch the images are in; those without add zeros."""
    objective, model, batch = build("masked"), make_model(), build_example()
    text_row = objective.build_noised_batch(batch.select(slice(3, 4)), KEY)
    assert text_row.images is None
    output = run_forward(model, objective, text_row)
    output.total_loss.backward()
    gradients = take_gradients(model)
    assert gradients.keys() == {name for name, _ in model.named_parameters()}
    assert all(not gradient.any() for name, gradient in gradients.items() if name.startswith(TOWER))
    assert all(gradient.any() for name, gradient in gradients.items() if not name.startswith(TOWER))
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    with torch.no_grad():
        assert torch.equal(run_forward(model, objective, text_row).nll_N, output.nll_N)


def test_validation_reads_the_images() -> None:
    """Only the rows that have the changed image get another bound, in whatever batches."""
    model, batch = make_model(), build_example()
    assert batch.images is not None
    swapped = replace(batch, images=swap_image(batch.images, 1, 9))
    layout = InputLayout.from_config(SMALL, 3)
    bounds = []
    for own, batch_size in ((batch, 4), (batch, 1), (swapped, 3)):
        estimator = NelboEstimator(layout, own, 2, 0, batch_size)
        report = estimator.build_report([estimator.run_forward(model, i) for i in range(estimator.num_forwards)])
        bounds.append(torch.tensor(report.row_nats))
    torch.testing.assert_close(bounds[0], bounds[1], rtol=1e-5, atol=0.0)
    is_changed = ((bounds[2] - bounds[0]).abs() > 1e-4 * bounds[0]).tolist()
    assert is_changed == [True, False, True, False]


def test_records_of_skipped_steps_have_the_images(tmp_path: Path) -> None:
    noised = build("block").build_noised_batch(build_example(), KEY)
    records = SkippedBatches(tmp_path, str, seed=0)
    records.hold(1, [noised], None)
    metrics: Any = SimpleNamespace(step=1, is_finite=True, loss=1.0, grad_norm=1.0)
    records.record(metrics)
    _, (loaded,) = load_skipped_step(tmp_path / "step-00000001-rank-0.json")
    assert noised.images is not None and loaded.images is not None and loaded.images.grids == noised.images.grids
    torch.testing.assert_close(loaded.images.patches_PC, noised.images.patches_PC, rtol=0.0, atol=0.0)


@pytest.mark.parametrize(
    ("parts", "frozen"),
    [
        (("vision",), ("patch_embed.", "pos_embed.", "blocks.")),
        (("merger",), ("merger.", "deepstack_merger_list.")),
        (("vision", "merger"), ("",)),
    ],
    ids=lambda value: "+".join(value),
)
@pytest.mark.parametrize("optimizer", [AdamWConfig(), MuonConfig()], ids=lambda config: config.kind)
def test_frozen_parts_do_not_change(parts: tuple[VisionPart, ...], frozen: tuple[str, ...], optimizer: Any) -> None:
    objective, model = build("masked"), make_model()
    assert model.model.visual is not None
    model.model.visual.freeze(parts)
    prefixes = tuple(f"{TOWER}{name}" for name in frozen)
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    optimizers, average = build_optimizers(optimizer, dict(model.named_parameters())), WeightAverage(model, 0.5)
    output = run_forward(model, objective, objective.build_noised_batch(build_example(), KEY))
    output.total_loss.backward()
    assert all((value.grad is None) == name.startswith(prefixes) for name, value in model.named_parameters())
    optimizers.step(1.0)
    average.update()
    changed = {name for name, value in model.named_parameters() if not torch.equal(value, before[name])}
    trained = {name for name in before if not name.startswith(prefixes)}
    assert changed == trained == set(average.averages)
    assert {name.rpartition(".")[0] for name in optimizers.state_dict()} == trained


@pytest.mark.parametrize("optimizer", [AdamWConfig(), MuonConfig()], ids=lambda config: config.kind)
def test_groups_of_a_tower(optimizer: Any) -> None:
    """Its matrices are hidden ones, its tables embeddings, its norms and biases scalars."""
    model = make_model()
    optimizers = build_optimizers(optimizer, dict(model.named_parameters()))
    groups = {
        optimizers.names[parameter]: group["name"]
        for own in optimizers.optimizers
        for group in own.param_groups
        for parameter in group["params"]
    }
    tower = {name.removeprefix(TOWER): group for name, group in groups.items() if name.startswith(TOWER)}
    assert {name for name, group in tower.items() if group == "embed"} == {
        "patch_embed.proj.weight",
        "pos_embed.weight",
    }
    hidden = {name for name, group in tower.items() if group == "hidden"}
    assert {
        "blocks.0.attn.qkv.weight",
        "merger.linear_fc1.weight",
        "deepstack_merger_list.1.linear_fc2.weight",
    } <= hidden
    assert len(hidden) == 3 * 4 + 3 * 2
    assert {group for name, group in tower.items() if "norm" in name or "bias" in name} == {"scalar"}


def with_features(batch: CleanBatch, store: FeatureStore) -> CleanBatch:
    """The batch as a loader with this store builds it."""
    first, second, third = make_image(1), make_image(2, (1, 3)), make_image(3, (3, 1))
    rows = [[PlacedImage(2, first), PlacedImage(14, second)], [PlacedImage(7, third)], [PlacedImage(2, first)], []]
    return replace(batch, images=build_image_inputs(rows, batch.tokens_BL.shape[1], compute_patches, store.read))


def test_stored_features_give_the_same_losses(tmp_path: Path) -> None:
    """Of all images, and of some beside new ones, which are stored as well."""
    objective, model, batch = build("block"), make_model(), build_example()
    assert model.model.visual is not None
    model.model.visual.freeze(("vision", "merger"))
    store = FeatureStore.open(tmp_path, "tower", torch.float32)
    model.store_features = store.write
    losses, num_stored = [], []

    def score(batch: CleanBatch) -> None:
        noised = objective.build_noised_batch(batch, KEY)
        assert noised.images is not None
        num_stored.append(noised.images.num_stored)
        losses.append(run_forward(model, objective, noised).nll_N)

    new = with_features(batch, store)
    score(new)
    paths = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(paths) == 3
    complete = with_features(batch, store)
    assert complete.images is not None and complete.images.patches_PC is None
    score(complete)
    paths[0].write_bytes(paths[0].read_bytes()[:-1])
    mixed = with_features(batch, store)
    assert not paths[0].exists() and mixed.images is not None and mixed.images.features_EFD is not None
    score(mixed)
    assert num_stored == [0, 3, 2] and paths[0].exists()
    assert torch.equal(losses[0], losses[1])
    torch.testing.assert_close(losses[0], losses[2], rtol=1e-6, atol=1e-6)
    for rows in (slice(0, 1), slice(1, 2), slice(2, 4)):
        expected, actual = new.select(rows), mixed.select(rows)
        nll = [
            run_forward(model, objective, objective.build_noised_batch(own, KEY)).nll_N for own in (expected, actual)
        ]
        torch.testing.assert_close(*nll, rtol=1e-6, atol=1e-6)


def test_stores_are_of_one_tower_and_dtype(tmp_path: Path) -> None:
    image, features_EFD = make_image(1), torch.randn(3, 4, 32)
    images = build_image_inputs([[PlacedImage(0, image)]], 8, compute_patches)
    assert images is not None
    narrow = FeatureStore.open(tmp_path, "tower", torch.bfloat16)
    narrow.write(images, features_EFD)
    stored_EFD = narrow.read(image)
    assert stored_EFD is not None and torch.equal(stored_EFD, features_EFD.bfloat16())
    assert FeatureStore.open(tmp_path, "tower", torch.float32).read(image) is None
    assert FeatureStore.open(tmp_path, "another tower", torch.bfloat16).read(image) is None
    assert narrow.read(make_image(2)) is None
    assert not list(tmp_path.rglob("*.tmp-*"))
