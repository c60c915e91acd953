"""Runs on conversations with images: steps, resuming, frozen towers, stored features, adapters, preferences."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from config.load import ConfigError
from config.train import TrainConfig
from diffusionlm.checkpoints.huggingface import load_model
from diffusionlm.models.lora import adapter_modules
from diffusionlm.models.transformer import Transformer
from diffusionlm.models.vision.inputs import ImageInputs
from diffusionlm.training import loop
from diffusionlm.vision import processor
from diffusionlm.vision.image_files import decode_image
from diffusionlm.vision.processor import ImageProcessor, load_processor, save_processor
from tests.image_run import IMAGE, NUM_IMAGES, configure_images, write_conversations
from tests.tiny_run import change_config, failing_at, make_first_step, read_losses

FROZEN: dict[str, Any] = {"freeze": ["vision", "merger"]}
WEIGHTS = "checkpoints/latest/model.safetensors"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path) -> Path:
    write_conversations(tmp_path)
    return tmp_path


@pytest.fixture(autouse=True)
def _checked_forwards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every forward, also of validation, has the images of its tokens."""
    forward = Transformer.forward

    def check(self: Transformer, tokens_BL: torch.Tensor, *, images: ImageInputs | None = None, **options: Any) -> Any:
        expected_M = tokens_BL.flatten().eq(IMAGE).nonzero()[:, 0]
        assert torch.equal(expected_M, expected_M[:0] if images is None else images.indices_M)
        return forward(self, tokens_BL, images=images, **options)

    monkeypatch.setattr(Transformer, "forward", check)


def read_weights(config: TrainConfig) -> dict[str, torch.Tensor]:
    return load_file(config.run.directory / WEIGHTS)


def read_base(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "base" / "model.safetensors")


def test_a_step_is_that_of_plain_autograd(folder: Path) -> None:
    """Four micro-batches, of which some have no image: loss and gradients of the whole step."""
    metrics, gradients, noised_batches, run = make_first_step(configure_images(folder, "run"))
    assert len(noised_batches) == 4 and any(noised.images is not None for noised in noised_batches)
    model, denominator = run.state.model, sum(noised.denominator for noised in noised_batches)
    loss = torch.zeros((), dtype=torch.float64)
    for noised in noised_batches:
        logits_BSV = model(noised.inputs_BS, pattern=noised.pattern, images=noised.images)
        logits_NV = logits_BSV.flatten(0, 1)[noised.positions_N]
        logits_NV = logits_NV.index_fill(1, torch.tensor([model.config.required_mask_token_id]), -torch.inf)
        costs_N = F.cross_entropy(logits_NV, noised.targets_N, reduction="none")
        loss = loss + (noised.weights_N * costs_N).sum() / denominator
    loss.backward()
    assert metrics.loss == pytest.approx(loss.item(), rel=1e-5)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), run.settings.max_grad_norm)
    assert metrics.grad_norm == pytest.approx(float(norm), rel=1e-4)
    assert gradients.keys() == {name for name, _ in model.named_parameters()}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.any()
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-3, atol=1e-6, msg=name)


@pytest.mark.parametrize(
    "objective",
    [
        {"kind": "masked_diffusion", "next_token_weight": 0.5},
        {"kind": "block_diffusion", "block_length": 4},
        {"kind": "preference", "num_draws": 2},
        {"kind": "preference", "num_draws": 2, "loss": "simpo", "block_length": 2},
    ],
    ids=lambda objective: "-".join(map(str, objective.values())),
)
def test_objectives_with_stored_features(objective: dict[str, Any], folder: Path) -> None:
    """The losses of the run that stores the features, of one that reads them, and of one without."""
    images = {"cache_features": str(folder / "features")}
    losses = []
    for name, data in (("plain", {}), ("first", {"images": images}), ("second", {"images": images})):
        config = configure_images(folder, name, objective=objective, training=FROZEN, data=data)
        loop.train(config)
        losses.append(read_losses(config))
    assert losses[1] == pytest.approx(losses[0], rel=1e-5) and losses[2] == pytest.approx(losses[0], rel=1e-5)


@pytest.mark.parametrize("freeze", [[], ["vision"]], ids=str)
def test_a_resumed_run_is_the_same(freeze: list[str], folder: Path) -> None:
    """Bit by bit, with averages of the trained weights."""
    sections: dict[str, Any] = {"training": {"freeze": freeze, "ema_decay": 0.5}}
    whole, parts = (configure_images(folder, name, **sections) for name in ("whole", "parts"))
    loop.train(whole)
    with failing_at(4):
        loop.train(parts)
    loop.train(parts)
    assert read_losses(parts)[-3:] == read_losses(whole)[-3:]
    expected, actual, base = read_weights(whole), read_weights(parts), read_base(folder)
    assert expected.keys() == actual.keys() == base.keys()
    is_frozen = dict.fromkeys(expected, False)
    for name in expected:
        is_frozen[name] = bool(freeze) and ".visual." in name and "merger" not in name
        assert torch.equal(actual[name], expected[name]), name
        assert torch.equal(actual[name], base[name]) == is_frozen[name], name
    assert any(is_frozen.values()) == bool(freeze)
    load_model(parts.run.directory / "checkpoints/latest")


def test_frozen_weights_of_another_model_are_refused(folder: Path) -> None:
    config = configure_images(folder, "run", training=FROZEN | {"max_steps": 3})
    loop.train(config)
    weights = read_base(folder)
    name = next(name for name in weights if name.endswith("merger.norm.bias"))
    save_file(weights | {name: weights[name] + 1.0}, folder / "base" / "model.safetensors")
    (folder / "base" / "manifest.json").unlink(missing_ok=True)
    with pytest.raises(ValueError, match=r"merger.norm.bias, which is not trained, differs between model.init_from"):
        loop.train(config)


