"""The adapter in lm-evaluation-harness itself, without a network: tasks, cache, repeats, chats, ranks, command line."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from cli.eval.lm_eval import main
from ddp.process_group import World
from diffusionlm.checkpoints.huggingface import save_model_directory
from diffusionlm.evaluation.pair_encoding import PairEncoder
from diffusionlm.models.transformer import Transformer
from tests.conftest import MakeModel
from tests.distributed.forked import run_ranks
from tests.unit.evaluation.conftest import token_ids
from tokenizer import CHAT_TEMPLATES, Tokenizer, train_bpe

lm_eval = pytest.importorskip("lm_eval")
adapter = pytest.importorskip("diffusionlm.evaluation.lm_eval.adapter")
pytestmark = pytest.mark.lm_eval

ROOT = Path(__file__).parents[4]
TASKS = "config/resources/lm_eval"
SETTINGS: dict[str, Any] = {"likelihood.num_mc_samples": 16, "generation.block_length": 8}


@pytest.fixture(autouse=True)
def _root(monkeypatch: pytest.MonkeyPatch) -> None:
    """Paths of the example tasks are relative to the root; statistics use one process."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("DISABLE_MULTIPROC", "1")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    lines = [path.read_text() for path in sorted((ROOT / TASKS).glob("*.jsonl"))]
    return train_bpe(lines, vocab_size=400).with_chat_template(CHAT_TEMPLATES["chatml"])


@pytest.fixture(scope="module")
def model(tokenizer: Tokenizer, tiny_model: MakeModel) -> Transformer:
    return tiny_model(torch.float64, **token_ids(tokenizer), max_position_embeddings=256)


@pytest.fixture(scope="module")
def manager() -> Any:
    from lm_eval.tasks import TaskManager

    return TaskManager(include_path=TASKS, include_defaults=False)


@pytest.fixture
def evaluate(model: Transformer, tokenizer: Tokenizer, manager: Any) -> Callable[..., Any]:
    """``evaluate(*tasks, settings=..., **options)``: the results of `simple_evaluate`."""

    def run(*tasks: str | dict[str, Any], settings: dict[str, Any] | None = None, **options: Any) -> Any:
        lm = adapter.DiffusionLM(model, tokenizer, **(SETTINGS if settings is None else settings))
        return lm_eval.simple_evaluate(model=lm, tasks=list(tasks), task_manager=manager, bootstrap_iters=0, **options)

    return run


def task(name: str, **changes: Any) -> dict[str, Any]:
    """The config of an example task, with changes."""
    import yaml

    config: dict[str, Any] = yaml.safe_load((ROOT / TASKS / f"{name}.yaml").read_text())
    return {**config, **changes}


def test_pairs_are_split_as_by_the_harness(tokenizer: Tokenizer, model: Transformer) -> None:
    from lm_eval.api.model import TemplateLM

    encoder = PairEncoder(tokenizer, model.config)

    class Reference(TemplateLM):  # type: ignore[misc]
        eot_token_id = tokenizer.eos_token_id
        loglikelihood_rolling = generate_until = list

        def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
            return tokenizer.encode(string, allow_special=True)

        def _loglikelihood_tokens(self, requests: Any, **_: Any) -> Any:
            return [(context, continuation) for _, context, continuation in requests]

    class Request:
        def __init__(self, *args: str) -> None:
            self.args = args

    rng = random.Random(0)
    pieces = ["Question", ": ", "a hen", " eggs", "\n", "  ", "é", "e\u0301", "18", ".", "日本", "quest"]
    pieces.append("<|endoftext|>")
    texts = [("".join(rng.choices(pieces, k=rng.randrange(4))), "".join(rng.choices(pieces, k=rng.randint(1, 3))))
             for _ in range(400)]  # fmt: skip
    num_compared = 0
    for (context, continuation), expected in zip(
        texts, Reference().loglikelihood([Request(*pair) for pair in texts], disable_tqdm=True), strict=True
    ):
        pair = encoder.encode_pair(context, continuation)
        if context and not context.strip():
            continue  # the harness leaves no context at all
        if expected[1]:
            assert (list(pair.context_ids), list(pair.continuation_ids)) == (expected[0], expected[1])
            num_compared += 1
        else:
            assert pair.continuation_ids or not continuation
    assert num_compared > 300


