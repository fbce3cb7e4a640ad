"""A server's metrics, for Prometheus."""

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from vitdeploy.runtime.monitor import STATES, Monitoring

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
IMAGES = (1, 2, 4, 8, 16, 32, 64)


class Metrics:
    """The server's metrics in their own registry, so that two servers in one process do not mix."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        self._requests = Counter(
            "vitdeploy_requests", "Answered requests.", ("endpoint", "status"), registry=self.registry
        )
        self._seconds = Histogram(
            "vitdeploy_request_seconds",
            "Seconds from the head of a request to its answer.",
            ("endpoint",),
            buckets=SECONDS,
            registry=self.registry,
        )
        self._rejected = Counter(
            "vitdeploy_rejected", "Requests refused because the server was busy.", registry=self.registry
        )
        self._batch = Histogram(
            "vitdeploy_batch_images", "Images per run of the engine.", buckets=IMAGES, registry=self.registry
        )
        self._run = Histogram(
            "vitdeploy_inference_seconds", "Seconds of a run of the engine.", buckets=SECONDS, registry=self.registry
        )
        self._waiting = Gauge("vitdeploy_waiting_images", "Images waiting for the engine.", registry=self.registry)
        self._working = Gauge(
            "vitdeploy_working_requests", "Requests that are waiting or running.", registry=self.registry
        )

    def watch(self, waiting: Callable[[], int], working: Callable[[], int]) -> None:
        """Set the functions that return the queue lengths when the metrics are read."""
        self._waiting.set_function(waiting)
        self._working.set_function(working)

    def answered(self, endpoint: str, status: int, seconds: float) -> None:
        self._requests.labels(endpoint, str(status)).inc()
        self._seconds.labels(endpoint).observe(seconds)
        if status == 429:
            self._rejected.inc()

    def ran(self, images: int, seconds: float) -> None:
        self._batch.observe(images)
        self._run.observe(seconds)

    def text(self) -> bytes:
        """Return the metrics in Prometheus' text format, for /metrics."""
        return generate_latest(self.registry)


class PromptMetrics:
    """Further metrics for promptable segmentation."""

    def __init__(self, registry: CollectorRegistry, kept: Callable[[], int]) -> None:
        self._images = Counter(
            "vitdeploy_prompted_images",
            "Images with prompts, by whether their embedding was cached.",
            ("kept",),
            registry=registry,
        )
        self._decode = Histogram(
            "vitdeploy_decoder_seconds", "Seconds of a run of the decoder.", buckets=SECONDS, registry=registry
        )
        held = Gauge("vitdeploy_kept_bytes", "Bytes of cached embeddings.", registry=registry)
        held.set_function(kept)

    def asked(self, kept: bool) -> None:
        self._images.labels("yes" if kept else "no").inc()

    @contextlib.contextmanager
    def decoding(self) -> Iterator[None]:
        """Measure a run of the decoder."""
        start = time.perf_counter()
        yield
        self._decode.observe(time.perf_counter() - start)


class MonitorMetrics(Collector):
    """The counts of a monitor, read on request."""

    def __init__(self, registry: CollectorRegistry, monitor: Monitoring) -> None:
        self._monitor = monitor
        registry.register(self)

    def collect(self) -> Iterable[Metric]:
        counts, state = self._monitor.counts, self._monitor.state
        rows = (
            ("runs", "Monitored runs of the engine.", counts.runs),
            ("images", "Images that were checked.", counts.looked_at),
            ("windows", "Windows of images that were compared with the reference.", counts.windows),
            ("drifted_windows", "Windows that differed from the reference.", counts.drifted),
            ("golden_answers", "Golden inputs that were run.", counts.canaries),
            ("wrong_golden_answers", "Golden inputs with wrong answers.", counts.wrong),
            ("changed_golden_answers", "Golden inputs whose correct answers changed in bits.", counts.changed),
            ("non_finite_answers", "Outputs with NaN or infinity.", counts.non_finite),
        )
        for name, text, value in rows:
            yield CounterMetricFamily(f"vitdeploy_monitor_{name}", text, value=value)
        events = CounterMetricFamily("vitdeploy_monitor_events", "Events of the monitor.", labels=("kind",))
        for kind, value in counts.events.items():
            events.add_metric((kind,), value)
        yield events
        states = GaugeMetricFamily("vitdeploy_monitor_state", "1 for the current state.", labels=("state",))
        for each in STATES:
            states.add_metric((each,), float(each == state))
        yield states
