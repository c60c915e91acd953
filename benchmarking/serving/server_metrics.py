"""What a server counts itself: its page of metrics in Prometheus' text format."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

COUNTERS = {
    "num_forwards": "diffusionlm:forwards_total",
    "num_request_steps": "diffusionlm:request_steps_total",
    "model_seconds": "diffusionlm:model_seconds_total",
    "busy_seconds": "diffusionlm:busy_seconds_total",
    "new_tokens": "vllm:generation_tokens_total",
    "num_preemptions": "vllm:num_preemptions_total",
    "num_prefix_queries": "vllm:prefix_cache_queries_total",
    "num_prefix_hits": "vllm:prefix_cache_hits_total",
}
"""Field of `ServerCounts` -> name of the metric."""


@dataclass(frozen=True)
class ServerCounts:
    """Counters of a server, or their growth; None: the server does not have this one."""

    num_forwards: float | None = None
    num_request_steps: float | None = None
    """Decoding steps of requests: a forward takes one of each request that it decodes."""
    model_seconds: float | None = None
    """Time of forwards and of sampling."""
    busy_seconds: float | None = None
    """Time in which there was work."""
    new_tokens: float | None = None
    num_preemptions: float | None = None
    num_prefix_queries: float | None = None
    num_prefix_hits: float | None = None

    def since(self, earlier: ServerCounts) -> ServerCounts:
        """The growth of each counter."""
        return ServerCounts(
            **{name: _subtract(getattr(self, name), getattr(earlier, name)) for name in COUNTERS},
        )

    @property
    def tokens_per_forward(self) -> float | None:
        """New tokens of all requests for each forward."""
        return _divide(self.new_tokens, self.num_forwards)

    @property
    def tokens_per_step(self) -> float | None:
        """New tokens of a request for each forward that decodes it."""
        return _divide(self.new_tokens, self.num_request_steps)

    @property
    def host_share(self) -> float | None:
        """Share of the time with work in which the model did not run."""
        share = _divide(self.model_seconds, self.busy_seconds)
        return None if share is None else 1.0 - share

    @property
    def prefix_hit_share(self) -> float | None:
        """Share of the tokens of prompts that were in the prefix cache."""
        return _divide(self.num_prefix_hits, self.num_prefix_queries)


def parse_counts(text: str) -> ServerCounts:
    """Read the counters from a page of metrics, summed over their labels. Other lines are ignored."""
    sums: dict[str, float] = {}
    for line in text.splitlines():
        name, _, rest = line.partition("{" if "{" in line else " ")
        try:
            sums[name] = sums.get(name, 0.0) + float(rest.rpartition("}")[2].split()[0])
        except (ValueError, IndexError):
            continue
    return ServerCounts(**{field: sums.get(name) for field, name in COUNTERS.items()})


def format_counts(counts: ServerCounts) -> Mapping[str, str]:
    """Names and values of what follows from the counters, for a table."""
    values = {
        "forwards": _format(counts.num_forwards, ",.0f"),
        "tokens per forward, all requests": _format(counts.tokens_per_forward, ".2f"),
        "tokens per forward of a request": _format(counts.tokens_per_step, ".2f"),
        "host share of the time with work": _format(counts.host_share, ".1%"),
        "preemptions": _format(counts.num_preemptions, ",.0f"),
        "prompt tokens from the prefix cache": _format(counts.prefix_hit_share, ".1%"),
    }
    return {name: value for name, value in values.items() if value is not None}


def _subtract(value: float | None, earlier: float | None) -> float | None:
    return None if value is None or earlier is None else value - earlier


def _divide(value: float | None, by: float | None) -> float | None:
    return None if value is None or not by else value / by


def _format(value: float | None, form: str) -> str | None:
    return None if value is None else format(value, form)