def test_tasks_of_all_kinds(evaluate: Callable[..., Any]) -> None:
    names = ["own_choice", "own_math", "own_text"]
    results = evaluate(*names)
    assert list(results["results"]) == names
    choice = results["samples"]["own_choice"]
    right = []
    for sample in choice:
        values = [response[0][0] for response in sample["resps"]]
        right.append(values.index(max(values)) == sample["target"])
    assert results["results"]["own_choice"]["acc,none"] == sum(right) / 6
    assert results["results"]["own_math"]["exact_match,strict-match"] == 0.0
    assert results["results"]["own_text"]["byte_perplexity,none"] > 1.0
    info = results["config"]
    assert info["diffusionlm_settings"]["likelihood"]["num_mc_samples"] == 16
    assert info["resolved_generation"]["remasking_strategy"] == "low_confidence"
    assert len(info["model_fingerprint"]) == 64 and info["num_truncated_contexts"] == 0
    again = evaluate(*names)
    assert again["results"] == results["results"]
    subset = evaluate("own_choice", samples={"own_choice": [4, 1]})["samples"]["own_choice"]
    by_document = {sample["doc"]["question"]: sample["resps"] for sample in choice}
    for sample in subset:
        for values, expected in zip(sample["resps"], by_document[sample["doc"]["question"]], strict=True):
            assert values[0] == pytest.approx(expected[0], abs=1e-9)


