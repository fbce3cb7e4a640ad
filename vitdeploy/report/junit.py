"""A comparison as JUnit's XML, which CI systems show: a test case for each engine and check.

The format has no standard of its own; this is the part that Jenkins' xunit schema (junit-10.xsd) and its readers share.
"""

from __future__ import annotations

from xml.etree.ElementTree import Element, SubElement, indent, tostring

from vitdeploy.document.comparison import ComparisonDocument
from vitdeploy.report import text

SUITE = "vitdeploy compare"


def render_junit(document: ComparisonDocument) -> bytes:
    """The XML of a comparison, UTF-8. A check that is not decided is a failure, as it is for the exit code; one without
    a limit is skipped. `document` is taken as untrusted."""
    found = text.cleaned(document)
    checks = [(engine.engine, check) for engine in found.engines for check in engine.checks]
    failed = sum(check.status in ("fail", "undecided") for _, check in checks)
    skipped = sum(check.status == "none" for _, check in checks)
    counts = {"tests": str(len(checks)), "failures": str(failed), "skipped": str(skipped), "errors": "0"}
    root = Element("testsuites", counts)
    suite = SubElement(root, "testsuite", {"name": SUITE, "timestamp": found.created[:19], **counts})
    for engine, check in checks:
        case = SubElement(suite, "testcase", {"classname": engine, "name": check.name})
        reasons = "; ".join(check.reasons)
        if check.status in ("fail", "undecided"):
            SubElement(case, "failure", {"type": check.status, "message": reasons}).text = reasons
        elif check.status == "none":
            SubElement(case, "skipped", {"message": "no limit was set"})
    indent(root)
    xml: bytes = tostring(root, encoding="utf-8", xml_declaration=True)
    return xml + b"\n"
