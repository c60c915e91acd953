"""Metrics in the text format of Prometheus, with vLLM's names, and the forwards of a diffusion model."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise

from diffusionlm.inference.scheduler import TOKEN_BOUNDS
from diffusionlm.serving.engine import Engine
from diffusionlm.serving.http.answers import Choice

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_FIRST_TOKEN_SECONDS = (
    .001, .005, .01, .02, .04, .06, .08, .1, .25, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560,
)  # fmt: skip
_TOKEN_SECONDS = (.001, .0025, .005, .01, .025, .05, .075, .1, .15, .2, .3, .4, .5, .75, 1, 2.5, 5, 10)  # fmt: skip
_REQUEST_SECONDS = (.03, .1, .3, .5, .8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)  # fmt: skip
_COUNTS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
_TOKENS_PER_FORWARD = (.25, .5, .75, 1, 1.5, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64)  # fmt: skip

_HISTOGRAMS: dict[str, tuple[str, Sequence[float]]] = {
    "vllm:time_to_first_token_seconds": ("From arrival to the first final token.", _FIRST_TOKEN_SECONDS),
    "vllm:inter_token_latency_seconds": ("Between two arrivals of final tokens.", _TOKEN_SECONDS),
    "vllm:request_time_per_output_token_seconds": ("Decoding time of a request by its tokens.", _TOKEN_SECONDS),
    "vllm:e2e_request_latency_seconds": ("From arrival to the end.", _REQUEST_SECONDS),
    "vllm:request_queue_time_seconds": ("From arrival to the first forward.", _REQUEST_SECONDS),
    "vllm:request_prefill_time_seconds": ("From the first forward to the first final token.", _REQUEST_SECONDS),
    "vllm:request_decode_time_seconds": ("From the first final token to the end.", _REQUEST_SECONDS),
    "vllm:request_inference_time_seconds": ("From the first forward to the end.", _REQUEST_SECONDS),
    "vllm:request_prompt_tokens": ("Tokens of a prompt.", _COUNTS),
    "vllm:request_generation_tokens": ("New tokens of a request.", _COUNTS),
    "diffusionlm:request_forwards": ("Forwards of a request.", _COUNTS),
    "diffusionlm:request_tokens_per_forward": ("New tokens of a request by its forwards.", _TOKENS_PER_FORWARD),
}


def _histogram_lines(
    name: str, labels: str, bounds: Sequence[float], counts: Sequence[int], value_sum: float
) -> Iterator[str]:
    total = 0
    for bound, count in zip([*bounds, None], counts, strict=True):
        total += count
        text = "+Inf" if bound is None else f"{bound:g}"
        yield f'{name}_bucket{{{labels},le="{text}"}} {total}'
    yield f"{name}_sum{{{labels}}} {value_sum!r}"
    yield f"{name}_count{{{labels}}} {total}"


class ServerMetrics:
    """Counts what the choices of requests have taken. Not thread-safe: for the event loop.

    Args:
        names: of the models, which are values of the label `model_name`; the first one is that of the engine's state.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = [*names]
        self._counts: Counter[tuple[str, str, int]] = Counter()
        """Values of each histogram below each of its bounds and above the one before, by its index."""
        self._sums: defaultdict[tuple[str, str], float] = defaultdict(float)
        self._counters: Counter[tuple[str, str, str]] = Counter()

    def record(self, model: str, choice: Choice) -> None:
        """Record a choice that has ended; one without a finish reason was aborted."""
        if model not in self._names:
            self._names.append(model)  # an adapter that was loaded since
        reason, state = choice.finish_reason or "abort", choice.state
        self._counters["vllm:request_success_total", model, f'finished_reason="{reason}"'] += 1
        self._counters["vllm:generation_tokens_total", model, ""] += choice.num_tokens
        if state is None or state.started is None:
            return
        self._counters["vllm:prompt_tokens_total", model, ""] += choice.num_prompt_tokens
        if choice.finish_reason is None:
            return
        arrivals = choice.arrivals
        end = state.finished or (arrivals[-1] if arrivals else state.started)
        first = arrivals[0] if arrivals else end
        values = {
            "vllm:e2e_request_latency_seconds": end - state.submitted,
            "vllm:request_queue_time_seconds": state.started - state.submitted,
            "vllm:request_inference_time_seconds": end - state.started,
            "vllm:request_prefill_time_seconds": first - state.started,
            "vllm:request_decode_time_seconds": end - first,
            "vllm:request_prompt_tokens": choice.num_prompt_tokens,
            "vllm:request_generation_tokens": choice.num_tokens,
            "diffusionlm:request_forwards": choice.num_forwards,
        }
        if arrivals:
            values["vllm:time_to_first_token_seconds"] = first - state.submitted
        if choice.num_tokens > 1:
            values["vllm:request_time_per_output_token_seconds"] = (end - first) / (choice.num_tokens - 1)
        if choice.num_forwards:
            values["diffusionlm:request_tokens_per_forward"] = choice.num_tokens / choice.num_forwards
        gaps = [("vllm:inter_token_latency_seconds", later - earlier) for earlier, later in pairwise(arrivals)]
        for name, value in [*values.items(), *gaps]:
            self._counts[name, model, bisect_left(_HISTOGRAMS[name][1], max(0.0, value))] += 1
            self._sums[name, model] += max(0.0, value)

    def record_rejection(self, model: str) -> None:
        """Record a request that was refused because too many others wait."""
        self._counters["vllm:admission_rejections_total", model, ""] += 1

    def render(self, engine: Engine) -> str:
        """Return all metrics as text."""
        lines = [*self._engine_lines(engine)]
        for counter in sorted({name for name, _, _ in self._counters}):
            lines.append(f"# TYPE {counter} counter")
            for (name, model, label), value in sorted(self._counters.items()):
                if name == counter:
                    lines.append(f"{name}{{{_labels(model)}{',' if label else ''}{label}}} {value}")
        for name, (text, bounds) in _HISTOGRAMS.items():
            lines += [f"# HELP {name} {text}", f"# TYPE {name} histogram"]
            for model in self._names:
                counts = [self._counts[name, model, index] for index in range(len(bounds) + 1)]
                lines += _histogram_lines(name, _labels(model), bounds, counts, self._sums[name, model])
        return "\n".join([*lines, ""])

    def _engine_lines(self, engine: Engine) -> Iterator[str]:
        status = engine.status
        counts, labels = status.counts, _labels(self._names[0])
        values = (
            ("vllm:num_requests_running", "gauge", status.num_running),
            ("vllm:num_requests_waiting", "gauge", status.num_waiting),
            ("vllm:kv_cache_usage_perc", "gauge", status.num_owned_pages / status.num_pages),
            ("vllm:num_preemptions_total", "counter", counts.num_preemptions),
            ("vllm:prefix_cache_queries_total", "counter", counts.num_prefix_queries),
            ("vllm:prefix_cache_hits_total", "counter", counts.num_prefix_hits),
            ("diffusionlm:forwards_total", "counter", counts.num_steps),
            ("diffusionlm:rows_total", "counter", counts.num_batched_tokens),
            ("diffusionlm:request_steps_total", "counter", counts.num_request_steps),
            ("diffusionlm:model_seconds_total", "counter", counts.model_seconds),
            ("diffusionlm:busy_seconds_total", "counter", status.busy_seconds),
        )
        for name, kind, value in values:
            yield f"# TYPE {name} {kind}"
            yield f"{name}{{{labels}}} {value}"
        name = "vllm:iteration_tokens_total"
        yield f"# HELP {name} Inputs of a forward: tokens of prompts, and of the blocks that are decoded."
        yield f"# TYPE {name} histogram"
        yield from _histogram_lines(name, labels, TOKEN_BOUNDS, counts.steps_by_tokens, counts.num_batched_tokens)


def _labels(model: str) -> str:
    escaped = model.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'model_name="{escaped}",engine="0"'
