"""Ranks that train a vision tower compute what one process does, also where only some have images."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from config.generation import GenerationConfig
from config.model import VisionPart
from config.training.objective import MaskedDiffusionConfig
from config.training.optimizer import AdamWConfig, MuonConfig
from config.training.parallel import DDP, FSDP
from ddp.mesh import Axis
from ddp.process_group import World
from ddp.strategies import apply_parallelism
from ddp.tensor_parallel import apply_tensor_parallel
from diffusionlm.diffusion.noised_batch import NoisedBatch, NoiseKey
from diffusionlm.diffusion.objectives import build_objective
from diffusionlm.inference.generate import generate
from diffusionlm.models.transformer import Transformer
from diffusionlm.optim.build import build_optimizers, requires_whole_matrix
from diffusionlm.training import loop
from diffusionlm.training.block_wrapping import checkpoint_activations
from diffusionlm.training.setup import parameter_units
from tests.distributed.forked import run_ranks
from tests.distributed.test_training_ranks import check_equal, train_on
from tests.image_requests import PROCESSOR, make_vision_model, paint, write_prompt
from tests.image_rows import SMALL, build_example, make_model
from tests.image_run import configure_images, write_conversations

CPU = torch.device("cpu")
DENOMINATOR = 20.0
OBJECTIVE = build_objective(MaskedDiffusionConfig(), SMALL)
ROWS_OF_STEPS = [[(0, 3), (3, 1)], [(3, 3), (1, 2)], [(3, 3), (3, 3)]]
"""Of each step and rank, the rows of `build_example` in its micro-batches; row 3 has no image."""
OPTIMIZERS = {"adamw": AdamWConfig(weight_decay=0.1), "muon": MuonConfig(precision="float32")}
STRATEGIES: dict[str, DDP | FSDP] = {
    "ddp": DDP(shard_optimizer=False, bucket_mib=0.002),
    "ddp, sharded": DDP(bucket_mib=0.002),
    "fsdp": FSDP(),
    "fsdp, kept": FSDP(reshard_after_forward=False),
}


def build_micro_batches(step: int, rank: int) -> list[NoisedBatch]:
    batch = build_example()
    key = NoiseKey(seed=5, step=step, first_sequence=2 * rank, num_sequences_in_step=8)
    rows = ROWS_OF_STEPS[step][rank]
    return [OBJECTIVE.build_noised_batch(batch.select(slice(row, row + 1)), key) for row in rows]


def compute_loss(model: Transformer, noised: NoisedBatch) -> Tensor:
    loss_inputs = OBJECTIVE.build_loss_inputs(noised, DENOMINATOR)
    return model(
        noised.inputs_BS,
        pattern=noised.pattern,
        images=noised.images,
        output_positions=noised.positions_N,
        loss_inputs=loss_inputs,
    ).total_loss


def build_frozen_model(freeze: tuple[VisionPart, ...], config: Any = SMALL) -> Transformer:
    model = make_model(config)
    assert model.model.visual is not None
    model.model.visual.freeze(freeze)
    return model


@pytest.mark.parametrize(
    ("strategy", "optimizer", "freeze"),
    [
        ("ddp", "adamw", ()),
        pytest.param("ddp, sharded", "adamw", (), marks=pytest.mark.slow),
        ("ddp, sharded", "muon", ("vision",)),
        ("fsdp", "adamw", ()),
        pytest.param("fsdp", "muon", ("merger",), marks=pytest.mark.slow),
        ("fsdp, kept", "adamw", ("vision", "merger")),
    ],
)
def test_steps_match_a_single_process(
    strategy: str, optimizer: str, freeze: tuple[VisionPart, ...], tmp_path: Path
) -> None:
    """Images in other micro-batches of each rank, then on one rank, then nowhere."""
    config: Any = OPTIMIZERS[optimizer]

    def act(world: World) -> None:
        model, whole = build_frozen_model(freeze), build_frozen_model(freeze)
        parameters = dict(model.named_parameters())
        parallel = apply_parallelism(
            model,
            STRATEGIES[strategy],
            world,
            CPU,
            parameter_units(model),
            requires_whole_matrix=lambda name: requires_whole_matrix(config, name, parameters[name]),
        )
        optimizers = build_optimizers(config, parallel.trainable_parameters(), row_exchange=parallel.row_exchange)
        expected = build_optimizers(config, dict(whole.named_parameters()))
        for step in range(len(ROWS_OF_STEPS)):
            own = build_micro_batches(step, world.rank)
            for index, noised in enumerate(own):
                with parallel.backward(is_last=index == len(own) - 1):
                    compute_loss(model, noised).backward()
            norm = parallel.clip(0.5)
            optimizers.step(1.0)
            parallel.start_weight_gather()
            for noised in (*build_micro_batches(step, 0), *build_micro_batches(step, 1)):
                compute_loss(whole, noised).backward()
            expected_norm = nn.utils.clip_grad_norm_(whole.parameters(), 0.5)
            expected.step(1.0)
            torch.testing.assert_close(norm, expected_norm, rtol=1e-4, atol=0.0)
            with torch.no_grad():  # only one rank has images here
                noised = build_micro_batches(0, 0)[world.rank]
                torch.testing.assert_close(
                    compute_loss(model, noised), compute_loss(whole, noised), rtol=1e-3, atol=1e-4
                )
        trained = dict(whole.named_parameters())
        for name, value in parallel.iterate_whole_parameters():
            torch.testing.assert_close(value, trained[name], rtol=1e-3, atol=1e-4, msg=partial("{} {}".format, name))

    run_ranks(act, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("freeze", [[], ["vision", "merger"]], ids=str)
@pytest.mark.parametrize(
    ("parallel", "optimizer"),
    [({"strategy": "ddp"}, "muon"), ({"strategy": "fsdp"}, "adamw"), ({"strategy": "ddp", "tensor": 2}, "muon")],
    ids=str,
)
def test_runs_of_two_ranks_are_those_of_one(
    parallel: dict[str, Any], optimizer: str, freeze: list[str], tmp_path: Path
) -> None:
    """With validation, averages and checkpoints; a frozen tower's features are stored by both ranks."""
    write_conversations(tmp_path)
    sections: dict[str, Any] = {
        "training": {"freeze": freeze, "ema_decay": 0.5},
        "validation": {"every_steps": 3},
        "optimizer": {"kind": optimizer, **({"precision": "float32"} if optimizer == "muon" else {"eps": 1e-5})},
    }
    one = configure_images(tmp_path, "one", **sections)
    loop.train(one)
    if freeze:
        sections["data"] = {"images": {"cache_features": str(tmp_path / "features")}}
    two = configure_images(tmp_path, "two", **sections, parallel=parallel)
    assert train_on(two, tmp_path) == [6, 6]
    check_equal(two, one, 1e-4)
    assert len([path for path in (tmp_path / "features").rglob("*") if path.is_file()]) == (4 if freeze else 0)