def test_request_cache(evaluate: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("own_choice", "own_math", "own_text")
    path = str(tmp_path / "cache")
    first = evaluate(*names, use_cache=path)
    with pytest.raises(ValueError, match=r"another model.*another file"):
        evaluate("own_choice", use_cache=path, settings={**SETTINGS, "likelihood.seed": 1})
    for method in ("score", "roll", "generate"):
        monkeypatch.setattr(f"diffusionlm.evaluation.lm_eval.runner.RequestRunner.{method}", None)
    assert evaluate(*names, use_cache=path, settings={**SETTINGS, "batch_size": 2})["results"] == first["results"]


def test_repeats_with_a_request_cache(evaluate: Callable[..., Any], tmp_path: Path) -> None:
    """Asked for sampling, the harness does not cache: repeats differ in the second run too. Other repeats would not."""
    path, settings = str(tmp_path / "cache"), {**SETTINGS, "generation.temperature": 1.0}
    arguments = {"until": ["\n"], "max_gen_toks": 12, "do_sample": True}
    config = task("own_math", repeats=2, generation_kwargs=arguments)
    for _ in range(2):
        samples = evaluate(config, use_cache=path, settings=settings)["samples"]["own_math"]
        assert all(len(set(sample["resps"][0])) == 2 for sample in samples)
    for name in ("own_math", "own_text"):
        with pytest.raises(ValueError, match=r"repeats = 2.*do_sample"):
            evaluate(task(name, repeats=2), use_cache=path, settings=settings)


def test_chats(evaluate: Callable[..., Any], model: Transformer, tokenizer: Tokenizer) -> None:
    lm = adapter.DiffusionLM(model, tokenizer)
    history = [{"role": "user", "content": "a hen?"}, {"role": "assistant", "content": "It lays "}]
    opened = lm.apply_chat_template(history, add_generation_prompt=False)
    assert opened.endswith("assistant\nIt lays") and "a hen?<|im_end|>" in opened
    assert lm.apply_chat_template(history[:1]).endswith("<|im_start|>assistant\n")
    assert lm.chat_template(True) == lm.chat_template("chatml") == CHAT_TEMPLATES["chatml"].source
    with pytest.raises(ValueError, match="chat_template=NAME"):
        lm.chat_template("llama3")
    other = adapter.DiffusionLM(model, tokenizer, chat_template="llama3")
    assert other.tokenizer_name != lm.tokenizer_name
    results = evaluate("own_math", num_fewshot=1, apply_chat_template=True, fewshot_as_multiturn=True)
    prompt = results["samples"]["own_math"][0]["arguments"][0][0]
    assert prompt.count("<|im_start|>user") == 2 and prompt.endswith("<|im_start|>assistant\n")


def test_models_of_the_harness_stay_known() -> None:
    from lm_eval.api.registry import get_model, model_registry

    assert get_model("diffusionlm") is adapter.DiffusionLM
    assert {"hf", "vllm", "dummy"} <= set(model_registry)
    from importlib.metadata import entry_points

    (entry,) = entry_points(group="lm_eval.models", name="diffusionlm")
    assert entry.load() is adapter.DiffusionLM


def test_the_harness_alone_does_not_know_the_model() -> None:
    """Version 0.4.13 reads no entry points, as docs/evaluation.md says: change that if this fails with a later one."""
    code = "from lm_eval.api.registry import get_model; get_model('diffusionlm')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert "no model for this name found" in done.stderr


def test_wrong_arguments(model: Transformer, tokenizer: Tokenizer) -> None:
    with pytest.raises(ValueError, match="stepss"):
        adapter.DiffusionLM(model, tokenizer, **{"generation.stepss": 4})
    with pytest.raises(ValueError, match="CUDA_VISIBLE_DEVICES"):
        adapter.DiffusionLM(model, tokenizer, device="cuda:3")
    with pytest.raises(ValueError, match="path=DIR"):
        adapter.DiffusionLM()
    with pytest.raises(ValueError, match="path=DIR"):
        adapter.DiffusionLM(model)
    string = "path=/nowhere,generation.steps=4"
    with pytest.raises(ValueError, match="nowhere"):
        adapter.DiffusionLM.create_from_arg_string(string, {"batch_size": "auto", "device": None})


def test_ranks_change_nothing(evaluate: Callable[..., Any], tmp_path: Path) -> None:
    """Seven documents over two ranks: the last request of the second one is padded."""
    sampled = {"until": ["\n"], "max_gen_toks": 8, "do_sample": True, "temperature": 1.0}
    tasks = ["own_choice", task("own_math", repeats=2, generation_kwargs=sampled), "own_text"]
    expected = evaluate(*tasks)

    def act(world: World) -> Any:
        results = evaluate(*tasks)
        assert (results is None) == (world.rank > 0)
        return None if results is None else (results["results"], results["samples"])

    results, samples = run_ranks(act, tmp_path)[0]
    for name in ("own_choice", "own_math", "own_text"):
        for key, value in expected["results"][name].items():
            assert results[name][key] == (pytest.approx(value, rel=1e-9) if isinstance(value, float) else value)
    texts = {sample["doc_id"]: sample["resps"][0][:2] for sample in samples["own_math"]}
    assert texts == {sample["doc_id"]: sample["resps"][0] for sample in expected["samples"]["own_math"]}


@pytest.fixture(scope="module")
def directory(model: Transformer, tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "model"
    save_model_directory(model.float(), tokenizer, path)
    model.double()
    return path


def test_the_command_line(directory: Path, tmp_path: Path) -> None:
    arguments = [
        "--model_args", f"path={directory}", "likelihood.num_mc_samples=16",
        "--include_path", TASKS, "--tasks", "own_choice,own_math", "own_text",
        "--output_path", str(tmp_path / "out"), "--log_samples", "--use_cache", str(tmp_path / "cache"),
    ]  # fmt: skip
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "DISABLE_MULTIPROC": "1"}
    command = [sys.executable, "-m", "cli", "lm-eval", *arguments]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=240)
    assert result.returncode == 0, result.stderr
    assert "|own_choice|" in result.stdout and "|own_text" in result.stdout
    (written,) = (tmp_path / "out").rglob("results_*.json")
    values = json.loads(written.read_text())
    assert values["config"]["model"] == "diffusionlm" and values["config"]["batch_size"] == "auto"
    assert 0.0 <= values["results"]["own_choice"]["acc,none"] <= 1.0
    assert len(list((tmp_path / "out").rglob("samples_*.jsonl"))) == 3
    assert len(list((tmp_path / "cache").glob("*/requests_rank0.db"))) == 1


def test_wrong_command_lines(
    directory: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for arguments, problem in (
        (["--tasks", "own_choice", "--model_args", f"path={directory}", "generation.stepss=4"], "generation.stepss"),
        (["--tasks", "own_choice"], "path=DIR"),
    ):
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert ended.value.code == 2 and problem in capsys.readouterr().err


def test_each_rank_has_its_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []
    for name, value in {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", calls.append)
    monkeypatch.setattr(adapter.dist, "init_process_group", lambda backend, **ranks: calls.append((backend, ranks)))
    monkeypatch.setattr(adapter.dist, "get_rank", lambda: 3)
    monkeypatch.setattr(adapter.dist, "get_world_size", lambda: 4)
    assert adapter._join_world() == World(3, 4, 1)
    assert calls == [1, ("gloo", {"rank": 3, "world_size": 4})]
