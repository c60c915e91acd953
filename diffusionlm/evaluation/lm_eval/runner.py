"""Answers requests of lm-evaluation-harness with a model. It does not import the harness."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from config.evaluation.lm_eval import LmEvalConfig
from config.generation import DISTRIBUTION_KEYS, GenerationConfig
from diffusionlm.evaluation.answer_decoding import AnswerRequest, decode_answers
from diffusionlm.evaluation.likelihood.scoring import (
    OptionsRequest,
    score_documents,
    score_texts,
)
from diffusionlm.evaluation.pair_encoding import EncodedPair, PairEncoder
from diffusionlm.evaluation.sampler_likelihood import greedy_matches
from diffusionlm.inference.request_builder import prepare_request, suppress_ids_without_text
from diffusionlm.inference.settings import DecodingSettings, resolve_settings
from diffusionlm.models.transformer import Transformer
from files.usage_error import prefix_errors
from tokenizer import Tokenizer

DEFAULT_NEW_TOKENS = 256
"""Length of an answer if neither the task nor the settings say it, as with the harness's own models."""
LENGTH_KEYS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
"""Spellings of the length of an answer, in tasks and on the command line."""
SAMPLING_KEYS = ("temperature", *DISTRIBUTION_KEYS)
NEUTRAL_VALUES: dict[str, tuple[object, ...]] = {
    "do_sample": (True, False, None),
    "num_beams": (1,),
    "num_return_sequences": (1,),
    "use_cache": (True, False),
}
"""Arguments that tasks write and diffusion has no use for -> values that change nothing."""
DOCUMENTS_PER_CALL = 64
"""Documents that are scored before their results are passed on, so that an interrupted run loses little."""
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
class NumberedRequest:
    """One repeat of an instance."""

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

    @property
    def label(self) -> str:
        """What errors call the request."""
        return f"task {self.instance.task_name}, document {getattr(self.instance, 'doc_id', None)}"

    def answer_seed(self, seed: int) -> int:
        """Seed of the answer, which differs between the requests of a document."""
        return _hash_key(seed, self.document_key, self.instance.idx)


def number_repeats(instances: Sequence[HarnessRequest]) -> list[NumberedRequest]:
    """Number the repeats of each instance: the harness passes the same object once for each. With several ranks it
    appends the last request again, so that all have equally many; those are answered like its first repeats."""
    counts: dict[int, int] = {}
    requests = []
    for instance in instances:
        count = counts.get(id(instance), 0)
        counts[id(instance)] = count + 1
        requests.append(NumberedRequest(instance, count % (instance.repeats or 1)))
    return requests


def _hash_key(*parts: object) -> int:
    text = json.dumps(parts, sort_keys=True, default=repr)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8]) >> (64 - _KEY_BITS)


