"""Remote storage behind a URI that fsspec opens: with timeouts, vitdeploy errors, and no secrets in messages."""

from __future__ import annotations

import concurrent.futures
import contextlib
import errno
import itertools
import re
import threading
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import unquote, urlsplit

from vitdeploy.errors import MissingPackageError, StorageError, VitdeployError
from vitdeploy.publish import storage_error

if TYPE_CHECKING:
    import fsspec

T = TypeVar("T")
# Seconds to wait for one answer, and the minimum bytes per second of a transfer.
PATIENCE_SECONDS, SLOWEST_BYTES = 60.0, 256 << 10
# Errors of a local disk during a download.
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# Services whose uploads appear only when complete, so that no temporary name is needed. A move would take a copy, a
# removal, and queries of fsspec before both: seven requests, each with cost and latency.
WHOLE_UPLOADS = {"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss"}
# Where the packages of these protocols read credentials.
CREDENTIALS = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS",
    "gcs": "GOOGLE_APPLICATION_CREDENTIALS",
    "az": "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
    "abfs": "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
}


def shown_uri(uri: str) -> str:
    """A URI for printing: without users, passwords, queries and fragments. A secret may contain slashes, so everything
    up to the last "@" is removed."""
    parts = (re.sub(r"://.*@", "://", part, flags=re.DOTALL) for part in re.split(r"[?#]", uri)[0].split("::"))
    return "::".join(parts)


class Remote:
    """Storage at `uri`; opened on first use.

    Args:
        kind: its name in messages: "shared store".
        unknown: the error for a URI that fsspec does not understand.
    """

    def __init__(self, uri: str, kind: str, unknown: type[VitdeployError] = StorageError) -> None:
        self.uri, self._kind, self._unknown = uri, kind, unknown
        self._opened: tuple[fsspec.AbstractFileSystem, str] | None = None

    def __getstate__(self) -> tuple[Any, ...]:
        return self.uri, self._kind, self._unknown

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.__init__(*state)  # type: ignore[misc]  # connections stay with their process

    @property
    def name(self) -> str:
        """The URI without possible secrets."""
        return shown_uri(self.uri)

    def open(self) -> tuple[fsspec.AbstractFileSystem, str]:
        """The file system, and the path in it.

        Raises:
            MissingPackageError: fsspec, or its package for this protocol, is not installed.
            VitdeployError: of the class `unknown`: invalid URI.
        """
        if self._opened is None:
            try:
                import fsspec
            except ImportError:
                raise MissingPackageError("fsspec", "data", f"a {self._kind}") from None
            try:  # some protocols connect already
                files, at = within(PATIENCE_SECONDS, lambda: fsspec.core.url_to_fs(self.uri))
            except ImportError as error:  # such as "Install s3fs to access S3"
                why = f"a {self._kind} at {urlsplit(self.uri).scheme}://"
                raise MissingPackageError(_package(error), "", why) from None
            except concurrent.futures.TimeoutError:
                raise self._late(PATIENCE_SECONDS, "opened") from None
            except Exception as error:  # each protocol has its own
                raise self._failed(error, "opened", self._unknown if isinstance(error, ValueError) else None) from None
            self._opened = files, at.rstrip("/")
        return self._opened

    def ask(
        self,
        question: Callable[[fsspec.AbstractFileSystem, str], T],
        size: int = 0,
        here: Path | None = None,
        done: str = "used",
    ) -> T:
        """Run `question` on the storage, with a timeout for `size` bytes, and return its result. Errors of vitdeploy
        that it raises propagate.

        Args:
            here: the local folder that is written to.
            done: the participle in messages after "cannot be": "read", "written".

        Raises:
            StorageError: no answer in time, or another error of the service; or the local disk is full.
            MissingPackageError, VitdeployError: as `open`.
        """
        files, at = self.open()
        seconds = PATIENCE_SECONDS + size / SLOWEST_BYTES
        try:
            return within(seconds, lambda: question(files, at))
        except VitdeployError:
            raise
        except concurrent.futures.TimeoutError:
            raise self._late(seconds, done) from None
        except Exception as error:  # each protocol has its own
            if here is not None and isinstance(error, OSError) and error.errno in FULL:
                raise storage_error(error, here) or error from None
            raise self._failed(error, done) from None

    def publish(self, name: str, content: Path | bytes, size: int, *, aside: str = "") -> None:
        """Write `content` of `size` bytes; readers never see a part. If the service does not guarantee that, write it
        under a temporary name, in the folder `aside` or the final one, and rename it. Both are below the URI. Errors as
        in `ask`."""

        def write(files: fsspec.AbstractFileSystem, at: str) -> None:
            final = f"{at}/{name}"
            if WHOLE_UPLOADS.intersection([files.protocol] if isinstance(files.protocol, str) else files.protocol):
                _upload(files, content, final)
                return
            folder = final.rpartition("/")[0]
            passing = f"{at}/{aside}/{uuid.uuid4().hex}" if aside else f"{folder}/.tmp-{uuid.uuid4().hex}"
            files.makedirs(passing.rpartition("/")[0], exist_ok=True)
            files.makedirs(folder, exist_ok=True)
            try:
                _upload(files, content, passing)
                files.mv(passing, final)
            except BaseException:
                with contextlib.suppress(Exception):
                    files.rm_file(passing)
                raise

        self.ask(write, size, done="written")

    def _late(self, seconds: float, done: str) -> StorageError:
        return StorageError(
            f"the {self._kind} {self.name} cannot be {done}",
            found=f"no answer for {seconds:.0f} s",
            expected="an answer",
            fix="run the same command again: it continues where it stopped",
        )

    def _failed(self, error: Exception, done: str, kind: type[VitdeployError] | None = None) -> VitdeployError:
        where = CREDENTIALS.get(urlsplit(self.uri).scheme)
        fix = f"check the credentials: {where}" if where else "check the address and its permissions"
        return (kind or StorageError)(
            f"the {self._kind} {self.name} cannot be {done}",
            found=f"{type(error).__name__}: {self._unsecret(str(error))}"[:300],
            expected="a successful request" if kind is None else "a URI for fsspec, such as s3://bucket/folder",
            fix=fix,
        )

    def _unsecret(self, text: str) -> str:
        """The text of a library without the secrets of the URI."""
        text = text.replace(self.uri, self.name)
        place, _, query = self.uri.partition("?")
        user = place.rpartition("@")[0].partition("://")[2]
        for secret in (user, user.partition(":")[2], query):
            for form in {secret, unquote(secret)} - {""}:
                text = text.replace(form, "...")
        return text


def _upload(files: fsspec.AbstractFileSystem, content: Path | bytes, to: str) -> None:
    if isinstance(content, bytes):
        files.pipe_file(to, content)
    else:
        files.put_file(str(content), to)


def _package(error: ImportError) -> str:
    words = str(error).split()
    follows = [word for before, word in itertools.pairwise(words) if before.lower() == "install"]
    return error.name or next(iter(follows), "that fsspec asks for")


def within(seconds: float, work: Callable[[], T]) -> T:
    """Run `work` in a thread, and abandon the thread after `seconds`: not every protocol has a timeout.

    Raises:
        TimeoutError: of concurrent.futures. Errors of `work` propagate.
    """
    future: concurrent.futures.Future[T] = concurrent.futures.Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="vitdeploy-remote", daemon=True).start()
    return future.result(seconds)
