"""Texts to tokens on the device: padding, cutting, and files that are no tokenizers."""

import sys

import numpy as np
import pytest

from vitdeploy.errors import InputError, ManifestError, MissingFileError, MissingPackageError
from vitdeploy.runtime import tokenizer as module
from vitdeploy.runtime.tasks.zero_shot import bind_texts, compare_texts
from vitdeploy.runtime.tokenizer import TextTokenizer, ZeroShotSpec, require_texts

tokenizers = pytest.importorskip("tokenizers", reason="pip install 'vitdeploy[text]'")


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """A tokenizer of whole words, with an end token behind each text."""
    words = {"?": 0, "a": 1, "cat": 2, "</s>": 3}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, **{"unk_token": "?"}))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.post_processor = tokenizers.processors.TemplateProcessing("$A </s>", special_tokens=[("</s>", 3)])
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    made.save(str(path))
    return path


@pytest.mark.parametrize(
    ("options", "rows"),
    [
        ({}, [[1, 2, 3, 9], [0, 3, 9, 9], [3, 9, 9, 9]]),
        ({"padding": "left"}, [[9, 1, 2, 3], [9, 9, 0, 3], [9, 9, 9, 3]]),
        ({"lowercase": True}, [[1, 2, 3, 9], [2, 3, 9, 9], [3, 9, 9, 9]]),
    ],
)
def test_texts_are_padded_on_their_side(file, options, rows):
    found = TextTokenizer(file, ZeroShotSpec(4, 9, 1.0, **options)).encode(["a cat", "CAT", ""])
    assert found.dtype == np.int64
    np.testing.assert_array_equal(found, rows)


def test_a_text_that_is_cut_keeps_its_end_token_and_is_told(file):
    with pytest.warns(RuntimeWarning, match="truncated to 4 tokens: 'a cat a cat a'; the model does not read 'cat a'"):
        [row] = TextTokenizer(file, ZeroShotSpec(4, 9, 1.0)).encode(["a cat a cat a"])
    assert row.tolist() == [1, 2, 1, 3]


@pytest.mark.parametrize(("texts", "found"), [([], "no text"), ("cat", "str"), (None, "NoneType"), (["a", 1], "int")])
def test_what_is_no_list_of_texts_is_refused(texts, found):
    with pytest.raises(InputError, match="texts must be a list of at least one text") as caught:
        require_texts(texts)
    assert caught.value.found == found


def test_files_that_are_no_tokenizers_are_refused(file, tmp_path, monkeypatch):
    spec = ZeroShotSpec(4, 9, 1.0)
    with pytest.raises(MissingFileError, match="no tokenizer at"):
        TextTokenizer(tmp_path / "none.json", spec)
    (tmp_path / "tokenizer.json").write_text('{"model": {}}')
    with pytest.raises(ManifestError, match="is not a tokenizer"):
        TextTokenizer(tmp_path / "tokenizer.json", spec)
    monkeypatch.setattr(module, "MAX_BYTES", 10)
    with pytest.raises(ManifestError, match="is too large"):
        TextTokenizer(file, spec)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(MissingPackageError, match="turning texts into tokens") as caught:
        TextTokenizer(file, spec)
    assert caught.value.fix == "pip install 'vitdeploy[text]'"


@pytest.mark.parametrize(("scores", "expected"), [("softmax", [0.7311, 0.2689]), ("sigmoid", [0.9526, 0.8808])])
def test_scores_are_the_models_own(scores, expected):
    spec = ZeroShotSpec(4, 9, scale=1.0, bias=2.0, scores=scores)
    image, texts = np.array([3.0, 0.0], np.float32), np.array([[0.0, 5.0], [2.0, 0.0]], np.float32)
    found = compare_texts(image, texts, ["other", "same"], spec, 2)
    assert [(each.label, each.index, each.similarity) for each in found.top] == [("same", 1, 1.0), ("other", 0, 0.0)]
    np.testing.assert_allclose([each.score for each in found.top], expected, atol=1e-4)
    assert (
        repr(found) == f"<ZeroShot: same {100 * expected[0]:.1f} % (+1.000), other {100 * expected[1]:.1f} % (+0.000)>"
    )


def test_texts_are_bound_to_two_towers_only():
    with pytest.raises(ManifestError, match="do not fit a model of two encoders"):
        bind_texts(None, {"text": np.zeros((1, 4), np.int64)}, ZeroShotSpec(4, 9, 1.0))
