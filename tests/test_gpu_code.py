"""Code that only a GPU takes: docs/cuda.md names every module that asks for CUDA with the tests of its branches, and
every call that makes the host wait for a GPU, if its tensor is on one, is listed here with its reason."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
ASKS_FOR_CUDA = re.compile(
    r"torch\.cuda\b|torch\.backends\.cuda\b|torch\.version\.hip\b|\.is_cuda\b|pin_memory\b|record_stream\b"
    r"|\"(cuda|nccl)\"|\bimport triton\b|\bfrom triton\b|flex_attention import"
)
"""Devices, methods of tensors and libraries."""
READS = {"argwhere", "bincount", "cpu", "item", "masked_select", "nonzero", "synchronize", "unique"}
"""Methods and functions of torch that read values, or make tensors whose sizes depend on them. Not tolist and numpy,
which arrays have as well: what they read on a GPU, the tests on a fake one find (docs/cuda.md)."""
ALLOWED = {
    # files and identities of weights
    "diffusionlm/checkpoints/adapter_files.py:save_adapter": "weights that are written",
    "diffusionlm/checkpoints/base_fingerprint.py:from_tensor": "weights that are hashed, part by part",
    "diffusionlm/checkpoints/weights.py:save_weights": "weights that are written",
    "diffusionlm/training/run_checkpoint.py:_check_frozen_weights": "frozen weights, when a run resumes",
    "diffusionlm/training/checkpointing/staging.py:copy": "all copies of a checkpoint: once",
    "ddp/context_parallel.py:gather_losses": "positions on the CPU",
    "ddp/fully_sharded.py:_gather": "a whole parameter that is written",
    "ddp/mesh_parallel.py:iterate_whole_parameters": "a part of a parameter that is written",
    "ddp/replicas.py:check_equal": "hashes of all parameters: once in a checkpoint",
    # tensors on the CPU
    "diffusionlm/diffusion/layout.py:add_clean_outputs": "batches are noised on the CPU",
    "diffusionlm/diffusion/layout.py:build_noised_batch": "batches are noised on the CPU",
    "diffusionlm/evaluation/draft_acceptance.py:measure": "sums of acceptance: once in a batch of a validation",
    "diffusionlm/inference/strategy.py:dream_tokens_per_step": "a schedule of a request",
    "diffusionlm/models/tiled.py:build_tiles": "tiles are for the CPU",
    # results
    "diffusionlm/evaluation/likelihood/copies.py:_read_logits": "log-probabilities: once in a forward",
    "diffusionlm/serving/followers.py:__init__": "weights that are sent at the start",
    "diffusionlm/evaluation/lm_eval/adapter.py:all_gather": "results of the harness",
    "diffusionlm/evaluation/nelbo.py:nelbo": "inputs of the caller, which are noised on the CPU",
    "diffusionlm/evaluation/nelbo.py:compute_masked_nll": "losses: once in a forward",
    "diffusionlm/evaluation/sampler_likelihood.py:_split_into_documents": "inputs of the caller",
    "diffusionlm/kernels/triton_check.py:max_difference_to_eager": "losses of the doctor's check",
    "diffusionlm/training/metrics.py:read": "metrics of a logged step, when the next one is launched",
    "diffusionlm/rl/policy.py:_estimate_advantages": "values of an update with a value function: once",
    # decoding
    "diffusionlm/inference/constraints/sampler.py:_constrain_request": "drafts of constraints, one by one on the CPU",
    "diffusionlm/inference/constraints/sampler.py:_log_softmax": "constraints and choices are computed on the CPU",
    "diffusionlm/inference/decoder.py:_check_model": "one forward after an error",
    "diffusionlm/inference/images.py:restrict": "features for other processes: in the forwards that read an image",
    "diffusionlm/inference/sampling/token_sampler.py:_to_arrays": "predictions: once in a step",
    "diffusionlm/models/row_adapters.py:select": "experts of a batch with several adapters: rows of each",
}
"""``file:function`` -> what is read."""


def test_every_module_that_asks_for_cuda_has_tests_without_a_gpu() -> None:
    paths = [
        path
        for name in ("benchmarking", "cli", "ddp", "diffusionlm", "profiling")
        for path in (ROOT / name).rglob("*.py")
    ]
    modules = {str(path.relative_to(ROOT)) for path in paths if ASKS_FOR_CUDA.search(path.read_text(encoding="utf-8"))}
    guide = (ROOT / "docs" / "cuda.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`.*?) \|.*\| (`.*?) \|$", guide.partition("## CUDA-only branches")[2], re.MULTILINE)
    listed = [name for modules_of_row, _ in rows for name in re.findall(r"`(.*?)`", modules_of_row)]
    assert sorted(listed) == sorted(modules), "the table has exactly the modules that ask for CUDA"
    tests = [name for _, tests_of_row in rows for name in re.findall(r"`(.*?)`", tests_of_row)]
    assert not [name for name in tests if not (ROOT / "tests" / name).is_file()]


def find_reads(node: ast.AST, function: str = "") -> Iterator[str]:
    """Names of the functions that have such a call; arrays of NumPy are told apart by `np`."""
    for child in ast.iter_child_nodes(node):
        is_definition = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
        yield from find_reads(child, child.name if is_definition else function)  # type: ignore[attr-defined]
        match child:
            case ast.Call(func=ast.Attribute(attr=name, value=owner)) if name in READS and ast.unparse(owner) != "np":
                yield function


def test_every_read_has_its_reason() -> None:
    places = set()
    for package in ("diffusionlm", "ddp"):
        for path in (ROOT / package).rglob("*.py"):
            text = path.read_text(encoding="utf-8")
            if "import torch" in text or "from torch" in text:
                places |= {f"{path.relative_to(ROOT)}:{name}" for name in find_reads(ast.parse(text))}
    assert places - set(ALLOWED) == set(), "the host may wait for a GPU here: avoid it, or list it with its reason"
    assert set(ALLOWED) - places == set(), "these read nothing any more: take them out of the list"
