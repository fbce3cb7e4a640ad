"""Signatures of bundles: real keys, real signatures, each refusal once."""

import datetime
import hashlib
import json
import shutil
import sys
from pathlib import Path

import pytest

from tests.bundle.test_read import FILES, GOOD
from tests.command_line import command_line
from vitdeploy.bundle.read import MANIFEST_FILE, file_sha256, read_bundle
from vitdeploy.bundle.sign import SIGNATURE_FILE, sign_bundle, signed_by, signed_digests
from vitdeploy.errors import (
    DigestError,
    InputError,
    MissingFileError,
    MissingPackageError,
    SignatureError,
    UntrustedEngineError,
)
from vitdeploy.runtime.engine import make_runner
from vitdeploy.runtime.trust import read_trusted
from vitdeploy.spec import EngineSpec, decode

model_signing = pytest.importorskip("model_signing", reason="pip install 'vitdeploy[sign]'")

from cryptography import x509  # noqa: E402 - what model-signing brings
from cryptography.hazmat.primitives import hashes, serialization  # noqa: E402
from cryptography.hazmat.primitives.asymmetric import ec, rsa  # noqa: E402

PEM = serialization.Encoding.PEM
PLAIN = serialization.NoEncryption()
PLAN = b"a plan of TensorRT"


@pytest.fixture
def bundle(tmp_path):
    folder = tmp_path / "bundle"
    for name, data in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    (folder / MANIFEST_FILE).write_text(json.dumps(GOOD), encoding="utf-8")
    return folder


def write_keys(folder, name, key=None, encryption=PLAIN):
    """(private, public) key files."""
    key = key or ec.generate_private_key(ec.SECP256R1())
    private, public = folder / f"{name}.pem", folder / f"{name}.pub"
    private.write_bytes(key.private_bytes(PEM, serialization.PrivateFormat.PKCS8, encryption))
    public.write_bytes(key.public_key().public_bytes(PEM, serialization.PublicFormat.SubjectPublicKeyInfo))
    return private, public


@pytest.fixture
def ours(tmp_path):
    return write_keys(tmp_path, "ours")


@pytest.fixture
def theirs(tmp_path):
    return write_keys(tmp_path, "theirs")


@pytest.fixture
def signed(bundle, ours):
    sign_bundle(bundle, ours[0])
    return bundle


def read(key):
    return serialization.load_pem_private_key(key.read_bytes(), None)


def write_certificate(path, name, key, issuer, issuer_key, *extensions):
    subject, signer = (x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, each)]) for each in (name, issuer))
    now = datetime.datetime.now(datetime.timezone.utc)
    builder = x509.CertificateBuilder(signer, subject, key.public_key(), x509.random_serial_number())
    builder = builder.not_valid_before(now).not_valid_after(now + datetime.timedelta(days=1))
    for extension in extensions:
        builder = builder.add_extension(extension, critical=True)
    path.write_bytes(builder.sign(issuer_key, hashes.SHA256()).public_bytes(PEM))
    return path


def usage(*, signature):
    names = ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement", "crl_sign")
    others = dict.fromkeys((*names, "encipher_only", "decipher_only"), False)
    return x509.KeyUsage(digital_signature=signature, key_cert_sign=not signature, **others)


@pytest.fixture
def authority(tmp_path):
    """(root certificate, its key)."""
    key = ec.generate_private_key(ec.SECP384R1())
    ca = x509.BasicConstraints(ca=True, path_length=None)
    return write_certificate(tmp_path / "root.pem", "root", key, "root", key, ca, usage(signature=False)), key


# --- what is accepted -------------------------------------------------------------------------------------------------


def test_a_signed_bundle_is_taken_wherever_it_is_copied_to(signed, ours, tmp_path):
    assert signed_by(signed, ours[1])
    assert signed_by(signed.rename(tmp_path / "renamed"), ours[1])


@pytest.mark.parametrize("curve", [ec.SECP384R1, ec.SECP521R1])
def test_other_curves_sign_too(bundle, tmp_path, curve):
    private, public = write_keys(tmp_path, "key", ec.generate_private_key(curve()))
    sign_bundle(bundle, private)
    assert signed_by(bundle, public)


def test_who_names_nobody_is_told_that_nobody_signed(bundle, signed):
    assert not signed_by(signed, None)
    assert signed_digests(signed, None) == frozenset()


