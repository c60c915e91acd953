"""Published evaluation protocols as rows. What a row leaves open has the default of the task or of the model's family.

The sources were read at these commits: LLaDA b7e6c35, Dream fac0a7f, SDAR c2041a8, dLLM ca17675, Fast-dLLM 24cc59e.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from config.dump import format_value
from config.generation import STRATEGY_KEYS

LLADA_EOS, LLADA_EOT = 126081, 126348
"""<|endoftext|> and <|eot_id|> of LLaDA's vocabulary."""
COT = "{question}\nPlease reason step by step, and put your final answer within \\boxed{{}}."
LLADA_COT = "Question: {question}\nLet's think step by step\nAnswer:"
UNPUBLISHED_KEYS = ("data", "shots_data", "name", "limit", "item_ids", "id_field", "seed", "repeats", "batch_size",
                    "run_code", "timeout_seconds", "preset")  # fmt: skip
"""Keys of a task that no protocol sets: where items are, how many, and how they are computed."""

EXCLUSIVE_KEYS = (("steps", "denoising_steps"), ("max_new_tokens", "total_length"))


@dataclass(frozen=True)
class Preset:
    """A protocol with which a score was published."""

    family: Literal["llada", "Dream", "sdar"]
    """model_type of the models that it is for."""
    source: str
    """File of the publication's repository, or its table."""
    values: Mapping[str, Any]
    """Keys of a task with its `kind`; without a kind those of its generation or likelihood alone, for tasks of
    lm-evaluation-harness."""
    score: float | None = None
    """Accuracy in percent that the source reports. None: none, or for another task."""
    model: str = ""
    """Model of the score, on the Hugging Face Hub."""

    @property
    def kind(self) -> str | None:
        """Kind of the own task; None: the protocol is for a task of lm-evaluation-harness."""
        kind: str | None = self.values.get("kind")
        return kind


def _generation(length: int, *, blocks: int | None = None, steps: int | None = None, **keys: Any) -> dict[str, Any]:
    """A canvas with one block and one step for each token, unless the protocol has others."""
    values = {"max_new_tokens": length, "block_length": blocks or length, "steps": steps or length}
    return values | {"temperature": 0.0, "remasking_strategy": "low_confidence"} | keys


def _dream(length: int, **keys: Any) -> dict[str, Any]:
    values = {"max_new_tokens": length, "steps": length, "remasking_strategy": "entropy", "temperature": 0.0}
    return values | keys


def _sdar(**keys: Any) -> dict[str, Any]:
    values = {"max_new_tokens": 4096, "block_length": 4, "denoising_steps": 4, "temperature": 1.0, "top_k": 1}
    return values | {"remasking_strategy": "low_confidence_static", "confidence_from": "unfiltered"} | keys


def _chat(template: str | None = None, shots: int = 0, **keys: Any) -> dict[str, Any]:
    values: dict[str, Any] = {"format": "chat"} | ({} if template is None else {"template": template})
    return values | ({"shots": shots} if shots else {}) | keys


def _gsm8k(prompt: dict[str, Any], generation: dict[str, Any], **keys: Any) -> dict[str, Any]:
    return {"kind": "gsm8k", "prompt": prompt, "generation": generation, **keys}


def _humaneval(generation: dict[str, Any], prompt: dict[str, Any] | None = None, *stop: str) -> dict[str, Any]:
    """A completion with the task's stops, or with a prompt the first code block of a chat's answer."""
    if prompt is None:
        return {"kind": "humaneval", "generation": generation, "answer": "completion", "prompt": {}}
    return {"kind": "humaneval", "generation": generation, "answer": "code_block", "prompt": prompt, "stop": list(stop)}


def _draws(num_mc_samples: int, **keys: Any) -> dict[str, Any]:
    return {"likelihood": {"num_mc_samples": num_mc_samples, "racing": False, **keys}}


