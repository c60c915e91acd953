"""FSDP on a GPU that computes nothing: what its forward gathers, and that the host never waits."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from config.model import ModelConfig
from config.training.parallel import FSDP
from ddp.fully_sharded import FullySharded
from ddp.process_group import World
from diffusionlm.models.patterns import Bidirectional
from diffusionlm.models.transformer import Transformer
from diffusionlm.training.checkpointing.staging import SnapshotMemory
from diffusionlm.training.setup import parameter_units
from tests.conftest import MakeConfig
from tests.fake_cuda import fake_cuda

CUDA = torch.device("cuda")


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process group of two ranks whose collectives do nothing."""
    fake_pg = pytest.importorskip("torch.testing._internal.distributed.fake_pg")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    dist.init_process_group("fake", rank=0, world_size=2, store=fake_pg.FakeStore())
    yield
    dist.destroy_process_group()


def shard(config: ModelConfig, dtype: torch.dtype = torch.float32) -> FullySharded:
    """A model on the GPU, of which this rank has its rows."""
    with CUDA:
        model = Transformer(config)
    return FullySharded(model, FSDP(), World(0, 2, 0), CUDA, parameter_units(model), dtype=dtype)


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("has_gradient", [True, False])
def test_a_forward(has_gradient: bool, make_config: MakeConfig) -> None:
    """Each block and the rest are gathered once; after a forward without gradients nothing stays whole."""
    with fake_cuda() as record:
        sharded = shard(make_config(), torch.bfloat16)
        record.clear()
        with torch.set_grad_enabled(has_gradient), torch.autocast("cuda", torch.bfloat16):
            for _ in range(2):
                sharded.model(torch.ones(2, 16, dtype=torch.int64, device=CUDA), pattern=Bidirectional())
    assert sharded.model.has_collective_forwards
    num_blocks = len(sharded.blocks)
    gathers = record.count()["_allgather_base_"]
    assert not record.waits
    assert gathers == (2 * num_blocks + 1 if has_gradient else 2 * (num_blocks + 1))
    assert record.product_dtypes() == {torch.bfloat16}


@pytest.mark.usefixtures("group")
def test_a_checkpoint_gathers_into_pinned_memory(make_config: MakeConfig) -> None:
    """The host waits once for each parameter, and for no copy to memory that is not pinned."""
    with fake_cuda() as record:
        sharded = shard(make_config())
        sources = {name: torch.empty(shape, device="meta") for name, shape in sharded.whole_shapes.items()}
        memory = SnapshotMemory()
        copies = memory.copy({**sources, "optimizer": torch.empty(3, device=CUDA)})
        record.clear()
        gathered = dict(sharded.iterate_whole_parameters(None, copies))
        memory.close()
    assert gathered.keys() == sources.keys()
    assert all(whole is copies[name] for name, whole in gathered.items())
    assert record.waits == {"ddp/fully_sharded.py:_gather": len(sources)}


@pytest.mark.usefixtures("group")
def test_clipping(make_config: MakeConfig) -> None:
    with fake_cuda() as record:
        sharded = shard(make_config())
        for parameter in sharded.model.parameters():
            parameter.grad = torch.empty_like(parameter)
        record.clear()
        norm = sharded.clip(1.0)
    assert not record.waits and norm.is_cuda
    assert all(parameter.grad is not None for parameter in sharded.trainable_parameters().values())
