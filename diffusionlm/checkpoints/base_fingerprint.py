"""Fingerprints of a base model, by which an adapter recognizes the weights that it was trained on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from operator import itemgetter
from typing import Self

import torch
from torch import Tensor, nn

from diffusionlm.checkpoints.model_files import join_problems
from diffusionlm.models.lora import adapter_modules

_SAMPLES_KEY, _DIGESTS_KEY = "base_fingerprint", "base_digests"
_DTYPES = ("bfloat16", "float16", "float32")
"""Dtypes of values, from the narrowest."""
_SAMPLED_VALUES = 8
"""Values of each tensor in the samples."""
_DIGEST_CHARACTERS = 16
"""Length of each hash, in hex: nobody attacks it, and a model may have thousands of tensors."""
_CHUNK = 1 << 22
"""Values that are hashed at once, so that little memory is needed."""


@dataclass(frozen=True)
class TensorDigest:
    """SHA-256 of the values of a tensor, whatever dtype stores them."""

    dtype: str
    """The narrowest of `_DTYPES` that holds all values."""
    exact: str
    rounded: str
    """Hash of the values rounded to bfloat16."""

    @classmethod
    def from_tensor(cls, tensor: Tensor) -> TensorDigest:
        """Hash a tensor of any floating dtype and device."""
        exact, rounded = hashlib.sha256(), hashlib.sha256()
        fits = {"bfloat16": True, "float16": True}
        flat = tensor.detach().flatten()
        for start in range(0, len(flat), _CHUNK):
            values = flat[start : start + _CHUNK].cpu()
            narrow = values.bfloat16()
            rounded.update(narrow.view(torch.uint8).numpy().tobytes())
            if values.dtype == torch.bfloat16:
                continue
            wide = values.float()
            exact.update(wide.view(torch.uint8).numpy().tobytes())
            fits["bfloat16"] = fits["bfloat16"] and torch.equal(narrow.float(), wide)
            fits["float16"] = fits["float16"] and torch.equal(wide.half().float(), wide)
        dtype = next((dtype for dtype, holds in fits.items() if holds), "float32")
        hashes = (rounded if dtype == "bfloat16" else exact, rounded)
        return cls(dtype, *(digest.hexdigest()[:_DIGEST_CHARACTERS] for digest in hashes))


@dataclass(frozen=True)
class BaseFingerprint:
    """Describes the parameters of a model without those of its adapter."""

    samples: str
    """SHA-256 of names and shapes, then some values of each parameter in bfloat16, in hex."""
    digests: Mapping[str, TensorDigest]
    """By parameter name."""

    @classmethod
    def from_model(cls, model: nn.Module) -> BaseFingerprint:
        """Read all weights once: 0.5 to 1 GB each second."""
        parameters = _base_parameters(model)
        digests = {name: TensorDigest.from_tensor(parameter) for name, parameter in parameters}
        return cls(_sample_values(parameters), digests)

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, str]) -> Self | None:
        """Read what `to_metadata` wrote. None: there is no fingerprint; PEFT writes none.

        Raises:
            ValueError: it is damaged.
        """
        if _DIGESTS_KEY not in metadata:
            return None
        try:
            digests = {name: TensorDigest(**digest) for name, digest in json.loads(metadata[_DIGESTS_KEY]).items()}
            _widest_dtype(digests)
        except (ValueError, TypeError, AttributeError) as error:
            raise ValueError(f"its metadata {_DIGESTS_KEY} are damaged: {error}") from error
        return cls(metadata.get(_SAMPLES_KEY, ""), digests)

    def to_metadata(self) -> dict[str, str]:
        """The fingerprint as metadata of a safetensors file."""
        digests = {name: asdict(digest) for name, digest in self.digests.items()}
        return {_SAMPLES_KEY: self.samples, _DIGESTS_KEY: json.dumps(digests)}

    def find_difference(self, other: BaseFingerprint) -> str | None:
        """Name the tensors that differ. None: the weights are the same.

        Weights that were converted between float32 and bfloat16 count as the same if one follows from the other by
        rounding. Other conversions round twice, so only the samples are compared, with a tolerance.
        """
        names = self.digests.keys() & other.digests.keys()
        problems = [f"{name} is missing" for name in sorted(self.digests.keys() ^ names)]
        problems += [f"{name} is new" for name in sorted(other.digests.keys() ^ names)]
        dtypes = {_widest_dtype(self.digests), _widest_dtype(other.digests)}
        if len(dtypes) == 2 and "float16" in dtypes:
            return join_problems(problems) if problems else _compare_samples(self.samples, other.samples)
        for name in sorted(names):
            digest, other_digest = self.digests[name], other.digests[name]
            is_same = digest == other_digest if len(dtypes) == 1 else digest.rounded == other_digest.rounded
            if not is_same:
                problems.append(f"{name} has other values")
        return join_problems(problems) if problems else None


def _widest_dtype(digests: Mapping[str, TensorDigest]) -> str:
    return max((digest.dtype for digest in digests.values()), key=_DTYPES.index)


def _base_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """The parameters that are not the adapter's, sorted by name."""
    adapter = {
        getattr(module, key, None)
        for _, module in adapter_modules(model)
        for key in ("lora_A", "lora_B", "lora_magnitude", "trained_rows")
    }
    parameters = [(name, parameter) for name, parameter in model.named_parameters() if parameter not in adapter]
    return sorted(parameters, key=itemgetter(0))


def _sample_values(parameters: list[tuple[str, nn.Parameter]]) -> str:
    digest, samples = hashlib.sha256(), []
    for name, parameter in parameters:
        values = parameter.detach().flatten()
        indices = torch.linspace(0, len(values) - 1, min(_SAMPLED_VALUES, len(values)), dtype=torch.float64).long()
        samples.append(values[indices.to(values.device)].to("cpu", torch.bfloat16))
        digest.update(f"{name} {list(parameter.shape)}".encode())
    return f"{digest.hexdigest()} {torch.cat(samples).view(torch.uint8).numpy().tobytes().hex()}"


def _compare_samples(samples: str, other_samples: str) -> str | None:
    """Say how two samples differ beyond a conversion to another dtype. None: they do not."""
    (names, hex_values), (other_names, other_hex_values) = (
        text.split(" ") if text.count(" ") == 1 else ("", "") for text in (samples, other_samples)
    )
    if names != other_names or len(hex_values) != len(other_hex_values):
        return "names or shapes of its tensors differ"
    values, other_values = (
        torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8).view(torch.bfloat16).float()
        for text in (hex_values, other_hex_values)
    )
    # A value that was rounded to float16 first may be the next bfloat16.
    is_same = torch.allclose(values, other_values, rtol=2**-7, atol=1e-6, equal_nan=True)
    return None if is_same else "its tensors have other values"
