"""report.json as a document: it is read as it was written, earlier layouts too, and its schema says what it is."""

import copy
import json

import jsonschema
import pytest

from tests.documents import as_report
from tests.report.pages import run_report
from tests.report.test_html import REPORT
from tests.report_schema import FILE, schema_text
from vitdeploy.document.report import MAX_BYTES, read_report
from vitdeploy.errors import InputError, MissingFileError
from vitdeploy.spec import DecodeError, encode

SCHEMA = json.loads(schema_text())


def written(found):
    """The JSON that a report of these values is written as."""
    return json.loads(json.dumps(encode(as_report(found)), allow_nan=False))


def test_the_published_schema_is_that_of_the_dataclasses():
    assert FILE.read_text(encoding="utf-8") == schema_text(), "run: make report-schema"
    jsonschema.Draft202012Validator.check_schema(SCHEMA)


@pytest.mark.parametrize("found", [REPORT, run_report()], ids=["an earlier one", "with everything"])
def test_what_is_written_is_read_as_it_was_and_is_valid(found):
    once = written(found)
    assert written(once) == once
    for each in (found, once):
        jsonschema.validate(json.loads(json.dumps(each)), SCHEMA)
    # All that was said is still said; what an earlier version did not write has its default.
    assert found.keys() <= once.keys() and found["engines"][0].keys() <= once["engines"][0].keys()
    assert found["engines"][0]["verify"].items() <= once["engines"][0]["verify"].items()


def test_a_key_that_is_no_name_in_python_and_one_that_may_be_left_out():
    full, least = written(run_report()), written(REPORT)
    row = full["answers"]["classes"]["rows"][0]
    assert row["class"].startswith("class of a name") and "name" not in row
    assert "sizes" in full and "sizes" not in least
    scenarios = full["bench"]["results"][0]["scenarios"]
    assert (
        scenarios["sustain:12s"]["bins"] and "bins" not in scenarios["single"] and "offered" not in scenarios["single"]
    )


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        (lambda report: report.pop("format"), "$.format: missing"),
        (lambda report: report.update(format=2), "$.format: found '2', expected one of 1"),
        (lambda report: report.update(news=1), "$.news: unknown field"),
        (lambda report: report["engines"][0]["verify"].pop("kl"), "$.engines[0].verify.kl: missing"),
        (lambda report: report["bench"]["results"][0].update(samples=1.5), "$.bench.results[0].samples: found '1.5'"),
    ],
)
def test_what_does_not_fit_is_named_with_its_path_and_is_not_valid(spoil, problem):
    report = copy.deepcopy(REPORT)
    spoil(report)
    with pytest.raises(DecodeError) as caught:
        as_report(report)
    assert [each for each in caught.value.problems if each.startswith(problem)]
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(report, SCHEMA)


def test_a_file_that_is_no_report_is_refused(tmp_path):
    with pytest.raises(MissingFileError, match="no report at"):
        read_report(tmp_path / "report.json")
    for content in ("", "{", "[" * 100_000, "null", " " * (MAX_BYTES + 1)):
        (tmp_path / "report.json").write_text(content)
        with pytest.raises(InputError, match="is not a vitdeploy report"):
            read_report(tmp_path / "report.json")
    (tmp_path / "report.json").write_text(json.dumps(REPORT))
    assert read_report(tmp_path / "report.json") == as_report(REPORT)
