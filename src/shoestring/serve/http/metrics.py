"""Metrics for Prometheus, under the names that vLLM's dashboards use, with a configurable prefix.

One registry per server, so that several can live in one process. Counters and histograms are fed by the
engine thread; gauges are set after each of its steps.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector

from shoestring.serve.engine.request import Stats
from shoestring.state.reshard.version import WeightsVersion

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_GAPS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
_TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536)


class CountedHistogram(Collector):
    """A histogram that takes many equal values at once: one call per step, not one per token."""

    def __init__(self, name: str, text: str, model_name: str, buckets: tuple[float, ...]) -> None:
        self._name, self._text, self._model, self._bounds = name, text, model_name, buckets
        self._counts, self._sum = [0] * (len(buckets) + 1), 0.0
        self._lock = threading.Lock()

    def observe(self, value: float, num: int = 1) -> None:
        with self._lock:
            self._counts[bisect_left(self._bounds, value)] += num
            self._sum += value * num

    def collect(self) -> Iterator[HistogramMetricFamily]:
        with self._lock:
            counts, total = list(self._counts), self._sum
        names = [*map(str, self._bounds), "+Inf"]
        cumulative = [(name, float(sum(counts[: i + 1]))) for i, name in enumerate(names)]
        family = HistogramMetricFamily(self._name, self._text, labels=["model_name"])
        family.add_metric([self._model], cumulative, total)
        yield family


class Metrics:
    def __init__(self, model_name: str, prefix: str = "shoestring") -> None:
        self.registry = CollectorRegistry()
        self._prefix, self._model = prefix, model_name
        counter, gauge, histogram = self._counter, self._gauge, self._histogram
        self.num_running = gauge("num_requests_running", "Texts that hold key/value memory and are computed")
        self.num_waiting = gauge("num_requests_waiting", "Texts that wait to be scheduled")
        self.kv_usage = gauge("kv_cache_usage_perc", "Share of the key/value memory in use, 0 to 1")
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens of requests that were started")
        self.generation_tokens = counter("generation_tokens", "Tokens written")
        self._kept = {  # by the name that the engine's statistics have
            "num_drafts": counter("spec_decode_num_drafts", "Drafts verified, one per request and step"),
            "num_drafted": counter("spec_decode_num_draft_tokens", "Tokens drafted ahead"),
            "num_accepted": counter("spec_decode_num_accepted_tokens", "Drafted tokens that were accepted"),
            "num_prefix_asked": counter("prefix_cache_queries", "Tokens looked up in the prefix cache"),
            "num_prefix_hits": counter("prefix_cache_hits", "Tokens found in the prefix cache"),
            "num_preemptions": counter("num_preemptions", "Requests put back to wait for want of memory"),
        }
        self._counted: dict[str, int] = {}
        self.accepted_at = Counter(
            f"{prefix}:spec_decode_num_accepted_tokens_per_pos",
            "Drafted tokens that were accepted, by place in the draft",
            ["model_name", "position"],
            registry=self.registry,
        )
        self.rejected = counter("request_rejected", "Requests refused because the queue was full")
        self.finished = Counter(
            f"{prefix}:request_success",
            "Requests that ended, by reason",
            ["model_name", "finished_reason"],
            registry=self.registry,
        )
        # Of one text: queue + prefill = first token; the gaps between its tokens sum to decode; first token + decode =
        # e2e. docs/reference/server.md defines them for operators.
        self.first_token = histogram("time_to_first_token_seconds", "Arrival to first token", _SECONDS)
        self.queue_time = histogram("request_queue_time_seconds", "Arrival to being scheduled", _SECONDS)
        self.prefill_time = histogram("request_prefill_time_seconds", "Scheduled to first token", _SECONDS)
        self.token_gap = CountedHistogram(
            f"{prefix}:inter_token_latency_seconds", "Time between tokens", model_name, _GAPS
        )
        self.registry.register(self.token_gap)
        self.decode_time = histogram("request_decode_time_seconds", "First to last token", _SECONDS)
        self.latency = histogram("e2e_request_latency_seconds", "Arrival to last token", _SECONDS)
        self.weights_step = gauge("weights_step", "Training step of the weights that are served; 0: as loaded")
        self.weights_taken = counter("weights_updates", "Weights that were replaced while the server ran")
        self.weights_refused = counter(
            "weights_updates_refused",
            "Weights that were not taken over: incomplete, damaged, not finite, or of another model",
        )
        self.weights_stall = histogram(
            "weights_update_stall_seconds", "Engine at a standstill for new weights", _SECONDS
        )
        self.prompt_length = histogram("request_prompt_tokens", "Prompt tokens per request", _TOKENS)
        self.text_length = histogram("request_generation_tokens", "New tokens per request", _TOKENS)

    def count_stats(self, stats: Stats) -> None:
        """Bring the counters that the engine keeps itself up to date."""
        for name, counter in self._kept.items():
            total = getattr(stats, name)
            counter.inc(total - self._counted.get(name, 0))
            self._counted[name] = total
        for place, total in enumerate(stats.accepted_at):
            self.accepted_at.labels(self._model, place).inc(total - self._counted.get(f"at {place}", 0))
            self._counted[f"at {place}"] = total

    def note_weights(self, version: WeightsVersion, stall_s: float) -> None:
        self.weights_step.set(version.step)
        self.weights_taken.inc()
        self.weights_stall.observe(stall_s)

    def count_finished(self, reason: str) -> None:
        self.finished.labels(self._model, reason).inc()

    def render(self) -> bytes:
        return generate_latest(self.registry)

    def _counter(self, name: str, text: str) -> Counter:
        made = Counter(f"{self._prefix}:{name}", text, ["model_name"], registry=self.registry)
        return made.labels(self._model)

    def _gauge(self, name: str, text: str) -> Gauge:
        made = Gauge(f"{self._prefix}:{name}", text, ["model_name"], registry=self.registry)
        return made.labels(self._model)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        made = Histogram(f"{self._prefix}:{name}", text, ["model_name"], registry=self.registry, buckets=buckets)
        return made.labels(self._model)
