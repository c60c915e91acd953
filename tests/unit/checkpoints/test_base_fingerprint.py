"""The fingerprint of an adapter's base: equal for the same weights in another dtype, and for no others."""

from __future__ import annotations

import hashlib

import pytest
import torch
from torch import Tensor, nn

from diffusionlm.checkpoints import base_fingerprint
from diffusionlm.checkpoints.base_fingerprint import BaseFingerprint, TensorDigest


def build_model(dtype: torch.dtype = torch.float32) -> nn.Module:
    """A matrix of random values and a norm of ones, which every dtype holds."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5, bias=False), nn.RMSNorm(6))
    return model.to(dtype)


def compare(model: nn.Module, other: nn.Module) -> str | None:
    fingerprint, other_fingerprint = BaseFingerprint.from_model(model), BaseFingerprint.from_model(other)
    difference = fingerprint.find_difference(other_fingerprint)
    assert (difference is None) == (other_fingerprint.find_difference(fingerprint) is None)
    return difference


def hash_bytes(values: Tensor) -> str:
    return hashlib.sha256(values.view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


def test_digest_is_the_hash_of_the_values(monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.linspace(0, 1, 21).reshape(3, 7)
    rounded, half = values.bfloat16(), values.half()
    expected = TensorDigest("float32", hash_bytes(values), hash_bytes(rounded))
    assert TensorDigest.from_tensor(values) == expected
    assert TensorDigest.from_tensor(half) == TensorDigest(
        "float16", hash_bytes(half.float()), hash_bytes(half.bfloat16())
    )
    assert TensorDigest.from_tensor(rounded) == TensorDigest("bfloat16", hash_bytes(rounded), hash_bytes(rounded))
    monkeypatch.setattr(base_fingerprint, "_CHUNK", 4)
    assert TensorDigest.from_tensor(values) == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_dtype_does_not_count(dtype: torch.dtype) -> None:
    """Neither that of storage, nor that to which a base was converted."""
    model = build_model(dtype)
    assert BaseFingerprint.from_model(model) == BaseFingerprint.from_model(build_model(dtype).float())
    assert compare(model, build_model(dtype).float()) is None and compare(build_model(), model) is None


@pytest.mark.parametrize(("name", "index"), [("0.weight", (1, 2)), ("1.weight", (3,))])
def test_a_base_changed_by_little_is_another(name: str, index: tuple[int, ...]) -> None:
    other = build_model()
    with torch.no_grad():
        other.get_parameter(name)[index] += 1e-6
    assert compare(build_model(), other) == f"{name} has other values"


def test_a_base_tuned_in_float32_is_another() -> None:
    """A base in bfloat16 whose values moved in float32, some of them to the next value of bfloat16."""
    other = build_model(torch.bfloat16).float()
    with torch.no_grad():
        other.get_parameter("0.weight").mul_(1.003)
    assert compare(build_model(torch.bfloat16), other) == "0.weight has other values"


def test_other_tensors_are_named() -> None:
    other = nn.Sequential(build_model()[0], nn.Linear(5, 2, bias=False))  # type: ignore[index]
    other.register_parameter("extra", nn.Parameter(torch.ones(3)))
    assert compare(build_model(), other) == "extra is new; 1.weight has other values"


def test_half_precision_of_a_float32_base_compares_samples() -> None:
    fingerprint = BaseFingerprint.from_model(build_model())
    assert BaseFingerprint.from_metadata(fingerprint.to_metadata()) == fingerprint
    assert BaseFingerprint.from_metadata({"format": "pt"}) is None
    assert compare(build_model(), build_model(torch.float16)) is None
    other = build_model(torch.float16)
    with torch.no_grad():
        other.get_parameter("0.weight").mul_(1.5)
    assert compare(build_model(), other) == "its tensors have other values"


@pytest.mark.parametrize("digests", ["{", "[]", '{"0.weight": {"dtype": "float32"}}'])
def test_damaged_metadata_are_refused(digests: str) -> None:
    metadata = BaseFingerprint.from_model(build_model()).to_metadata() | {"base_digests": digests}
    with pytest.raises(ValueError, match="metadata base_digests are damaged"):
        BaseFingerprint.from_metadata(metadata)