def _options(num_mc_samples: int, **keys: Any) -> dict[str, Any]:
    return {"kind": "multiple_choice", "score": "texts", "prompt": {}, **_draws(num_mc_samples, **keys)}


_BASE, _INSTRUCT = "GSAI-ML/LLaDA-8B-Base", "GSAI-ML/LLaDA-8B-Instruct"
_DREAM_BASE, _DREAM_INSTRUCT = "Dream-org/Dream-v0-Base-7B", "Dream-org/Dream-v0-Instruct-7B"
_SDAR = "JetLM/SDAR-8B-Chat"
_LLADA_BASE = "LLaDA: eval_llada.py, EVAL.md (lm-evaluation-harness)"
_LLADA_INSTRUCT = "LLaDA: EVAL.md (OpenCompass)"
_DREAM_HARNESS = "Dream: eval (lm-evaluation-harness)"
_DREAM_CHAT = "Dream: eval_instruct (lm-evaluation-harness)"
_SDAR_COMPASS = "SDAR: evaluation (OpenCompass)"
_FAST = "Fast-dLLM: v1/llada (lm-evaluation-harness)"
_HUMANEVAL_INSTRUCT = _chat(
    "Write a solution to the following problem and make sure that it passes the tests:\n```python\n{prompt}\n```\n",
    answer_prefix="Here is the completed function:\n```python\n{prompt}\n",
)
"""Task humaneval_instruct of lm-evaluation-harness 0.4.13: the answer continues a code block with the prompt."""
_HUMANEVAL_INSTRUCT_STOPS = ("\nclass", "\ndef", "\n#", "\nif", "\nprint", "```")
_DEFERRED: dict[str, Any] = {"defer_token_ids": [LLADA_EOS, LLADA_EOT]}
"""The confidence of the end of text is minus infinity: the cure of LLaDA's flood of <|endoftext|>."""

