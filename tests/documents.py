"""Documents for tests: made of JSON values as files have them, or of a few numbers."""

from vitdeploy.benchmark.summary import BatchSizes, Latency, Ratio, Row
from vitdeploy.document.bench import Bench, ProtocolFacts
from vitdeploy.document.report import Report
from vitdeploy.report.html import render_html
from vitdeploy.spec import decode


def as_report(found):
    return decode(Report, found)


def page_of(found, images):
    """The page of the content of a report.json."""
    return render_html(as_report(found), images)


def row(artifact, p50=1.0, flags=(), target="openvino-cpu", batch=1):
    """A row of a bench of which only the median latency is of interest."""
    latency = Latency(p50, p50, p50, p50)
    return Row(artifact, target, "fp32", "CPU", BatchSizes(batch, batch), latency, 1e3 / p50, tuple(flags), 1, 0.1, 1.0)


def bench_of(rows, ratios=(), **changes):
    """A bench of these rows and ratios."""
    protocol = ProtocolFacts({"single": 2}, 0.5, ("single",), (1,), 0, 1)
    return Bench(protocol, tuple(rows), tuple(ratios), {}, {}, **changes)


def ratio_of(a, b, ratio, spread=0.02, reason="", metric="latency", **fields):
    """a / b with an interval of this spread; not decided where there is a reason."""
    interval = (ratio * (1 - spread), ratio * (1 + spread))
    return Ratio(a, b, metric, ratio, interval, decided=not reason, reason=reason, **fields)
