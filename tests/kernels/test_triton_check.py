"""The comparison of the Triton kernel with PyTorch that the doctor runs."""

from __future__ import annotations

import pytest

from cli import doctor
from diffusionlm.kernels import triton_check


@pytest.mark.usefixtures("interpreted")
def test_the_kernel_agrees_with_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # restores the variable, which the check sets
    assert triton_check.max_difference_to_eager() <= doctor.TRITON_TOLERANCE


def test_the_doctor_reports_wrong_losses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_check, "max_difference_to_eager", lambda: 1e-6)
    assert "1e-06 nats" in doctor._check_kernel()
    for difference in (0.5, float("nan")):
        monkeypatch.setattr(triton_check, "max_difference_to_eager", lambda difference=difference: difference)
        with pytest.raises(ValueError, match="nats"):
            doctor._check_kernel()
