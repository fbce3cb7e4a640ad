"""Embeddings: recall and verification against independent implementations, labels of pairs, galleries, bad input."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import nn

import vitdeploy as vd
from tests.graph.small_graphs import Builder
from tests.workflows.dense_graphs import graph as classifier
from vitdeploy.api.predict import Predict, predict
from vitdeploy.api.values import Reporter
from vitdeploy.bundle.read import read_bundle
from vitdeploy.errors import CheckpointError, DataError, GraphError, ImageError, InputError, MissingFileError
from vitdeploy.graph.io.files import import_graph, load_graph
from vitdeploy.progress import silent
from vitdeploy.runtime import load
from vitdeploy.runtime.gallery import EmbeddingPredictor, Gallery, model_digest
from vitdeploy.runtime.tasks.embedding import Embedding, EmbeddingSpec
from vitdeploy.spec import PreprocessSpec
from vitdeploy.tasks.adapter import Data, DataChoice, Setting
from vitdeploy.tasks.answers import Copies
from vitdeploy.tasks.embedding import (
    EmbeddingAdapter,
    EmbeddingComparison,
    best_threshold,
    compare_embeddings,
    fold_thresholds,
    pairs_of,
    read_pairs,
    recalls,
)
from vitdeploy.tasks.features import unit
from vitdeploy.verification.records import Answers
from vitdeploy.workflows.placement import compile_bundle
from vitdeploy.workflows.subjects import Subject, settings_of

SIDE = 16


def clustered(seed: int = 0, identities: int = 12, alike: int = 4, width: int = 6):
    """float32 [n, width] around a direction for each identity, and int64 [n] identities."""
    random = np.random.default_rng(seed)
    labels = np.repeat(np.arange(identities), alike)
    centres = random.normal(size=(identities, width))
    return (centres[labels] + 0.6 * random.normal(size=(len(labels), width))).astype(np.float32), labels


def paired(labels: np.ndarray, seed: int = 0):
    """All pairs of one identity, and as many of two."""
    first, second = np.triu_indices(len(labels), 1)
    same = labels[first] == labels[second]
    others = np.random.default_rng(seed).choice(np.flatnonzero(~same), int(same.sum()), replace=False)
    chosen = np.concatenate([np.flatnonzero(same), others])
    return np.stack([first, second], axis=1)[chosen], same[chosen]


# --- Metrics ----------------------------------------------------------------------------------------------------------


def test_recall_is_that_of_scikit_learn():
    """`NearestNeighbors` leaves each image out where it is asked about what it was fitted on. Identities of one image
    are no queries."""
    neighbors = pytest.importorskip("sklearn.neighbors")
    vectors, labels = clustered()
    labels = np.concatenate([labels, [98, 99]])
    vectors = np.concatenate([vectors, np.random.default_rng(7).normal(size=(2, 6)).astype(np.float32)])
    found = neighbors.NearestNeighbors(n_neighbors=5, metric="cosine", algorithm="brute").fit(vectors).kneighbors()[1]
    right = (labels[found] == labels[:, None])[: len(labels) - 2]
    first, among = recalls(unit(vectors), labels)
    assert (first.tolist(), among.tolist()) == (right[:, 0].tolist(), right.any(axis=1).tolist())
    assert 0.3 < first.mean() < among.mean() < 1
    compared = compare_embeddings(vectors, vectors, labels)
    assert (compared.metric, compared.trials, compared.n) == ("recall@1", 48, 50)
    assert compared.value == compared.reference_value == pytest.approx(100 * right[:, 0].mean())
    assert compared.recall5 == compared.reference_recall5 == pytest.approx(100 * right.any(axis=1).mean())
    assert compared.recall5_ci95[0] < compared.recall5 < compared.recall5_ci95[1]


def test_neither_length_nor_order_matters():
    vectors, labels = clustered()
    noisy = vectors + 0.05 * np.random.default_rng(3).normal(size=vectors.shape).astype(np.float32)
    lengths = np.random.default_rng(1).uniform(0.1, 10, (len(vectors), 1)).astype(np.float32)
    order = np.random.default_rng(2).permutation(len(vectors))
    plain = compare_embeddings(noisy, vectors, labels)
    assert dataclasses.replace(compare_embeddings(noisy * lengths, vectors * lengths, labels), max_difference=0) == (
        dataclasses.replace(plain, max_difference=0, cosine_mean=pytest.approx(plain.cosine_mean),
                            cosine_min=pytest.approx(plain.cosine_min))
    )  # fmt: skip
    moved = compare_embeddings(noisy[order], vectors[order], labels[order])
    assert (moved.value, moved.recall5, moved.agreement) == (plain.value, plain.recall5, plain.agreement)
    assert 50 < plain.agreement < 100


def test_a_threshold_has_the_best_accuracy_that_scikit_learn_finds():
    metrics = pytest.importorskip("sklearn.metrics")
    random = np.random.default_rng(0)
    for _ in range(20):
        same = random.integers(0, 2, 60).astype(bool)
        cosines = np.round(random.normal(0.3 * same, 0.3), 1)  # many are equal
        false, true, _ = metrics.roc_curve(same, cosines, drop_intermediate=False)
        best = (true * same.sum() + (1 - false) * (~same).sum()).max()
        threshold = best_threshold(cosines, same)
        assert ((cosines > threshold) == same).sum() == round(best)
        assert threshold not in cosines


def test_no_pair_has_a_part_in_its_own_threshold():
    vectors, labels = clustered(1)
    places, same = paired(labels)
    directions = unit(vectors)
    cosines = (directions[places[:, 0]] * directions[places[:, 1]]).sum(axis=1)
    thresholds = fold_thresholds(cosines, same)
    for place in range(0, len(same), 7):
        changed = cosines.copy()
        changed[place] = -changed[place]
        assert fold_thresholds(changed, same)[place] == thresholds[place]
    folds = [np.flatnonzero(thresholds == value) for value in np.unique(thresholds)]
    assert 1 < len(folds) <= 10


def test_verification_is_judged_at_the_originals_thresholds():
    """An engine whose cosines are all higher calls others the same, whatever a threshold of its own would do."""
    vectors, labels = clustered(2)
    pairs = paired(labels)
    exact = compare_embeddings(vectors, vectors, None, pairs)
    assert (exact.metric, exact.trials, exact.drop) == ("verification accuracy", len(pairs[1]), 0)
    assert 70 < exact.value < 100 and 0 < exact.threshold < 1 and exact.recall5 is None
    shifted = compare_embeddings(vectors + 2, vectors, None, pairs)
    assert shifted.value < exact.value - 10 and shifted.drop_ci95[0] > 0
    assert shifted.threshold == exact.threshold


def test_labels_that_say_nothing_of_neighbours_give_no_metric():
    vectors, labels = clustered()
    assert compare_embeddings(vectors, vectors, np.arange(len(labels))).metric is None
    with pytest.raises(DataError, match="only one image"):
        compare_embeddings(vectors[:1], vectors[:1])


def test_another_neighbour_of_the_same_identity_is_no_wrong_answer(tmp_path):
    photos(tmp_path / "images", 6)
    data = loaded(tmp_path / "images", None, calibration=1)
    one, other = (np.random.default_rng(seed).normal(size=(len(data.evaluation), 5)) for seed in (0, 1))
    found = adapter().changes(answers(one.astype(np.float32)), answers(other.astype(np.float32)), data)
    assert found.changed.any() and (found.lost, found.gained) == (None, None)


# --- Labels of pairs --------------------------------------------------------------------------------------------------


def photos(folder: Path, identities: int = 8, alike: int = 4) -> list[str]:
    """Pictures of as many shades as there are identities, in their folders; their names below the folder."""
    names = []
    for identity in range(identities):
        random = np.random.default_rng(identity)
        base = random.integers(0, 256, (4, 4, 3))
        (folder / f"p{identity}").mkdir(parents=True)
        for number in range(alike):
            noisy = np.clip(base + random.normal(0, 12, base.shape), 0, 255).astype(np.uint8)
            names.append(f"p{identity}/{number}.png")
            Image.fromarray(noisy).resize((SIDE, SIDE), Image.Resampling.BICUBIC).save(folder / names[-1])
    return names


def table(file: Path, rows: list[tuple[str, str, object]], header: str = "image_a,image_b,same") -> Path:
    file.write_text("\n".join([header, *(f"{a},{b},{same}" for a, b, same in rows)]) + "\n", "utf-8")
    return file


def all_pairs(names: list[str]) -> list[tuple[str, str, object]]:
    return [(a, b, int(a[:2] == b[:2])) for i, a in enumerate(names) for b in names[i + 1 :]]


def test_pairs_of_a_json_list_are_those_of_a_table(tmp_path):
    rows = all_pairs(photos(tmp_path / "images", 3))
    one = read_pairs(tmp_path / "images", table(tmp_path / "pairs.csv", rows))
    listed = [dict(zip(("image_a", "image_b", "same"), row, strict=True)) for row in rows]
    (tmp_path / "pairs.json").write_text(json.dumps(listed), encoding="utf-8")
    other = read_pairs(tmp_path / "images", tmp_path / "pairs.json")
    assert other.annotations == one.annotations and len(one.annotations) == 12


def test_pairs_stay_whole_where_images_without_a_pair_are_enough_to_calibrate_on(tmp_path):
    names = photos(tmp_path / "images")
    paired_names = names[:20]
    found = read_pairs(tmp_path / "images", table(tmp_path / "pairs.csv", all_pairs(paired_names)))
    assert found.unannotated == 12
    parts = found.split(calibration=12, evaluation="all", seed=0)
    below = [s.path.relative_to(tmp_path / "images").as_posix() for s in parts.evaluation]
    assert sorted(below) == paired_names and len(parts.calibration) == 12
    places, same = pairs_of(below, [found.annotations[s.path] for s in parts.evaluation])
    assert len(places) == 190 and same.sum() == 30
    assert all((below[i][:2] == below[j][:2]) == known for (i, j), known in zip(places, same, strict=True))
    torn = found.split(calibration=16, evaluation=10, seed=0)
    assert len(torn.evaluation) == 10
    assert not {s.path for s in torn.calibration} & {s.path for s in torn.evaluation}
    assert found.split(calibration=12, evaluation=6, seed=1).evaluation != parts.evaluation[:6]
    with pytest.raises(DataError, match="too few images for evaluation"):
        found.split(calibration=12, evaluation=21, seed=0)


def test_a_data_set_of_two_parts_calibrates_on_its_own(tmp_path):
    names = [f"{part}/{name}" for part in ("calibration", "evaluation") for name in photos(tmp_path / "images" / part)]
    found = read_pairs(tmp_path / "images", table(tmp_path / "pairs.csv", all_pairs(names[16:])))
    parts = found.split(calibration=32, evaluation="all", seed=0)
    assert {s.path.parts[-3] for s in parts.calibration} == {"calibration"}
    assert {s.path.parts[-3] for s in parts.evaluation} == {"evaluation"} and len(parts.evaluation) == 32


def test_the_digest_is_that_of_the_pairs(tmp_path):
    names = photos(tmp_path / "images")
    rows = all_pairs(names)
    one = read_pairs(tmp_path / "images", table(tmp_path / "a.csv", rows))
    other = read_pairs(tmp_path / "images", table(tmp_path / "b.csv", [(b, a, s) for a, b, s in reversed(rows)]))
    wrong = read_pairs(tmp_path / "images", table(tmp_path / "c.csv", [*rows[:-1], (*rows[-1][:2], 0)]))
    assert one.digest(one.samples) == other.digest(other.samples) != wrong.digest(wrong.samples)


@pytest.mark.parametrize(
    ("rows", "header", "words"),
    [
        ([("p0/0.png", "p0/0.png", 1)], "image_a,image_b,same", "pairs an image with itself"),
        ([("p0/0.png", "p0/1.png", 1), ("p0/1.png", "p0/0.png", 0)], "image_a,image_b,same", "contradicts another row"),
        ([("p0/0.png", "p0/1.png", 0.7)], "image_a,image_b,same", "is neither 0 nor 1"),
        ([("p0/0.png", "", 1)], "image_a,image_b,same", "has an empty cell"),
        ([("x.png", "y.png", 1)], "image_a,image_b,same", "annotates no image"),
        ([("p0/0.png", "p0/1.png", 1)], "image,other,distance", "is not a table of pairs"),
    ],
)  # fmt: skip
def test_tables_that_are_no_pairs(tmp_path, rows, header, words):
    photos(tmp_path / "images", 2)
    with pytest.raises(DataError, match=words):
        read_pairs(tmp_path / "images", table(tmp_path / "pairs.csv", rows, header))


def test_pairs_of_images_that_are_not_there_are_left_out_and_counted(tmp_path):
    names = photos(tmp_path / "images", 2)
    found = read_pairs(tmp_path / "images", table(tmp_path / "p.csv", [*all_pairs(names), ("p0/0.png", "gone.png", 1)]))
    assert any("pairs with an image that is not in the folder, ignored: 1" in note for note in found.notes)


def adapter() -> EmbeddingAdapter:
    spec = PreprocessSpec((SIDE, SIDE), (SIDE, SIDE), "bilinear", (0.5,) * 3, (0.5,) * 3)
    return EmbeddingAdapter(Setting("embedding", spec, EmbeddingSpec()))


def loaded(folder: Path, pairs: Path | None, **numbers: Any) -> Data:
    kind = "folders" if pairs is None else "pairs"
    choice = DataChoice(folder, kind, pairs, **{"calibration": 4, "evaluation": "all", "seed": 0, **numbers})
    return adapter().load(choice, skip_bad=False, progress=silent)


def answers(vectors: np.ndarray) -> Answers:
    return Answers({"features": list(vectors)})


def test_a_copy_of_an_image_is_in_no_pair(tmp_path):
    names = photos(tmp_path / "images", 7)
    (tmp_path / "images" / "p0" / "copy.png").write_bytes((tmp_path / "images" / names[0]).read_bytes())
    pairs = table(tmp_path / "pairs.csv", all_pairs([*names[:24], "p0/copy.png"]))
    data = loaded(tmp_path / "images", pairs)
    assert data.copies == Copies(evaluation=1) and not data.doubts
    vectors = np.random.default_rng(0).normal(size=(len(data.evaluation), 5)).astype(np.float32)
    found = adapter().verify(answers(vectors), answers(vectors), data)
    assert isinstance(found, EmbeddingComparison)
    assert (len(data.evaluation), found.trials, found.metric) == (24, 276, "verification accuracy")
    assert found.control.value < 100


def test_too_few_pairs_of_a_kind_choose_no_threshold(tmp_path):
    names = photos(tmp_path / "images", 3)
    rows = [row for row in all_pairs(names) if row[2]]
    with pytest.raises(DataError, match="too few pairs of each kind") as refused:
        loaded(tmp_path / "images", table(tmp_path / "pairs.csv", rows), calibration=1)
    assert "0 of different identities" in refused.value.found


def test_answers_that_know_nothing_of_the_labels_are_doubted(tmp_path):
    names = photos(tmp_path / "images", 10, 6)
    noise = np.random.default_rng(0).normal(size=(60, 8)).astype(np.float32)
    for pairs in (None, table(tmp_path / "pairs.csv", all_pairs(names)[::5])):
        data = loaded(tmp_path / "images", pairs, calibration=1)
        names_of = [sample.path.parent.name for sample in data.evaluation]
        known = clustered(0, 10, 1, 8)[0][[int(name[1:]) for name in names_of]] * 9 + noise[: len(names_of)]
        assert adapter().doubt(answers(known), data, adapter().compare(answers(known), answers(known), data)) is None
        random = noise[: len(names_of)]
        told = adapter().doubt(answers(random), data, adapter().compare(answers(random), answers(random), data))
        assert told is not None and "check the identities" in told
        assert adapter().truth_of(data, 0, None)


# --- Models -----------------------------------------------------------------------------------------------------------


class ArcFaceLike(nn.Module):
    """As InsightFace's IResNet: convolutions, BN, dropout, a fully connected layer and a BN neck without a scale that
    learns; normalised by whoever uses it, or here."""

    def __init__(self, normalise: bool, width: int = 24) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv1, self.bn1 = nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)
        self.prelu = nn.PReLU(16)
        self.down, self.bn2 = nn.Conv2d(16, 32, 3, 2, 1, bias=False), nn.BatchNorm2d(32)
        self.dropout = nn.Dropout(0.4)
        self.fc = nn.Linear(32 * (SIDE // 2) ** 2, width)
        self.features = nn.BatchNorm1d(width, eps=1e-5)
        nn.init.constant_(self.features.weight, 1.0)
        self.features.weight.requires_grad = False
        self.normalise = normalise

    def forward(self, x):
        x = self.prelu(self.bn1(self.conv1(x)))
        x = self.bn2(self.down(x))
        x = self.features(self.fc(self.dropout(torch.flatten(x, 1))))
        return nn.functional.normalize(x, p=2, dim=1) if self.normalise else x


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    folder = tmp_path_factory.mktemp("people")
    photos(folder, 10, 6)
    return folder


@pytest.fixture(scope="module")
def bundles(tmp_path_factory):
    """A bundle of the module that normalises, and of the one that does not."""
    root = tmp_path_factory.mktemp("bundles")
    for name in ("unit", "raw"):
        model = vd.model(ArcFaceLike(name == "unit"), image_size=SIDE, task="embedding")
        graph = vd.export(model, root / f"{name}-graph", progress=False)
        (root / name).mkdir()
        compile_bundle(graph.file, "onnxruntime-cpu", None, None, root / name)
    return root


@pytest.fixture(scope="module")
def predictor(bundles):
    with load(bundles / "raw") as predictor:
        yield predictor


def test_the_answer_is_that_of_the_module(bundles, images):
    """Normalised by the model or by the answer: the same direction, of length 1; as the model has it where that is
    asked for."""
    image = next((images / "p0").iterdir())
    with load(bundles / "unit") as own, load(bundles / "raw") as ours:
        tensor, _ = ours.prepare(image)
        answers = [each.predict(image) for each in (own, ours)]
        ours.postprocess = EmbeddingSpec(normalised=False)
        raw = ours.predict(image).vector
    pixels = torch.from_numpy(tensor).permute(0, 3, 1, 2) / 255
    with torch.no_grad():
        expected = ArcFaceLike(normalise=False).eval()((pixels - 0.5) / 0.5)[0].numpy()
    np.testing.assert_allclose(raw, expected, rtol=1e-3, atol=1e-4)
    for answer in answers:
        np.testing.assert_allclose(answer.vector, expected / np.linalg.norm(expected), rtol=1e-3, atol=1e-5)
    assert answers[0].similarity(answers[1]) == pytest.approx(1)


def test_similarity_is_the_cosine(predictor, images):
    a, b = images / "p0" / "0.png", images / "p1" / "0.png"
    first, second = (predictor.predict(each).vector.astype(np.float64) for each in (a, b))
    assert predictor.similarity(a, b) == pytest.approx(float(first @ second), abs=1e-6)
    assert predictor.similarity(a, a) == pytest.approx(1)
    assert predictor.similarity(a, b) == predictor.similarity(b, a) < predictor.similarity(a, images / "p0" / "1.png")
    turned = [np.ascontiguousarray(np.asarray(Image.open(each))[:, :, ::-1]) for each in (a, b)]
    assert predictor.similarity(*turned, channels="bgr") == pytest.approx(predictor.similarity(a, b), abs=1e-6)


def test_a_gallery_gives_the_most_alike_images(predictor, images, tmp_path):
    gallery = predictor.gallery(images)
    assert len(gallery) == 60 and isinstance(predictor, EmbeddingPredictor)
    query = images / "p3" / "2.png"
    vectors = np.stack([predictor.predict(images / name).vector for name in gallery.names])
    expected = np.argsort(-(vectors @ predictor.predict(query).vector), kind="stable")[:4]
    matches = predictor.search(query, gallery, top=4)
    assert [match.name for match in matches] == [gallery.names[place] for place in expected]
    assert (matches[0].name, matches[0].identity) == ("p3/2.png", "p3")
    assert matches[0].similarity == pytest.approx(1, abs=1e-5)
    gallery.save(tmp_path / "people.npz")
    again = predictor.gallery(tmp_path / "people.npz")
    assert predictor.search(query, again, top=4) == matches
    assert len(predictor.search(query, again, top=1000)) == 60


def test_a_gallery_of_another_model_is_refused(predictor, bundles, images, tmp_path):
    """The two bundles have graphs of other bytes; two engines of one bundle have one model."""
    predictor.gallery(images / "p0").save(tmp_path / "people.npz")
    with load(bundles / "unit") as other:
        with pytest.raises(InputError, match="was made with another model") as refused:
            other.gallery(tmp_path / "people.npz")
        assert predictor.model[:12] in refused.value.found and "gallery(FOLDER).save" in refused.value.fix
        with pytest.raises(InputError, match="another model"):
            other.search(images / "p0" / "0.png", predictor.gallery(images / "p0"))
    manifest = read_bundle(bundles / "raw")
    engines = tuple(dataclasses.replace(engine, precision="int8") for engine in manifest.engines)
    assert model_digest(dataclasses.replace(manifest, engines=engines)) == predictor.model
    moved = dataclasses.replace(manifest.preprocess, interpolation="nearest")
    assert model_digest(dataclasses.replace(manifest, preprocess=moved)) != predictor.model


def test_an_extractor_on_the_other_side_needs_its_task():
    spec = PreprocessSpec((32, 32), (32, 32), mean=(0.5,), std=(0.5,))

    def subject(task: str, artifact: str = "") -> Subject:
        return Subject(task, "fp32", Setting(task, spec), True, None, None, artifact=artifact)

    assert settings_of(subject("embedding", "engine"), subject("embedding"))[1].task == "embedding"
    for theirs, fix in ((subject("features"), "if features is a model for it: --task embedding (task= in Python)"),
                        (subject("features", "engine"), "")):  # fmt: skip
        with pytest.raises(InputError, match="the tasks or classes of the two models differ") as refused:
            settings_of(subject("embedding", "engine"), theirs)
        assert (refused.value.fix or "").startswith(fix) and bool(refused.value.fix) == bool(fix)


def damaged(folder: Path) -> dict[str, bytes]:
    """Files that are no galleries."""

    def archive(**arrays: np.ndarray) -> bytes:
        np.savez(folder / "arrays.npz", **arrays)
        return (folder / "arrays.npz").read_bytes()

    def facts(**told: object) -> np.ndarray:
        return np.frombuffer(json.dumps(told).encode(), np.uint8)

    ones, own = np.eye(2, 24, dtype=np.float32), facts(names=["a.png", "b.png"], model="x")
    return {
        "text": b"no archive",
        "no facts": archive(vectors=ones),
        "objects": archive(vectors=np.array([{}, {}], object), facts=own),
        "other numbers": archive(vectors=ones.astype(np.float64), facts=own),
        "fewer names": archive(vectors=ones, facts=facts(names=["a.png"], model="x")),
        "names that are none": archive(vectors=ones, facts=facts(names=[1, 2], model="x")),
        "long vectors": archive(vectors=2 * ones, facts=own),
        "not numbers": archive(vectors=np.nan * ones, facts=own),
        "no image": archive(vectors=ones[:0], facts=facts(names=[], model="x")),
        "a list": archive(vectors=ones, facts=np.frombuffer(b"[]", np.uint8)),
    }


def test_what_is_no_gallery(predictor, images, tmp_path):
    for name, content in damaged(tmp_path).items():
        (tmp_path / "gallery.npz").write_bytes(content)
        with pytest.raises(DataError, match="is not a gallery") as refused:
            predictor.gallery(tmp_path / "gallery.npz")
        assert refused.value.found, name
    with pytest.raises(MissingFileError, match="no gallery at"):
        predictor.gallery(tmp_path / "none.npz")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="cannot be used as a gallery"):
        predictor.gallery(tmp_path / "empty")
    (tmp_path / "empty" / "broken.png").write_bytes(b"no image")
    with pytest.raises(ImageError, match=r"broken\.png"):
        predictor.gallery(tmp_path / "empty")
    other = Gallery(("a.png",), np.ones((1, 1), np.float32), predictor.model)
    with pytest.raises(InputError, match="come from different models"):
        predictor.search(images / "p0" / "0.png", other)


def test_only_embeddings_are_searched_for(tmp_path):
    (tmp_path / "classes").mkdir()
    compile_bundle(
        classifier("classification", tmp_path / "c.onnx"), "onnxruntime-cpu", None, None, tmp_path / "classes"
    )
    options = Predict(tmp_path / "classes", ["a.png"], gallery=tmp_path)
    with pytest.raises(InputError, match="cannot search a gallery"):
        predict(options, lambda tokens: [], Reporter())


def test_a_vector_without_a_direction_is_like_nothing():
    zero, one = Embedding(np.zeros(3, np.float32)), Embedding(np.ones(3, np.float32))
    with pytest.raises(InputError, match="no direction"):
        one.similarity(zero)
    with pytest.raises(InputError, match="different models"):
        one.similarity(Embedding(np.ones(4, np.float32)))


# --- What is of the task ----------------------------------------------------------------------------------------------


def graph_of(folder: Path, **outputs: tuple[int, ...]) -> Path:
    """A graph with outputs of these names: [batch, width], or tokens [batch, n, width]."""
    b = Builder(0)
    patches = b.op("Conv", "image", b.constant(b.random(8, 3, 8, 8), "w"), kernel_shape=[8, 8], strides=[8, 8])
    rows = b.op("Transpose", b.op("Reshape", patches, b.ints(-1, 8, 4)), perm=[0, 2, 1])
    pooled = b.op("ReduceMean", rows, b.ints(1), keepdims=0)
    values = [b.linear(pooled if len(shape) == 1 else rows, 8, shape[-1], name) for name, shape in outputs.items()]
    model = b.model({"image": ["batch", 3, SIDE, SIDE]}, *values)
    for value, name in zip(model.graph.outputs, outputs, strict=True):
        value.name = name
    onnx.save(ir.to_proto(model), folder / "model.onnx")
    return folder / "model.onnx"


@pytest.mark.parametrize(
    ("outputs", "left"),
    [
        ({"anything": (5,)}, False),
        ({"embedding": (5,), "logits": (3,)}, True),
        ({"last_hidden_state": (4, 6), "pooler_output": (5,)}, True),
    ],
)
def test_a_graph_is_of_the_task_where_it_is_asked_for(outputs, left, tmp_path):
    graph = import_graph(graph_of(tmp_path, **outputs), task="embedding")
    assert (graph.task, graph.postprocess) == ("embedding", EmbeddingSpec())
    assert [(value.name, list(value.shape)[1:]) for value in graph.model.graph.outputs] == [("features", [5])]
    assert any("left out, and not compared" in note for note in graph.notes) == left


def test_what_gives_no_vector_is_refused(tmp_path):
    with pytest.raises(GraphError):
        import_graph(graph_of(tmp_path, logits=(3,), scores=(3,)), task="embedding")

    class Maps(nn.Module):
        def forward(self, x):
            return x.mean(1, keepdim=True)

    with pytest.raises(CheckpointError, match="cannot be used for the task"):
        vd.model(Maps(), image_size=SIDE, task="embedding")


def test_a_feature_extractor_is_an_embedder_without_its_patches(small_checkpoint, tmp_path):
    state = {key: tensor for key, tensor in load_file(small_checkpoint).items() if not key.startswith("head.")}
    save_file(state, tmp_path / "headless.safetensors")
    named = {"checkpoint": tmp_path / "headless.safetensors", "heads": 2}
    model, extractor = vd.model(task="embedding", **named), vd.model(**named)
    assert (model.task, extractor.task) == ("embedding", "features")
    assert any("left out, and not compared: patch_features" in line for line in str(model).splitlines())
    graph = vd.export(model, progress=False)
    assert [value.name for value in load_graph(graph.file).graph.outputs] == ["features"]