def test_another_image_processor_is_refused(folder: Path) -> None:
    config = configure_images(folder, "run", training={"max_steps": 2})
    loop.train(config)
    options = load_processor(folder / "base").config
    save_processor(ImageProcessor(options.model_copy(update={"image_mean": (0.4, 0.5, 0.5)})), folder / "base")
    with pytest.raises(ValueError, match=r"preprocessor_config\.json of model\.init_from"):
        loop.train(config)


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_stored_features(workers: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The losses are those without. Images are computed in the first steps of the first run, and decoded in none after
    the first epoch."""
    computed: list[bytes] = []
    compute_patches = ImageProcessor.compute_patches
    num_decoded = [0]

    def count_decoded(file: bytes) -> Any:
        num_decoded[-1] += 1
        return decode_image(file)

    def count(self: ImageProcessor, image: Any) -> Any:
        computed.append(image.digest)
        return compute_patches(self, image)

    monkeypatch.setattr(ImageProcessor, "compute_patches", count)
    monkeypatch.setattr(processor, "decode_image", count_decoded)
    # Features of other batches round otherwise, and Adam without this would divide by gradients of that size.
    sections: dict[str, Any] = {"training": FROZEN, "optimizer": {"kind": "adamw", "eps": 1e-5}}
    plain = configure_images(folder, "plain", **sections)
    loop.train(plain)
    num_reads = [len(computed)]
    images = {"cache_features": str(folder / "features")}
    for name in ("first", "second"):
        num_decoded.append(0)
        config = configure_images(folder, name, **sections, data={"images": images, "workers": workers})
        loop.train(config)
        assert read_losses(config) == pytest.approx(read_losses(plain), rel=1e-6)
        torch.testing.assert_close(read_weights(config), read_weights(plain), rtol=1e-5, atol=1e-6)
        (store,) = (folder / "features").iterdir()
        assert len([path for path in store.rglob("*") if path.is_file()]) == NUM_IMAGES
        num_reads.append(len(computed) - sum(num_reads))
    if workers == 0:  # workers count in their processes
        assert NUM_IMAGES <= num_reads[1] < num_reads[0] and num_reads[2] == 0
        assert num_decoded[1:] == [NUM_IMAGES + num_reads[1], NUM_IMAGES]
    other = change_config(config, folder / "other", run={"seed": 1}, training={"max_steps": 1, "precision": "bfloat16"})
    loop.train(other)
    assert len(list((folder / "features").iterdir())) == 2


def test_features_are_of_the_weights_of_the_tower(folder: Path) -> None:
    images = {"cache_features": str(folder / "features")}
    for name, num_stores in (("model.language_model.norm.weight", 1), ("model.visual.pos_embed.weight", 2)):
        loop.train(configure_images(folder, name, training=FROZEN | {"max_steps": 1}, data={"images": images}))
        weights = read_base(folder)
        save_file(weights | {name: weights[name] + 1.0}, folder / "base" / "model.safetensors")
        (folder / "base" / "manifest.json").unlink(missing_ok=True)
        loop.train(
            configure_images(folder, f"{name}, changed", training=FROZEN | {"max_steps": 1}, data={"images": images})
        )
        assert len(list((folder / "features").iterdir())) == num_stores


def test_features_of_a_trained_tower_are_not_stored(folder: Path) -> None:
    images = {"cache_features": str(folder / "features")}
    for changes in ({}, {"training": {"freeze": ["vision"]}}, {"lora": {"modules_to_save": ["merger"]}}):
        with pytest.raises(ConfigError, match="needs a vision tower that stays as it is"):
            configure_images(folder, "run", data={"images": images}, **changes)


def test_an_adapter_is_on_the_text_alone(folder: Path) -> None:
    """The tower is frozen with the rest of the base, so its features may be stored."""
    images = {"cache_features": str(folder / "features")}
    config = configure_images(folder, "run", lora={"rank": 2}, data={"images": images})
    loop.train(config)
    assert (folder / "features").exists()
    adapter = load_file(config.run.directory / "checkpoints/latest/adapter_model.safetensors")
    assert adapter and not any("visual" in name for name in adapter)
    described = json.loads((config.run.directory / "checkpoints/latest/adapter_config.json").read_text())
    assert {*described["target_modules"]} == {
        "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"
    }  # fmt: skip
    model = load_model(folder / "base", adapter=config.run.directory / "checkpoints/latest")
    assert all(name.startswith("model.layers.") for name, _ in adapter_modules(model))


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"training": {"freeze": ["vision", "vision"]}}, "'vision' is given twice"),
        ({"training": {"freeze": ["tower"]}}, "freeze"),
        ({"parallel": {"strategy": "ddp", "context": 2}}, "reads images into whole sequences"),
        ({"parallel": {"strategy": "ddp", "tensor": 2, "sequence_norms": True}}, "reads images into whole sequences"),
    ],
)
def test_config_errors(sections: dict[str, Any], message: str, folder: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        configure_images(folder, "run", **sections)


def test_text_models_have_nothing_to_freeze(config: TrainConfig) -> None:
    with pytest.raises(ValueError, match=r"training.freeze = \['vision'\] freezes parts of a vision tower"):
        change_config(config, training={"freeze": ["vision"]})