def parse_generation_arguments(
    arguments: Mapping[str, Any], defaults: GenerationConfig
) -> tuple[tuple[str, ...], GenerationConfig]:
    """Combine the arguments of a request of ``generate_until`` with the settings of the model.

    The request's length wins. Its `SAMPLING_KEYS` win if they ask for sampling (do_sample = true), or if the settings
    leave them open: tasks ask for greedy decoding by default, and would overwrite the published settings
    of a model. All other keys of `GenerationConfig` may be arguments too, and win.

    Returns:
        The stop strings, and the settings of the answer.

    Raises:
        ValueError: a key is unknown or has a value that diffusion cannot follow, spellings of the length contradict
            each other, or the settings do not fit each other.
    """
    values = dict(arguments)
    until = _parse_until(values.pop("until", None))
    lengths = {key: values.pop(key) for key in LENGTH_KEYS if key in values}
    lengths = {key: length for key, length in lengths.items() if length is not None}
    if len(set(lengths.values())) > 1:
        spelled = " and ".join(f"{key} = {length}" for key, length in lengths.items())
        raise ValueError(f"generation arguments {spelled} contradict each other: keep one of them")
    do_sample = values.get("do_sample")
    for key in NEUTRAL_VALUES.keys() & values.keys():
        if (value := values.pop(key)) not in NEUTRAL_VALUES[key]:
            raise ValueError(f"generation argument {key} = {value!r} has no meaning for diffusion: remove it")
    for key in values.keys() - GenerationConfig.model_fields.keys():
        raise ValueError(
            f"generation argument {key} = {values[key]!r} is unknown: remove it from the task or from --gen_kwargs; "
            f"lengths are {', '.join(LENGTH_KEYS)}, and all keys of [generation] are possible"
        )
    if do_sample is False:
        values.setdefault("temperature", 0.0)
    chosen = {key: getattr(defaults, key) for key in defaults.model_fields_set}
    for key in SAMPLING_KEYS:
        if chosen.get(key) is not None and not do_sample:
            values.pop(key, None)
    if lengths:
        values |= {"max_new_tokens": next(iter(lengths.values())), "total_length": None}
    elif defaults.max_new_tokens is None and defaults.total_length is None:
        values["max_new_tokens"] = DEFAULT_NEW_TOKENS
    return until, GenerationConfig.model_validate({**chosen, **values})


def _parse_until(value: Any) -> tuple[str, ...]:
    """The stop strings; a single one may stand by itself, and empty ones are none."""
    texts = [value] if isinstance(value, str) else list(value or ())
    for text in texts:
        if not isinstance(text, str):
            raise ValueError(f"generation argument until has {text!r}: expected a text or a list of texts")
    return tuple(dict.fromkeys(text for text in texts if text))


