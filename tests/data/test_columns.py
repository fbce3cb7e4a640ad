"""Labels in the columns of a table, as spreadsheets, pandas and Kaggle write them."""

import json

import numpy as np
import pytest
from PIL import Image

from vitdeploy.data.columns import read_columns, read_table
from vitdeploy.errors import DataError, MissingFileError


@pytest.fixture
def images(tmp_path):
    folder = tmp_path / "images"
    for name in ("a.png", "b.jpg", "more/c.png"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.zeros((4, 4), np.uint8)).save(folder / name)
    return folder


@pytest.fixture
def table(tmp_path):
    def write(text, name="labels.csv", encoding="utf-8"):
        file = tmp_path / name
        file.write_bytes(text.encode(encoding))
        return file

    return write


def cells(rows, column):
    return {sample.path.name: rows.annotations[sample.path].cells[column] for sample in rows.samples}


AGES = {"a.png": "31", "b.jpg": "27", "c.png": "5"}


@pytest.mark.parametrize(
    "text",
    [
        "image,age\na.png,31\nb.jpg,27\nmore/c.png,5\n",
        "age;file_name\r\n31;a.png\r\n27; b.jpg \r\n5;c.png\r\n",
        "\ufeffpath\tage\n./a.png\t31\nimages/b.jpg\t27\nmore\\c.png\t5\n",
        ",picture,age\n0,a.png,31\n1,b.jpg,27\n2,c.png,5\n",
        ",age\na.png,31\nb.jpg,27\nc.png,5\n",
        'id,age\na,31\n"b",27\nc,5\n\n',
        "image,age\na.png,31\na.png,31\nb.jpg,27\nc.png,5\ngone.png,9\n",
    ],
    ids=[
        "plain",
        "semicolons",
        "tabs and a byte order mark",
        "an index",
        "names as index",
        "no suffixes",
        "repeated rows",
    ],
)
def test_tables_as_tools_write_them(images, table, text):
    rows = read_columns(images, table(text))
    assert cells(rows, "age") == AGES and rows.unannotated == 0
    assert [rows.annotations[sample.path].number("age") for sample in rows.samples] == [31.0, 27.0, 5.0]
    assert bool(rows.notes) == any(word in text for word in ("gone", "./"))


def test_parquet_keeps_types_and_lists(images, tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet", reason="needs pyarrow: pip install vitdeploy[data]")
    import pyarrow as pa

    content = {
        "image": ["a.png", "b.jpg"],
        "tags": [["cat", "dog"], []],
        "sold": [True, None],
        "price": [1.5, float("nan")],
    }
    parquet.write_table(pa.table(content), tmp_path / "labels.parquet")
    rows = read_columns(images, tmp_path / "labels.parquet")
    first, second = (rows.annotations[sample.path] for sample in rows.samples)
    assert (first.cells["tags"], first.flag("sold"), first.number("price")) == (["cat", "dog"], True, 1.5)
    assert (second.cells["tags"], second.flag("sold"), second.number("price")) == ([], None, None)
    assert rows.unannotated == 1


def test_json_is_a_list_of_rows(images, tmp_path):
    file = tmp_path / "labels.json"
    rows = [{"image": "a.png", "tags": ["cat", "dog"], "sold": True, "price": 1.5}]
    rows += [{"price": float("nan"), "tags": [], "image": "b.jpg", "sold": None}]
    file.write_text(json.dumps(rows), encoding="utf-8")
    found = read_columns(images, file)
    first, second = (found.annotations[sample.path] for sample in found.samples)
    assert (first.cells["tags"], first.flag("sold"), first.number("price")) == (["cat", "dog"], True, 1.5)
    assert (second.cells["tags"], second.flag("sold"), second.number("price")) == ([], None, None)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('[{"image": "a.png"}', "is not a JSON file"),
        ('{"image": ["a.png"]}', "is not a list of rows"),
        ('[["image", "a.png"]]', "is not a list of rows"),
        ("[]", "is not a list of rows"),
        ('[{"image": "a.png", "age": 1}, {"image": "b.jpg"}]', "row 2 is not a row of the table"),
        ('[{"image": "a.png"}, ["b.jpg"]]', "row 2 is not a row of the table"),
        ('[{"image": "a.png", "image": "b.jpg"}]', "has duplicate columns"),
    ],
)
def test_json_that_is_no_table(images, tmp_path, text, words):
    (tmp_path / "labels.json").write_text(text, encoding="utf-8")
    with pytest.raises(DataError, match=words):
        read_columns(images, tmp_path / "labels.json")


@pytest.mark.parametrize(("cell", "flag"), [("1", True), ("0.0", False), ("True", True), ("false", False), ("", None)])
def test_yes_and_no(images, table, cell, flag):
    rows = read_columns(images, table(f"image,seven\na.png,{cell}\n"))
    assert rows.annotations[images / "a.png"].flag("seven") is flag


@pytest.mark.parametrize("cell", ["old", "nan", "inf", '"0,5"'])
def test_what_is_no_number_is_refused_with_its_row(images, table, cell):
    row = read_columns(images, table(f"image,age\nb.jpg,1\na.png,{cell}\n")).annotations[images / "a.png"]
    with pytest.raises(DataError) as caught:
        row.number("age")
    assert "row 2" in str(caught.value) and "age" in str(caught.value)
    with pytest.raises(DataError):
        row.flag("age")


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("image,age\na.png,1\na.png,2\n", "row 1 and row 2"),
        ("image,age\nx.png,1\n", "x.png"),
        ("image,age,age\na.png,1,2\n", "age"),
        ("image,age\na.png,1,2\n", "3 cells"),
        ("image,age\n", "image, age"),
        ("", "an empty file"),
        ("first,second\na.png,b.jpg\n", "first, second"),
        ('image,age\n"a.png,1\n', ""),
    ],
)
def test_tables_that_contradict_themselves_are_refused(images, table, text, found):
    with pytest.raises(DataError) as caught:
        read_columns(images, table(text))
    assert found in caught.value.found


def test_other_files_are_refused(images, table, tmp_path):
    with pytest.raises(DataError):
        read_table(table("image,age\na.png,é\n", encoding="latin-1"))
    with pytest.raises(DataError):
        read_table(table("{}", "labels.json"))
    with pytest.raises(MissingFileError):
        read_columns(images, tmp_path / "none.csv")
