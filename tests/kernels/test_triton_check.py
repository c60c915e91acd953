"""The comparison of the Triton kernel with PyTorch that the doctor runs."""

from __future__ import annotations

import pytest

from cli import doctor
from diffusionlm.kernels import triton_check
from diffusionlm.kernels.chunked_loss import load_loss_backend
from profiling import triton_setup


@pytest.mark.usefixtures("interpreted")
def test_the_kernel_agrees_with_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # restores the variable, which the check sets
    assert triton_check.max_difference_to_eager() <= doctor.TRITON_TOLERANCE


def test_kernels_round_alike_in_all_versions_of_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton 3.9 warns that its default of fusing will change; the kernels choose it."""
    knobs = pytest.importorskip("triton.knobs")
    if not hasattr(knobs.language, "fp_fusion_enabled"):
        pytest.skip("this version of Triton always fuses")
    warnings: list[str] = []
    monkeypatch.setattr(knobs, "warn_once", warnings.append)
    load_loss_backend("triton")
    assert knobs.language.fp_fusion_enabled(None) and not warnings
    monkeypatch.setenv(triton_setup.FUSION_VARIABLE, "0")
    triton_setup.set_kernel_rounding()
    assert not knobs.language.fp_fusion_enabled(None)  # as the user says