def test_a_sharded_model_decodes_images(tmp_path: Path) -> None:
    """The first forward that it computes is one of the tower."""
    text, images = write_prompt(5, paint(2, 3), 6)
    generation = GenerationConfig(max_new_tokens=5, stop_token_ids=())
    arguments: Any = {"images": [images], "processor": PROCESSOR}
    changes = {"block_length": 4}
    [expected] = generate(make_vision_model(torch.float32, **changes), [text], generation, **arguments)

    def act(world: World) -> None:
        model = make_vision_model(torch.float32, **changes)
        apply_parallelism(model, FSDP(), world, CPU, parameter_units(model), requires_whole_matrix=lambda name: False)
        for _ in range(2):
            [answer] = generate(model, [text], generation, **arguments)
            assert answer.token_ids == expected.token_ids
            assert answer.logprobs == pytest.approx(expected.logprobs, abs=1e-4)

    run_ranks(act, tmp_path)


@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_a_model_with_divided_text_layers(checkpointing: Any, tmp_path: Path) -> None:
    """Each rank computes the tower and has its whole gradient."""
    config = SMALL.model_copy(update={"num_attention_heads": 2, "head_dim": 32})
    noised = OBJECTIVE.build_noised_batch(build_example(), NoiseKey(5, 0, 0, 8))

    def act(world: World) -> None:
        whole = make_model(config).double()
        loss = compute_loss(whole, noised)
        loss.backward()
        model = make_model(config).double()
        shards = apply_tensor_parallel(model, Axis(world.size, world.rank, dist.group.WORLD))
        checkpoint_activations(model, checkpointing)
        divided_loss = compute_loss(model, noised)
        divided_loss.backward()
        torch.testing.assert_close(divided_loss, loss, rtol=1e-9, atol=0.0)
        expected = {name: value.grad for name, value in whole.named_parameters()}
        for name, value in model.named_parameters():
            gradient = expected[name]
            assert gradient is not None and value.grad is not None
            if name.startswith("model.visual."):
                assert shards[name].is_whole and not shards[name].has_partial_gradient
                torch.testing.assert_close(value.grad, gradient, rtol=1e-9, atol=1e-12)

    run_ranks(act, tmp_path)