PRESETS: dict[str, Preset] = {
    "llada-base/gsm8k": Preset(
        "llada", _LLADA_BASE, _gsm8k({"shots": 5}, _generation(1024)), score=70.3, model=_BASE
    ),
    "llada-base/humaneval": Preset("llada", _LLADA_BASE, _humaneval(_generation(1024)), score=35.4, model=_BASE),
    "llada-base/mmlu": Preset("llada", _LLADA_BASE, _draws(1), score=65.9, model=_BASE),
    "llada-base/arc-challenge": Preset("llada", _LLADA_BASE, _options(128), score=45.9, model=_BASE),
    "llada-base/piqa": Preset("llada", _LLADA_BASE, _options(128), score=73.6, model=_BASE),
    "llada-base/math": Preset("llada", _LLADA_BASE, {"generation": _generation(1024)}, score=31.4, model=_BASE),
    "llada-base/mbpp": Preset("llada", _LLADA_BASE, {"generation": _generation(1024)}, score=40.0, model=_BASE),
    "llada-base/bbh": Preset("llada", _LLADA_BASE, {"generation": _generation(1024)}, score=49.7, model=_BASE),
    "llada-instruct/gsm8k": Preset(
        "llada",
        _LLADA_INSTRUCT,
        _gsm8k(_chat(LLADA_COT, shots=4), _generation(512, **_DEFERRED), extraction=["flexible"], stop=[]),
        score=69.4,
        model=_INSTRUCT,
    ),
    "llada-instruct/gsm8k-blocks": Preset(
        "llada",
        "LLaDA: EVAL.md, small blocks",
        _gsm8k(_chat(LLADA_COT, shots=4), _generation(256, blocks=8), extraction=["flexible"], stop=[]),
        score=78.6,
        model=_INSTRUCT,
    ),
    "llada-instruct/humaneval": Preset(
        "llada",
        _LLADA_INSTRUCT,
        _humaneval(_generation(512, suppress_token_ids=[LLADA_EOS]), _chat()),
        score=49.4,
        model=_INSTRUCT,
    ),
    "llada-instruct/math": Preset(
        "llada", _LLADA_INSTRUCT, {"generation": _generation(512, **_DEFERRED)}, score=31.9, model=_INSTRUCT
    ),
    "llada-instruct/math-blocks": Preset(
        "llada", "LLaDA: EVAL.md, small blocks", {"generation": _generation(512, blocks=64)}, score=42.2,
        model=_INSTRUCT,
    ),
    "llada-instruct/gpqa": Preset(
        "llada", _LLADA_INSTRUCT, {"generation": _generation(64, **_DEFERRED)}, score=33.3, model=_INSTRUCT
    ),
    "dream-base/gsm8k": Preset(
        "Dream",
        _DREAM_HARNESS,
        _gsm8k({"template": "Q: {question}\nA:", "shots": 8}, _dream(256), extraction=["flexible"], stop=["Q:"]),
        score=77.2,
        model=_DREAM_BASE,
    ),
    "dream-base/humaneval": Preset(
        "Dream", _DREAM_HARNESS, _humaneval(_dream(512, temperature=0.2, top_p=0.95)), score=57.9, model=_DREAM_BASE
    ),
    "dream-base/math": Preset("Dream", _DREAM_HARNESS, {"generation": _dream(512)}, score=39.6, model=_DREAM_BASE),
    "dream-base/mbpp": Preset(
        "Dream", _DREAM_HARNESS, {"generation": _dream(512, temperature=0.2, top_p=0.95)}, score=56.2,
        model=_DREAM_BASE,
    ),
    "dream-base/arc-challenge": Preset(
        "Dream", _DREAM_HARNESS, _options(128, end_of_text="unscored"), score=59.9, model=_DREAM_BASE
    ),
    "dream-instruct/gsm8k": Preset(
        "Dream",
        _DREAM_CHAT,
        _gsm8k(
            _chat("Q: {question}\nA:"),
            _dream(256, temperature=0.1, top_p=0.9),
            extraction=["flexible"],
            stop=["Q:"],
        ),
        score=81.0,
        model=_DREAM_INSTRUCT,
    ),
    "dream-instruct/humaneval": Preset(
        "Dream",
        _DREAM_CHAT,
        _humaneval(_dream(768, temperature=0.1, top_p=0.9), _HUMANEVAL_INSTRUCT, *_HUMANEVAL_INSTRUCT_STOPS),
        score=55.5,
        model=_DREAM_INSTRUCT,
    ),
    "dream-instruct/mmlu": Preset(
        "Dream", _DREAM_CHAT, {"generation": _dream(128, temperature=0.1, top_p=0.9)}, score=67.0,
        model=_DREAM_INSTRUCT,
    ),
    "dream-instruct/mbpp": Preset(
        "Dream", _DREAM_CHAT, {"generation": _dream(1024, temperature=0.1, top_p=0.9)}, score=58.8,
        model=_DREAM_INSTRUCT,
    ),
    "dream-instruct/ifeval": Preset(
        "Dream", _DREAM_CHAT, {"generation": _dream(1280, temperature=0.1, top_p=0.9)}, score=62.5,
        model=_DREAM_INSTRUCT,
    ),
    "sdar-chat/gsm8k": Preset(
        "sdar", _SDAR_COMPASS, _gsm8k(_chat(COT), _sdar(), extraction=["boxed", "flexible"], stop=[]), score=91.3,
        model=_SDAR,
    ),
    "sdar-chat/gsm8k-dynamic": Preset(
        "sdar",
        _SDAR_COMPASS,
        _gsm8k(
            _chat(COT),
            _sdar(remasking_strategy="low_confidence_dynamic", confidence_threshold=0.95),
            extraction=["boxed", "flexible"],
            stop=[],
        ),
        model=_SDAR,
    ),
    "sdar-chat/humaneval": Preset(
        "sdar", _SDAR_COMPASS, _humaneval(_sdar(), _chat()), score=78.7, model=_SDAR
    ),
    "fast-dllm/gsm8k": Preset(
        "llada",
        f"{_FAST}, prefix cache and parallel",
        _gsm8k(
            _chat(shots=5, shots_as="text"),
            {
                "max_new_tokens": 256,
                "block_length": 32,
                "remasking_strategy": "threshold",
                "confidence_threshold": 0.9,
                "cache": "prefix",
                "temperature": 0.0,
            },
        ),
        score=78.5,
        model=_INSTRUCT,
    ),
    "fast-dllm/gsm8k-baseline": Preset(
        "llada",
        f"{_FAST}, without cache",
        _gsm8k(_chat(shots=5, shots_as="text"), _generation(256, blocks=32)),
        score=79.3,
        model=_INSTRUCT,
    ),
    "dllm/llada-base-arc-challenge": Preset(
        "llada", "dLLM: examples/llada (mc 32)", _options(32), score=44.1, model=_BASE
    ),
    "dllm/llada-base-piqa": Preset("llada", "dLLM: examples/llada (mc 32)", _options(32), score=70.7, model=_BASE),
}  # fmt: skip
"""Name -> protocol: publication and model / task."""


