"""Every published protocol from its items to a verdict, with a tiny random model that has its family's token ids."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from config.evaluation.presets import get_preset, load_presets
from diffusionlm.evaluation.tasks.evaluation import evaluate_task
from diffusionlm.evaluation.tasks.items import read_task_items
from diffusionlm.evaluation.tasks.preparation import prepare_items
from diffusionlm.evaluation.tasks.runner import describe_protocol
from diffusionlm.models.transformer import Transformer
from tests.unit.evaluation.tasks.conftest import TASK
from tokenizer import CHAT_TEMPLATES, Tokenizer, train_bpe

pytestmark = pytest.mark.slow

ITEMS: dict[str, list[dict[str, Any]]] = {
    "gsm8k": [{"question": f"What is {n} + {n}?", "answer": f"{n} + {n} = {2 * n} #### {2 * n}"} for n in range(10)],
    "humaneval": [
        {
            "task_id": "one",
            "prompt": 'def one():\n    """Return 1."""\n',
            "canonical_solution": "    return 1\n",
            "test": "def check(candidate):\n    assert candidate() == 1\n",
            "entry_point": "one",
        }
    ],
    "multiple_choice": [{"question": f"{n}?", "choices": ["yes", "no", "maybe so"], "gold": n % 3} for n in range(8)],
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llada": {"vocab_size": 126464, "mask_token_id": 126336, "eos_token_id": 126081, "pad_token_id": 126081},
    "Dream": {
        "vocab_size": 152064, "mask_token_id": 151666, "eos_token_id": 151643, "pad_token_id": 151643,
        "logit_alignment": "shifted",
    },
    "sdar": {
        "vocab_size": 151936, "mask_token_id": 151669, "eos_token_id": 151643, "pad_token_id": 151643,
        "block_length": 4,
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    text = json.dumps(ITEMS)
    return train_bpe([text] * 2, vocab_size=300).with_chat_template(CHAT_TEMPLATES["chatml"])


@pytest.fixture(scope="module")
def models(tiny_model: Callable[..., Transformer]) -> dict[str, Transformer]:
    sizes = {"hidden_size": 8, "head_dim": 2, "num_hidden_layers": 1, "max_position_embeddings": 4096}
    return {name: tiny_model(**sizes, **values) for name, values in FAMILIES.items()}


@pytest.mark.parametrize("name", [name for name, preset in load_presets().items() if preset.kind is not None])
def test_dry_run(name: str, tokenizer: Tokenizer, models: dict[str, Transformer], tmp_path: Path) -> None:
    """With 8 tokens in place of the published length, which is reported as the only deviation."""
    preset = get_preset(name)
    assert preset.kind is not None
    path = tmp_path / "items.jsonl"
    path.write_text("".join(json.dumps(item) + "\n" for item in ITEMS[preset.kind]))
    values: dict[str, Any] = {"kind": preset.kind, "preset": name, "data": path, "limit": 1}
    short: dict[str, int] = {}
    if "generation" in preset.values:
        published = preset.values["generation"]
        short = {key: 8 for key in ("max_new_tokens", "steps", "block_length") if published.get(key, 0) > 8}
        values["generation"] = short
    if preset.values["prompt"].get("shots"):
        values["prompt"] = {"shots_data": path}
    if preset.kind == "humaneval":
        values["run_code"] = True
    task = TASK.validate_python(values)
    model, items = models[preset.family], read_task_items(task)
    prepared = prepare_items(task, items, tokenizer, model.config)
    (result,) = evaluate_task(model.eval(), prepared)
    assert result.error is None and result.num_forwards > 0
    assert result.is_correct.keys() == set(task.rules)
    if preset.kind == "humaneval":
        assert result.detail is not None and result.detail.startswith("failed: ")
    deviations = describe_protocol(prepared)["deviations"]
    assert sorted(text.partition(" ")[0] for text in deviations) == sorted(f"generation.{key}" for key in short)
