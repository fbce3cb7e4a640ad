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
    """A registry of its own, so that two servers in a process do not mix."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        self._requests = Counter(
            "vitdeploy_requests", "Requests answered.", ("endpoint", "status"), registry=self.registry
        )
        self._seconds = Histogram(
            "vitdeploy_request_seconds",
            "From the head of a request to its answer.",
            ("endpoint",),
            buckets=SECONDS,
            registry=self.registry,
        )
        self._rejected = Counter(
            "vitdeploy_rejected", "Requests refused because of too much at once.", registry=self.registry
        )
        self._batch = Histogram(
            "vitdeploy_batch_images", "Images of a run of the engine.", buckets=IMAGES, registry=self.registry
        )
        self._run = Histogram(
            "vitdeploy_inference_seconds", "A run of the engine.", buckets=SECONDS, registry=self.registry
        )
        self._waiting = Gauge("vitdeploy_waiting_images", "Images that wait for the engine.", registry=self.registry)
        self._working = Gauge(
            "vitdeploy_working_requests", "Requests that wait or are being answered.", registry=self.registry
        )

    def watch(self, waiting: Callable[[], int], working: Callable[[], int]) -> None:
        """Where the lengths of the queues are read when somebody asks."""
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
        """In the text format, which /metrics gives."""
        return generate_latest(self.registry)


class PromptMetrics:
    """What is counted of promptable segmentation besides."""

    def __init__(self, registry: CollectorRegistry, kept: Callable[[], int]) -> None:
        self._images = Counter(
            "vitdeploy_prompted_images",
            "Images that prompts were for, by whether their embedding was kept.",
            ("kept",),
            registry=registry,
        )
        self._decode = Histogram(
            "vitdeploy_decoder_seconds", "A run of the decoder.", buckets=SECONDS, registry=registry
        )
        held = Gauge("vitdeploy_kept_bytes", "Bytes of embeddings that are kept.", registry=registry)
        held.set_function(kept)

    def asked(self, kept: bool) -> None:
        self._images.labels("yes" if kept else "no").inc()

    @contextlib.contextmanager
    def decoding(self) -> Iterator[None]:
        """Measures a run of the decoder."""
        start = time.perf_counter()
        yield
        self._decode.observe(time.perf_counter() - start)


class MonitorMetrics(Collector):
    """What a monitor counts, read from it when somebody asks."""

    def __init__(self, registry: CollectorRegistry, monitor: Monitoring) -> None:
        self._monitor = monitor
        registry.register(self)

    def collect(self) -> Iterable[Metric]:
        counts, state = self._monitor.counts, self._monitor.state
        told = (
            ("runs", "Runs of the engine that were watched.", counts.runs),
            ("images", "Images that were looked at.", counts.looked_at),
            ("windows", "Windows of images that were judged.", counts.windows),
            ("drifted_windows", "Windows that were unlike the reference.", counts.drifted),
            ("golden_answers", "Golden inputs that were run.", counts.canaries),
            ("wrong_golden_answers", "Golden inputs with wrong answers.", counts.wrong),
            ("changed_golden_answers", "Golden inputs with right answers of other bits than at first.", counts.changed),
            ("non_finite_answers", "Outputs with numbers that are not finite.", counts.non_finite),
        )
        for name, text, value in told:
            yield CounterMetricFamily(f"vitdeploy_monitor_{name}", text, value=value)
        events = CounterMetricFamily("vitdeploy_monitor_events", "What the monitor told.", labels=("kind",))
        for kind, value in counts.events.items():
            events.add_metric((kind,), value)
        yield events
        states = GaugeMetricFamily("vitdeploy_monitor_state", "1 for the state that it is in.", labels=("state",))
        for each in STATES:
            states.add_metric((each,), float(each == state))
        yield states