def test_the_digests_of_a_signed_bundle_are_those_of_its_files(signed, ours):
    manifest = file_sha256(signed / "manifest.json")
    assert signed_digests(signed, ours[1]) == {manifest, *(entry["sha256"] for entry in GOOD["files"])}


def test_the_signature_is_one_that_its_own_tool_reads(signed, ours, theirs):
    verifying = model_signing.verifying
    verifying.Config().use_elliptic_key_verifier(public_key=ours[1]).verify(signed, signed / SIGNATURE_FILE)
    with pytest.raises(ValueError, match="Key mismatch"):
        verifying.Config().use_elliptic_key_verifier(public_key=theirs[1]).verify(signed, signed / SIGNATURE_FILE)


def test_a_bundle_that_was_changed_can_be_signed_again(signed, ours, theirs):
    (signed / "notes.txt").write_text("more", encoding="utf-8")
    sign_bundle(signed, theirs[0])
    assert signed_by(signed, theirs[1])
    with pytest.raises(SignatureError, match="not signed by"):
        signed_by(signed, ours[1])
    assert [path.name for path in signed.glob("*.sig*")] == [SIGNATURE_FILE]


# --- image sizes ------------------------------------------------------------------------------------------------------


@pytest.fixture
def sized(bundle, tmp_path):
    """A bundle with one of a further image size inside, which holds a plan of TensorRT."""
    inner = shutil.copytree(bundle, tmp_path / "inner")
    (inner / "model.plan").write_bytes(PLAN)
    plan = {"path": "model.plan", "bytes": len(PLAN), "sha256": file_sha256(inner / "model.plan")}
    engine = {**GOOD["engines"][0], "target": "tensorrt", "files": ["model.plan"]}
    manifest = {**GOOD, "engines": [engine], "files": [*GOOD["files"], plan]}
    (inner / MANIFEST_FILE).write_text(json.dumps(manifest), encoding="utf-8")
    (bundle / "sizes").mkdir()
    inner.rename(bundle / "sizes" / "16x16")
    files = [path for path in sorted(bundle.rglob("*")) if path.is_file() and path != bundle / MANIFEST_FILE]
    entries = [
        {"path": path.relative_to(bundle).as_posix(), "bytes": path.stat().st_size, "sha256": file_sha256(path)}
        for path in files
    ]
    (bundle / MANIFEST_FILE).write_text(json.dumps({**GOOD, "files": entries, "sizes": ["16x16"]}), encoding="utf-8")
    return bundle


def loaded(inner, key):
    """What a runner reads of the plan in a bundle of one image size."""
    runner = make_runner(inner, read_bundle(inner).engines[0], trust=key)
    return read_trusted(inner / "model.plan", runner.trusted)