class RequestRunner:
    """A model with its settings. The results of requests are pairs of an index among them and a result, which come as
    soon as they are computed; all requests are checked before the first forward."""

    def __init__(self, model: Transformer, tokenizer: Tokenizer, config: LmEvalConfig) -> None:
        self.model, self.tokenizer, self.config = model, tokenizer, config
        self.encoder = PairEncoder(tokenizer, model.config)
        self.num_truncated = 0
        """Contexts that have lost their first tokens."""
        self._settings: dict[GenerationConfig, DecodingSettings] = {}

    @property
    def max_length(self) -> int:
        return self.model.config.max_position_embeddings

    def resolve_generation(self, config: GenerationConfig) -> DecodingSettings:
        """The settings with the defaults of the model; built once."""
        if config not in self._settings:
            complete = suppress_ids_without_text(config, self.tokenizer, self.model.config)
            self._settings[config] = resolve_settings(complete, self.model.config)
        return self._settings[config]

    def generate(self, instances: Sequence[HarnessRequest]) -> Iterator[tuple[int, str]]:
        """Answer requests of ``generate_until``."""
        requests = [self._prepare(request) for request in number_repeats(instances)]
        for index, answer in decode_answers(self.model, self.tokenizer, requests, self.config.batch_size):
            yield index, answer.text

    def score(self, instances: Sequence[HarnessRequest]) -> Iterator[tuple[int, tuple[float, bool]]]:
        """Answer requests of ``loglikelihood``: log-likelihoods in nats, and whether greedy decoding yields the
        continuation.

        Continuations of a document after the same context are its options: all exact or all sampled, with common random
        numbers. An empty continuation has probability one.
        """
        requests = number_repeats(instances)
        pairs = [self._encode_pair(request) for request in requests]
        documents: dict[tuple[tuple[int, int | None], tuple[int, ...]], list[int]] = {}
        continuations: dict[tuple[int, int | None], set[tuple[Any, ...]]] = {}
        for index, (request, pair) in enumerate(zip(requests, pairs, strict=True)):
            continuations.setdefault(request.document_identity, set()).add(request.instance.args)
            if pair.continuation_ids:
                documents.setdefault((request.document_identity, pair.context_ids), []).append(index)
            else:
                yield index, (0.0, self.config.is_greedy != "never")
        groups = [
            (OptionsRequest(context_ids, tuple(pairs[index].continuation_ids for index in indices), key), indices)
            for ((key, _), context_ids), indices in documents.items()
        ]
        for start in range(0, len(groups), DOCUMENTS_PER_CALL):
            part = groups[start : start + DOCUMENTS_PER_CALL]
            scores = score_documents(self.model, [document for document, _ in part], self.config.likelihood)
            indices = [index for _, own in part for index in own]
            compared = [i for i in indices if self._compares(len(continuations[requests[i].document_identity]))]
            singles = [OptionsRequest(pairs[i].context_ids, (pairs[i].continuation_ids,)) for i in compared]
            matches = dict(zip(compared, greedy_matches(self.model, singles, self.config.likelihood), strict=True))
            values = [value for score in scores for value in score.log_likelihoods]
            for index, value in zip(indices, values, strict=True):
                yield index, (value, matches.get(index, False))

    def roll(self, instances: Sequence[HarnessRequest]) -> Iterator[tuple[int, float]]:
        """Answer requests of ``loglikelihood_rolling``: log-likelihoods of whole texts, in nats. Each text is scored by
        itself, in disjoint windows, after the token that stands for an empty context.
        """
        texts: list[tuple[int, OptionsRequest]] = []
        for index, request in enumerate(number_repeats(instances)):
            pair = self.encoder.encode_pair("", request.instance.args[0])
            if pair.continuation_ids:
                text = OptionsRequest(pair.context_ids[-1:], (pair.continuation_ids,), request.document_key)
                texts.append((index, text))
            else:
                yield index, 0.0
        for start in range(0, len(texts), DOCUMENTS_PER_CALL):
            part = texts[start : start + DOCUMENTS_PER_CALL]
            scores = score_texts(self.model, [text for _, text in part], self.config.window, self.config.likelihood)
            for (index, _), score in zip(part, scores, strict=True):
                yield index, score

    def _compares(self, num_continuations: int) -> bool:
        """Whether the continuations of a document with so many different ones are compared with greedy decoding."""
        choice = self.config.is_greedy
        return choice == "always" or (choice == "auto" and num_continuations == 1)

    def _encode_pair(self, request: NumberedRequest) -> EncodedPair:
        with prefix_errors(request.label):
            pair = self.encoder.encode_pair(*request.instance.args)
            return EncodedPair(self._truncate(pair.context_ids, len(pair.continuation_ids)), pair.continuation_ids)

    def _prepare(self, request: NumberedRequest) -> AnswerRequest:
        context, arguments = request.instance.args
        with prefix_errors(request.label):
            until, config = parse_generation_arguments(arguments, self.config.generation)
            settings = self.resolve_generation(config)
            prompt_ids = self.encoder.encode(context) if context else self.encoder.encode_pair("", "").context_ids
            prompt_ids = self._truncate(prompt_ids, settings.config.max_new_tokens or 1)
        return prepare_request(settings, prompt_ids, request.answer_seed(self.config.seed), label=request.label), until

    def _truncate(self, context_ids: tuple[int, ...], num_following: int) -> tuple[int, ...]:
        """Shorten a context from the left, so that the tokens after it fit into the model's context."""
        num_excess = len(context_ids) + num_following - self.max_length
        if num_excess <= 0:
            return context_ids
        lengths = f"{len(context_ids)} tokens and {num_following} after them"
        if num_excess >= len(context_ids):
            raise ValueError(
                f"{lengths} leave no room for a context in max_position_embeddings = {self.max_length}: "
                "let the answer be shorter (max_gen_toks)"
            )
        if self.config.truncation == "error":
            raise ValueError(
                f"{lengths} are more than max_position_embeddings = {self.max_length}: use fewer examples, or set "
                'truncation = "left"'
            )
        self.num_truncated += 1
        return context_ids[num_excess:]
