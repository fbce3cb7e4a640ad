"""What an app is given as one file: unpacked whole and checked, or not at all; the command is the same function."""

import hashlib
import shutil

import pytest

from vitdeploy.bundle.pack import pack_bundle, unpack
from vitdeploy.bundle.read import MANIFEST_FILE
from vitdeploy.errors import ArchiveError, DigestError, InputError, MissingFileError, OutputError, SignatureError
from vitdeploy.runtime import load


@pytest.fixture
def packed(small_bundle, tmp_path):
    file = tmp_path / "small.vitb"
    pack_bundle(small_bundle, file)
    return file


def test_what_is_unpacked_answers_as_what_was_packed(packed, small_bundle, digits, tmp_path):
    sha256 = hashlib.sha256(packed.read_bytes()).hexdigest()
    found = unpack(str(packed), str(tmp_path / "models" / "small"), expect_digest=f"sha256:{sha256.upper()}")
    assert (found.sha256, found.signed, found.bytes) == (sha256, False, packed.stat().st_size)
    image = next((digits / "evaluation").rglob("*.png"))
    with load(tmp_path / "models" / "small") as there, load(small_bundle) as here:
        assert there.predict(image) == here.predict(image)
    assert [path.name for path in (tmp_path / "models").iterdir()] == ["small"]


def test_a_bundle_takes_the_place_of_another_and_of_nothing_else(packed, tmp_path):
    folder = tmp_path / "small"
    told = []
    for _ in range(2):
        unpack(packed, folder, expect_digest=hashlib.sha256(packed.read_bytes()).hexdigest())
    unpack(packed, folder, progress=lambda text, done, total: told.append((text, done <= total)))
    assert set(told) == {("unpack", True)}
    (folder / "notes.txt").write_text("mine", encoding="utf-8")
    with pytest.raises(OutputError, match="contains other files"):
        unpack(packed, folder)
    assert (folder / "notes.txt").read_text(encoding="utf-8") == "mine"


@pytest.mark.parametrize("before", [False, True], ids=["nothing there", "a bundle there"])
@pytest.mark.parametrize(
    ("spoil", "error"),
    [
        (lambda file: {"expect_digest": "0" * 64}, DigestError),
        (lambda file: {"expect_digest": "sha1:12"}, InputError),
        (lambda file: file.write_bytes(file.read_bytes()[:-1]) and {}, ArchiveError),
        (lambda file: file.unlink() or {}, MissingFileError),
        (lambda file: {"trust": key_beside(file).with_name("absent.pem")}, MissingFileError),
        (lambda file: {"trust": key_beside(file)}, SignatureError),
    ],
    ids=["another digest", "no digest", "cut short", "absent", "an absent key", "not signed"],
)
def test_what_is_refused_leaves_what_was_there(packed, small_bundle, tmp_path, spoil, error, before):
    folder = tmp_path / "place" / "small"
    if before:
        shutil.copytree(small_bundle, folder)
        (folder / MANIFEST_FILE).write_bytes((folder / MANIFEST_FILE).read_bytes() + b"\n")  # to be told apart
    contents = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    options = spoil(packed)
    with pytest.raises(error):
        unpack(packed, folder, **options)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == contents
    assert folder.exists() == before
    assert [path.name for path in (tmp_path / "place").glob("*")] == ["small"] * before


def key_beside(file):
    """A public key, of nobody."""
    pytest.importorskip("model_signing", reason="pip install 'vitdeploy[sign]'")
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    public = ec.generate_private_key(ec.SECP256R1()).public_key()
    place = file.with_name("trusted.pem")
    place.write_bytes(public.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo))
    return place
