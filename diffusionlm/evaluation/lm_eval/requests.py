"""Requests of lm-evaluation-harness: repeats, padding of ranks, random keys, and arguments of generation. No torch."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from config.generation import GenerationConfig

DEFAULT_NEW_TOKENS = 256
"""Length of an answer if neither the task nor the settings say it, as with the harness's own models."""
LIMIT_KEYS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
"""Spellings of the length of an answer, in tasks and on the command line."""
SAMPLING_KEYS = ("temperature", "top_p", "top_k")
NEUTRAL_VALUES: dict[str, tuple[object, ...]] = {
    "do_sample": (True, False, None),
    "num_beams": (1,),
    "num_return_sequences": (1,),
    "repetition_penalty": (1.0,),
    "frequency_penalty": (0.0,),
    "presence_penalty": (0.0,),
    "min_p": (0.0,),
    "use_cache": (True, False),
}
"""Arguments that tasks write and diffusion has no use for -> values that change nothing."""
_KEY_BITS = 62


class HarnessRequest(Protocol):
    """What is read of an `lm_eval.api.instance.Instance`."""

    doc: Any
    idx: int
    task_name: str | None
    repeats: int | None

    @property
    def args(self) -> tuple[Any, ...]: ...


@dataclass(frozen=True)
class UniqueRequest:
    """A request that is computed: one repeat of an instance."""

    instance: HarnessRequest
    repeat: int

    @property
    def document_key(self) -> int:
        """A number that all options of a document share, of this repeat. It depends on the task and the document alone,
        so not on limits, order, neighbors or ranks."""
        return _hash_key(self.instance.task_name, self.instance.doc or self.instance.args, self.repeat)

    @property
    def document_identity(self) -> tuple[int, int | None]:
        """What the options of a document share, of this repeat, and another document with the same content does not."""
        return self.document_key, getattr(self.instance, "doc_id", None)

    def answer_seed(self, seed: int) -> int:
        """Seed of the answer, which differs between the requests of a document."""
        return _hash_key(seed, self.document_key, self.instance.idx)


def find_unique_requests(instances: Sequence[HarnessRequest]) -> tuple[list[UniqueRequest], list[int]]:
    """Number the repeats of each instance, and leave out those that only fill up a rank.

    The harness passes the same object once for each repeat. With several ranks it appends the last request again, so
    that all ranks have equally many: those are answered like its first repeats.

    Returns:
        The requests to compute, and for each instance the index of its request.
    """
    requests: list[UniqueRequest] = []
    indices: dict[tuple[int, int], int] = {}
    counts: dict[int, int] = {}
    places = []
    for instance in instances:
        count = counts.get(id(instance), 0)
        counts[id(instance)] = count + 1
        repeat = count % (instance.repeats or 1)
        place = indices.setdefault((id(instance), repeat), len(requests))
        if place == len(requests):
            requests.append(UniqueRequest(instance, repeat))
        places.append(place)
    return requests, places


def check_cacheable(
    method: str, requests: Sequence[HarnessRequest], is_random: Callable[[HarnessRequest], bool]
) -> None:
    """Check that a request cache of the harness, which keeps one result for each text, is no loss.

    Raises:
        ValueError: a request with random results has repeats, or may have some in a later run.
    """
    for request in requests:
        if method == "generate_until":
            if is_random(request) and not request.args[1].get("do_sample"):
                raise ValueError(
                    f"task {request.task_name}: answers are random, and the request cache would give all repeats the "
                    "same: add do_sample=true to --gen_kwargs, with which they are not cached, or leave out --use_cache"
                )
        elif (request.repeats or 1) > 1:
            raise ValueError(
                f"task {request.task_name}: repeats = {request.repeats} of likelihoods would all get the same value "
                "from the request cache: leave out --use_cache"
            )


def _hash_key(*parts: object) -> int:
    text = json.dumps(parts, sort_keys=True, default=repr)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8]) >> (64 - _KEY_BITS)


@dataclass(frozen=True)
class GenerationArguments:
    """Arguments of ``generate_until``, in our terms."""

    until: tuple[str, ...]
    """The answer ends before the first of these texts."""
    config: GenerationConfig

    @classmethod
    def parse(cls, arguments: Mapping[str, Any], defaults: GenerationConfig) -> GenerationArguments:
        """Combine the arguments of a request with the settings of the model.

        The request's length wins. Its temperature, top_p and top_k win if they ask for sampling (do_sample = true), or
        if the settings leave them open: tasks ask for greedy decoding by default, and would overwrite the published
        settings of a model. All other keys of `GenerationConfig` may be arguments too, and win.

        Raises:
            ValueError: a key is unknown or has a value that diffusion cannot follow, spellings of the length contradict
                each other, or the settings do not fit each other.
        """
        values = dict(arguments)
        until = _parse_until(values.pop("until", None))
        limit = _pop_limit(values)
        do_sample = values.get("do_sample")
        _check_known(values)
        values = {key: value for key, value in values.items() if key not in NEUTRAL_VALUES}
        if do_sample is False:
            values.setdefault("temperature", 0.0)
        if values.get("top_k") in (0, -1):  # as vLLM and transformers spell that there is no bound
            values["top_k"] = None
        for key in SAMPLING_KEYS:
            is_set = key in defaults.model_fields_set and getattr(defaults, key) is not None
            if is_set and not do_sample:
                values.pop(key, None)
        if limit is None and defaults.max_new_tokens is None and defaults.total_length is None:
            limit = DEFAULT_NEW_TOKENS
        if limit is not None:
            values |= {"max_new_tokens": limit, "total_length": None}
        chosen = {key: getattr(defaults, key) for key in defaults.model_fields_set}
        return cls(until, GenerationConfig.model_validate({**chosen, **values}))


def _check_known(values: Mapping[str, Any]) -> None:
    """Check that no argument would be ignored.

    Raises:
        ValueError: one would; names it.
    """
    for key, value in values.items():
        if key in NEUTRAL_VALUES and value not in NEUTRAL_VALUES[key]:
            raise ValueError(f"generation argument {key} = {value!r} has no meaning for diffusion: remove it")
        if key not in NEUTRAL_VALUES and key not in GenerationConfig.model_fields:
            raise ValueError(
                f"generation argument {key} = {value!r} is unknown: remove it from the task or from --gen_kwargs; "
                f"lengths are {', '.join(LIMIT_KEYS)}, and all keys of [generation] are possible"
            )


def _parse_until(value: Any) -> tuple[str, ...]:
    """The stop strings; a single one may stand by itself, and empty ones are none."""
    texts = [value] if isinstance(value, str) else list(value or ())
    for text in texts:
        if not isinstance(text, str):
            raise ValueError(f"generation argument until has {text!r}: expected a text or a list of texts")
    return tuple(dict.fromkeys(text for text in texts if text))


def _pop_limit(values: dict[str, Any]) -> int | None:
    """Remove all spellings of the length, and return it."""
    limits = {key: values.pop(key) for key in LIMIT_KEYS if key in values}
    limits = {key: limit for key, limit in limits.items() if limit is not None}
    if len(set(limits.values())) > 1:
        spelled = " and ".join(f"{key} = {limit}" for key, limit in limits.items())
        raise ValueError(f"generation arguments {spelled} contradict each other: keep one of them")
    key, limit = next(iter(limits.items()), (None, None))
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 1):
        raise ValueError(f"generation argument {key} = {limit!r} must be a whole number of at least 1")
    return limit
