"""The plan of many GPUs: known models, and cases small enough to do by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cli.scaling import MODELS, QWEN3_VOCAB_SIZE, render
from config.model import Architecture
from profiling.flops import count_parameters
from profiling.scaling import (
    Cluster,
    TrainingJob,
    activation_bytes,
    estimate_rank_memory,
    estimate_step_time,
    estimate_traffic,
    find_fastest_job,
)

TINY = Architecture(
    hidden_size=4,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=2,
    intermediate_size=6,
    max_position_embeddings=8,
    tie_word_embeddings=True,
    qk_norm=True,
)
# A block: q 4 x 4, k and v 2 x 4 each, o 4 x 4, three of 6 x 4, two norms of 4 and two of 2. Beside the blocks:
# 10 rows of 4, and the last norm.
BLOCK = 16 + 8 + 8 + 16 + 72 + 8 + 4
ROOT = 10 * 4 + 4
JOB = TrainingJob(
    TINY, 10, ranks=4, strategy="ddp", row_length=8, batch_size=8, micro_batch_size=2, pattern="bidirectional"
)
P = 2 * BLOCK + ROOT
IDEAL = Cluster(
    gpus_per_node=4,
    peak_flops=1.0,
    model_flops_share=1.0,
    memory_bandwidth=1.0,
    intra_node_bandwidth=1.0,
    inter_node_bandwidth=0.5,
    hop_latency=0.0,
    memory=1e9,
)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("Qwen3-1.7B", 1_720_574_976), ("Qwen3-8B", 8_190_735_360), ("Qwen3-30B-A3B", 30_532_122_624)],
)
def test_models_have_the_parameters_of_the_published_checkpoints(name: str, parameters: int) -> None:
    assert count_parameters(MODELS[name], QWEN3_VOCAB_SIZE)[0] == parameters


def test_memory_by_hand() -> None:
    assert JOB.parameters == P and JOB.block_parameters == BLOCK and JOB.root_parameters == ROOT
    whole, part = 4 * P, P
    assert [*vars(estimate_rank_memory(JOB)).values()][:4] == [whole, whole, 2 * whole, 0]
    sharded = estimate_rank_memory(replace(JOB, strategy="ddp, sharded"))
    assert [*vars(sharded).values()][:4] == [whole + part, whole + part, 2 * part, 0]
    once = estimate_rank_memory(replace(JOB, strategy="fsdp"))
    assert [*vars(once).values()][:4] == [part, part, 2 * part, 2 * 2 * BLOCK + 4 * ROOT + 2 * BLOCK + 4 * ROOT]
    twice = estimate_rank_memory(replace(JOB, strategy="fsdp", micro_batch_size=1, reshards_after_forward=False))
    assert twice.gathered == once.gathered  # both blocks are there at once in either case
    assert once.total == once.weights + once.gradients + once.optimizer + once.gathered + once.activations


def test_activations_by_hand() -> None:
    numbers = 4 * 4 + 2 * 4 + 2 * 2 + 3 * 6
    assert activation_bytes(JOB) == 2 * (2 * 8) * 2 * numbers
    assert activation_bytes(replace(JOB, keeps_all_activations=False)) == 2 * (2 * 8) * (2 * 4 + numbers)
    assert activation_bytes(replace(JOB, pattern="block_diffusion")) == 2 * activation_bytes(JOB)


def test_traffic_by_hand() -> None:
    whole = 4 * P * 3 / 4
    assert estimate_traffic(JOB).total == 2 * whole
    sharded = estimate_traffic(replace(JOB, strategy="ddp, sharded"))
    assert (sharded.gradients, sharded.weights) == (whole, whole)
    fsdp = estimate_traffic(replace(JOB, strategy="fsdp", micro_batch_size=1))
    # Two micro-batches, each with a forward and a backward.
    assert (fsdp.gradients, fsdp.weights) == (2 * whole, (4 * 2 * 2 * BLOCK + 4 * ROOT) * 3 / 4)
    without_resharding = estimate_traffic(
        replace(JOB, strategy="fsdp", micro_batch_size=1, reshards_after_forward=False)
    )
    assert without_resharding.weights == (2 * 2 * BLOCK + 4 * ROOT) * 3 / 4
    assert estimate_traffic(replace(JOB, ranks=1)).total == 0


def test_communication_overlap() -> None:
    job = replace(JOB, strategy="ddp, sharded", bucket=0.0 + 4 * P)
    slow = estimate_step_time(job, IDEAL)
    # Computation is long at one FLOP a second: all but the one bucket of each kind is hidden.
    assert slow.exposed == 2 * 4 * P * 3 / 4
    fast = estimate_step_time(job, replace(IDEAL, peak_flops=1e30))
    assert fast.exposed == pytest.approx(estimate_traffic(job).total)
    assert slow.update == 4 * P / 4 * 7 and slow.total == slow.compute + slow.exposed + slow.update
    assert estimate_step_time(replace(job, keeps_all_activations=False), IDEAL).compute == pytest.approx(
        slow.compute * 4 / 3
    )
    assert IDEAL.bandwidth(4) == 1.0 and IDEAL.bandwidth(8) == 0.5


def test_fastest_fitting_layout_is_selected() -> None:
    need = estimate_rank_memory(replace(JOB, micro_batch_size=1)).total
    tight = replace(IDEAL, memory=need, usable=1.0)
    best = find_fastest_job(JOB, tight)
    assert best is not None and best.micro_batch_size == 1 and best.keeps_all_activations
    assert find_fastest_job(JOB, replace(tight, memory=4.0 * P)) is None


def test_tables_have_every_case() -> None:
    lines = render([8], Cluster()).splitlines()
    assert [line.split(" | ")[0].strip("| ") for line in lines].count("Qwen3-30B-A3B") >= 3
    assert any("does not fit" in line for line in lines)
