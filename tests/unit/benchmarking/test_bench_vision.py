"""The benchmark of vision towers: both implementations compute the same."""

from __future__ import annotations

import pytest
import torch

from benchmarking.implementations import vision
from config.bench.training import BenchTrainSection
from config.model import VisionConfig
from diffusionlm.models.init import init_weights
from diffusionlm.models.transformer import Transformer

CASE = vision.TowerCase(
    VisionConfig(
        depth=2,
        hidden_size=16,
        num_heads=2,
        intermediate_size=24,
        deepstack_visual_indexes=(1,),
        num_position_embeddings=16,
        mrope_section=(12, 10, 10),
    ),
    hidden_size=64,
    num_layers=2,
    num_sequences=2,
    grid=(1, 2),
)


def test_both_compute_the_same() -> None:
    inputs = vision._build_inputs(CASE, torch.Generator().manual_seed(0))
    ours = Transformer(CASE.config)
    init_weights(ours, seed=0)
    peer = vision._build_peer(CASE, ours)
    features_EFD = vision._build_our_call(ours, inputs, vision.FORWARD)()
    expected = vision._build_peer_call(peer, CASE, inputs, vision.FORWARD)()
    assert isinstance(features_EFD, torch.Tensor)
    torch.testing.assert_close(features_EFD[0], expected.pooler_output)  # type: ignore[attr-defined]
    for part in (vision.FROZEN, vision.TRAINED):
        steps = vision._build_our_call(ours, inputs, part), vision._build_peer_call(peer, CASE, inputs, part)
        for _ in range(2):
            our_loss, peer_loss = (step() for step in steps)
            assert our_loss == pytest.approx(peer_loss, rel=1e-5)
    weights = {name: value.clone() for name, value in ours.state_dict().items()}
    expected_loss = vision._build_our_call(ours, inputs, vision.FROZEN)()
    ours.load_state_dict(weights)
    stored = vision._store_features(ours, inputs)
    assert vision._build_our_call(ours, stored, vision.FROZEN)() == pytest.approx(expected_loss, rel=1e-5)


def test_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vision, "TOWERS", {"tiny": CASE})
    table = vision.measure_tower("tiny", BenchTrainSection(peers=("transformers",), rounds=2, warmup=0))
    assert [row[1] for row in table.rows] == [vision.FORWARD, vision.FROZEN, vision.CACHED, vision.TRAINED]
    assert all(float(str(row[2])) > 0 for row in table.rows)
    assert [row[3] != "-" for row in table.rows] == [True, True, False, True]
    alone = vision.measure_tower("tiny", BenchTrainSection(rounds=2, warmup=0))
    assert {row[3] for row in alone.rows} == {"-"}