@pytest.fixture
def nothing_built(tmp_path, monkeypatch):
    """No engine was built by this user."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_the_signature_of_the_whole_covers_each_image_size(sized, ours, theirs, nothing_built, tmp_path, monkeypatch):
    inner = sized / "sizes" / "16x16"
    with pytest.raises(SignatureError, match=r"bundle is not signed\n"):
        signed_by(inner, ours[1])
    sign_bundle(sized, ours[0])
    assert not signed_by(inner, None)
    assert loaded(inner, ours[1]) == PLAN
    with pytest.raises(SignatureError, match=r"is not signed by .*theirs\.pub"):
        loaded(inner, theirs[1])
    (tmp_path / "link").symlink_to(inner)
    monkeypatch.chdir(inner)
    for path in (tmp_path / "link", Path()):
        assert loaded(path, ours[1]) == PLAN


@pytest.mark.parametrize("name", ["model.plan", MANIFEST_FILE, "../../labels.txt", "../../engines/more.plan"])
def test_an_image_size_is_as_it_was_signed_and_so_is_all_around_it(sized, ours, nothing_built, name):
    """A manifest that lists the digest of another plan is another file than was signed."""
    sign_bundle(sized, ours[0])
    inner = sized / "sizes" / "16x16"
    if name == MANIFEST_FILE:
        (inner / "model.plan").write_bytes(b"evil")
        text = (inner / name).read_text(encoding="utf-8")
        changed = text.replace(hashlib.sha256(PLAN).hexdigest(), hashlib.sha256(b"evil").hexdigest())
        (inner / name).write_text(changed, encoding="utf-8")
    else:
        (inner / name).write_bytes(b"evil")
    with pytest.raises(SignatureError, match="does not match its signature"):
        loaded(inner, ours[1])


def test_a_bundle_that_lies_beside_those_of_a_signed_one_is_not_covered(sized, ours, nothing_built):
    sign_bundle(sized, ours[0])
    other = shutil.copytree(sized / "sizes" / "16x16", sized / "sizes" / "24x24")
    with pytest.raises(SignatureError, match="does not match its signature"):
        loaded(other, ours[1])
    moved = other.rename(sized.parent / "24x24")
    with pytest.raises(SignatureError, match=r"24x24 is not signed\n"):
        loaded(moved, ours[1])
    assert loaded(sized / "sizes" / "16x16", ours[1]) == PLAN


def test_an_image_size_with_a_signature_of_its_own_is_judged_by_that(sized, ours, theirs, nothing_built):
    inner = sized / "sizes" / "16x16"
    sign_bundle(inner, theirs[0])
    sign_bundle(sized, ours[0])
    assert signed_by(sized, ours[1])
    assert loaded(inner, theirs[1]) == PLAN
    with pytest.raises(SignatureError, match=r"is not signed by .*ours\.pub"):
        loaded(inner, ours[1])


def test_a_certificate_that_a_trusted_root_issued_is_an_identity(bundle, tmp_path, authority, ours):
    root, root_key = authority
    leaf = write_certificate(tmp_path / "leaf.pem", "me", read(ours[0]), "root", root_key, usage(signature=True))
    sign_bundle(bundle, ours[0], leaf)
    assert signed_by(bundle, root)


# --- what is refused --------------------------------------------------------------------------------------------------


def test_an_unsigned_bundle_is_refused(bundle, ours):
    with pytest.raises(SignatureError, match=r"is not signed\n") as caught:
        signed_by(bundle, ours[1])
    assert caught.value.exit_code == 3
    assert caught.value.found == f"no {SIGNATURE_FILE} in it"


def test_a_signature_behind_a_link_is_none(signed, ours, tmp_path):
    outside = shutil.move(signed / SIGNATURE_FILE, tmp_path / "elsewhere.sig")
    (signed / SIGNATURE_FILE).symlink_to(outside)
    with pytest.raises(SignatureError, match=r"is not signed\n"):
        signed_by(signed, ours[1])


def test_the_signature_of_another_key_is_refused(signed, theirs):
    with pytest.raises(SignatureError, match=r"is not signed by .*theirs\.pub"):
        signed_by(signed, theirs[1])


def edit(signed, change):
    path = signed / SIGNATURE_FILE
    content = json.loads(path.read_text(encoding="utf-8"))
    change(content)
    path.write_text(json.dumps(content), encoding="utf-8")


def test_a_signature_that_hides_its_key_is_refused(signed, theirs):
    edit(signed, lambda content: content["verificationMaterial"]["publicKey"].clear())
    with pytest.raises(SignatureError, match="is not signed by"):
        signed_by(signed, theirs[1])


def test_a_changed_payload_is_refused(signed, ours, bundle, theirs):
    """What the key signed is not what the file says."""
    other = json.loads((signed / SIGNATURE_FILE).read_text(encoding="utf-8"))["dsseEnvelope"]["signatures"]
    sign_bundle(bundle, theirs[0])

    def swap(content):
        content["dsseEnvelope"]["signatures"] = other

    edit(bundle, swap)
    with pytest.raises(SignatureError, match="is not signed by"):
        signed_by(bundle, theirs[1])


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda folder: (folder / "engines/onnxruntime-cpu/graph.onnx").write_bytes(b"an Engine" * 100), "graph"),
        (lambda folder: (folder / MANIFEST_FILE).write_text(json.dumps({**GOOD, "name": "other"})), MANIFEST_FILE),
        (lambda folder: (folder / "labels.txt").unlink(), "labels.txt"),
        (lambda folder: (folder / "engines" / "more.plan").write_bytes(b"code"), "more.plan"),
        (lambda folder: (folder / ".gitignore").write_bytes(b"code"), ".gitignore"),
    ],
    ids=["changed", "manifest", "removed", "added", "hidden"],
)
def test_a_file_that_is_not_as_it_was_signed_is_refused(signed, ours, change, name):
    change(signed)
    with pytest.raises(SignatureError, match="does not match its signature") as caught:
        signed_by(signed, ours[1])
    assert name in caught.value.found


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"verificationMaterial": {}}', "\udcff"], ids=str)
def test_a_file_that_is_no_signature_is_refused(signed, ours, content):
    (signed / SIGNATURE_FILE).write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(SignatureError, match="cannot verify"):
        signed_by(signed, ours[1])


def test_a_link_in_the_bundle_is_refused(signed, ours, tmp_path):
    (signed / "more").symlink_to(tmp_path)
    with pytest.raises(SignatureError, match="cannot verify") as caught:
        signed_by(signed, ours[1])
    assert "symlink" in caught.value.found.lower()


def test_a_certificate_of_another_root_is_refused(bundle, tmp_path, authority, ours):
    other = ec.generate_private_key(ec.SECP256R1())
    leaf = write_certificate(tmp_path / "leaf.pem", "me", read(ours[0]), "other", other, usage(signature=True))
    sign_bundle(bundle, ours[0], leaf)
    with pytest.raises(SignatureError, match=r"is not signed by .*root\.pem"):
        signed_by(bundle, authority[0])


def test_a_certificate_that_is_not_for_signing_is_refused(bundle, tmp_path, authority, ours):
    root, root_key = authority
    leaf = write_certificate(tmp_path / "leaf.pem", "me", read(ours[0]), "root", root_key, usage(signature=False))
    sign_bundle(bundle, ours[0], leaf)
    with pytest.raises(SignatureError, match="cannot verify") as caught:
        signed_by(bundle, root)
    assert "cannot be used for signing" in caught.value.found


# --- keys that cannot be used -----------------------------------------------------------------------------------------


def test_keys_of_other_kinds_cannot_sign(bundle, tmp_path):
    key, public = write_keys(tmp_path, "rsa", rsa.generate_private_key(65537, 2048))
    with pytest.raises(InputError, match="cannot sign") as caught:
        sign_bundle(bundle, key)
    assert "elliptic-curve key" in caught.value.expected
    with pytest.raises(InputError, match="is not a public key or certificate"):
        signed_by(bundle, public)
    assert not (bundle / SIGNATURE_FILE).exists()


def test_a_key_with_a_password_cannot_sign(bundle, tmp_path):
    key, _ = write_keys(tmp_path, "locked", encryption=serialization.BestAvailableEncryption(b"secret"))
    with pytest.raises(InputError, match="cannot sign") as caught:
        sign_bundle(bundle, key)
    assert "without a password" in caught.value.expected


def test_a_file_that_is_no_key_cannot_sign_and_names_nobody(bundle, tmp_path):
    (tmp_path / "key.pem").write_text("no key", encoding="utf-8")
    with pytest.raises(InputError, match="cannot sign"):
        sign_bundle(bundle, tmp_path / "key.pem")
    with pytest.raises(InputError, match="is not a public key or certificate"):
        signed_by(bundle, tmp_path / "key.pem")


def test_the_certificate_of_another_key_cannot_sign(bundle, authority, ours):
    with pytest.raises(InputError, match=r"ours\.pem and .*root\.pem cannot sign"):
        sign_bundle(bundle, ours[0], authority[0])


def test_a_missing_key_is_named(bundle, ours, tmp_path):
    with pytest.raises(MissingFileError, match=r"no key or certificate at .*none\.pem"):
        sign_bundle(bundle, tmp_path / "none.pem")
    with pytest.raises(MissingFileError, match=r"none\.pub"):
        signed_by(bundle, tmp_path / "none.pub")


def test_only_an_intact_bundle_is_signed(bundle, ours):
    (bundle / "labels.txt").write_bytes(b"other")
    with pytest.raises(DigestError):
        sign_bundle(bundle, ours[0])
    assert not (bundle / SIGNATURE_FILE).exists()


def test_without_the_package_the_user_is_told_what_installs_it(bundle, ours, monkeypatch):
    monkeypatch.setitem(sys.modules, "model_signing", None)
    for action in (lambda: sign_bundle(bundle, ours[0]), lambda: signed_by(bundle, ours[1])):
        with pytest.raises(MissingPackageError) as caught:
            action()
        assert caught.value.fix == "pip install 'vitdeploy[sign]'"
    assert not signed_by(bundle, None)


# --- engines that are code --------------------------------------------------------------------------------------------


def test_a_plan_may_be_loaded_from_a_signed_bundle_and_from_no_other(bundle, ours, theirs, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))  # where no engine was built
    plan = bundle / "model.plan"
    plan.write_bytes(b"a plan")
    entry = {"path": plan.name, "bytes": 6, "sha256": file_sha256(plan)}
    (bundle / MANIFEST_FILE).write_text(json.dumps({**GOOD, "files": [*GOOD["files"], entry]}), encoding="utf-8")
    engine = decode(EngineSpec, {**GOOD["engines"][0], "target": "tensorrt", "files": [plan.name]})

    sign_bundle(bundle, ours[0])
    with pytest.raises(UntrustedEngineError):  # nobody is trusted
        read_trusted(plan, make_runner(bundle, engine).trusted)
    with pytest.raises(SignatureError):
        make_runner(bundle, engine, trust=theirs[1])
    runner = make_runner(bundle, engine, trust=ours[1])
    assert read_trusted(plan, runner.trusted) == b"a plan"
    plan.write_bytes(b"A plan")
    with pytest.raises(UntrustedEngineError):
        read_trusted(plan, runner.trusted)


# --- the command line -------------------------------------------------------------------------------------------------


@pytest.fixture
def here(shared_store, tmp_path):
    with command_line(tmp_path, shared_store, short_bench=True) as run:
        yield run


def test_commands_take_a_signed_bundle_and_no_other(here, small_bundle, ours, theirs, digits, tmp_path):
    bundle = shutil.copytree(small_bundle, tmp_path / "copy")
    image = next((digits / "evaluation").rglob("*.png"))
    commands = (
        ("predict", bundle, image),
        ("bench", bundle, "--duration", 0.1, "--warmup", 0, "--batch", 1),
        ("verify", bundle, "--against", bundle, "--data", image.parent, "--num-samples", 2),
    )
    for command in commands:
        refused = here(*command, "--trust", ours[1], "--json")
        assert (refused.returncode, json.loads(refused.stdout)["error"]["code"]) == (3, "VD3105")
    done = here("bundle", "sign", bundle, "--key", ours[0], "--json")
    assert done.document["signature"] == str(bundle / SIGNATURE_FILE)
    for command in commands:
        assert here(*command, "--trust", ours[1]).returncode == 0
        assert here(*command, "--trust", theirs[1]).returncode == 3


def test_options_that_do_not_fit_are_refused(here, small_bundle, ours, digits):
    assert here("bundle", "sign", small_bundle, "--key", ours[0], "--chain", ours[0]).returncode == 2
    refused = here("verify", small_bundle, "--against", small_bundle, "--data", digits, "--bisect", "--trust", ours[1])
    assert (refused.returncode, "leave --trust out" in refused.stderr) == (2, True)


def test_a_signature_travels_with_a_packed_bundle(here, bundle, ours, theirs, tmp_path):
    assert here("bundle", "sign", bundle, "--key", ours[0]).returncode == 0
    done = here("bundle", "pack", bundle, "-o", "x.vitb", "--json")
    assert (done.document["signed"], "--trust PUBLIC_KEY.pem" in done.stderr) == (True, True)
    assert "signed, but the signer was not checked" in here("bundle", "verify", "x.vitb").stdout
    for name in ("x.vitb", bundle):
        assert f"signed by {ours[1]}" in here("bundle", "verify", name, "--trust", ours[1]).stdout
        refused = here("bundle", "verify", name, "--trust", theirs[1])
        assert (refused.returncode, f"{name} is not signed by {theirs[1]}" in refused.stderr) == (3, True)
    refused = here("bundle", "unpack", "x.vitb", "-o", "out", "--trust", theirs[1])
    assert (refused.returncode, "x.vitb is not signed by" in refused.stderr) == (3, True)
    assert not (tmp_path / "out").exists()
    assert here("bundle", "unpack", "x.vitb", "-o", "out", "--trust", ours[1]).returncode == 0
    assert signed_by(tmp_path / "out", ours[1])

    (bundle / SIGNATURE_FILE).unlink()
    assert here("bundle", "pack", bundle, "-o", "x.vitb").returncode == 0
    refused = here("bundle", "unpack", "x.vitb", "-o", "new", "--trust", ours[1])
    assert (refused.returncode, "x.vitb is not signed" in refused.stderr) == (3, True)
    assert not (tmp_path / "new").exists()


def test_a_bundle_that_changed_since_it_was_signed_is_not_packed(here, signed, ours):
    (signed / "notes.txt").write_text("more", encoding="utf-8")
    sign_bundle(signed, ours[0])  # of a file that the manifest does not list
    refused = here("bundle", "pack", signed, "-o", "x.vitb")
    assert (refused.returncode, "'notes.txt'" in refused.stderr) == (3, True)