def get_preset(name: str) -> Preset:
    """Look a protocol up.

    Raises:
        ValueError: there is none of this name; lists those of the same publication, or all.
    """
    if name not in PRESETS:
        publication = name.partition("/")[0]
        similar = [other for other in PRESETS if other.partition("/")[0] == publication] or list(PRESETS)
        raise ValueError(f'preset = "{name}" is no published protocol: choose one of {", ".join(similar)}')
    return PRESETS[name]


def describe_kind(name: str) -> str:
    """Say which tasks a protocol is for."""
    kind = get_preset(name).kind
    if kind is None:
        return "it is for a task of lm-evaluation-harness (diffusionlm-lm-eval --model_args preset=NAME)"
    return f'it is for kind = "{kind}"'


def apply_preset(name: str, changes: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a protocol with changes, which win.

    Of keys that exclude each other, the protocol's gives way; with another strategy, its options do.

    Raises:
        ValueError: there is no such protocol.
    """
    return _merge(get_preset(name).values, changes)


def _merge(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    removed = {other for pair in EXCLUSIVE_KEYS for key, other in (pair, pair[::-1]) if changes.get(key) is not None}
    if changes.get("remasking_strategy", values.get("remasking_strategy")) != values.get("remasking_strategy"):
        removed |= {"confidence_from", *STRATEGY_KEYS} - {"remasking_strategy"}
    merged = {
        key: _merge(value, {}) if isinstance(value, Mapping) else value
        for key, value in values.items()
        if key not in removed
    }
    for key, value in changes.items():
        old = merged.get(key)
        merged[key] = _merge(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return merged


def list_deviations(name: str, values: Mapping[str, Any]) -> list[str]:
    """What differs from a published protocol, as ``key = value (published: value)``.

    Args:
        values: those of the task, complete or as far as they are set.
    """
    return list(_compare(get_preset(name).values, values, ""))


def _compare(published: Mapping[str, Any], values: Mapping[str, Any], prefix: str) -> Iterator[str]:
    for key, expected in published.items():
        value = values.get(key)
        if isinstance(expected, Mapping):
            yield from _compare(expected, value if isinstance(value, Mapping) else {}, f"{prefix}{key}.")
        elif _plain(value) != _plain(expected):
            yield f"{prefix}{key} = {_format(value)} (published: {_format(expected)})"
    for key, value in values.items():
        if key not in published and (prefix or key not in UNPUBLISHED_KEYS) and key != "shots_data":
            yield f"{prefix}{key} = {_format(value)} (published: the default)"


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _format(value: Any) -> str:
    return "the default" if value is None else format_value(value)
