"""The check of Triton's kernel that the doctor makes."""

from __future__ import annotations

import pytest
import torch

from diffusionlm.kernels import triton_check


@pytest.mark.usefixtures("interpreted")
def test_the_kernel_agrees_with_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # so that it is put back
    shown = triton_check.check_triton()
    assert shown.startswith("the cross-entropy kernel ")
    assert ("interpreted" in shown) == (not torch.cuda.is_available())
    monkeypatch.setattr(triton_check, "TRITON_TOLERANCE", -1.0)
    with pytest.raises(ValueError, match="nats apart"):
        triton_check.check_triton()
