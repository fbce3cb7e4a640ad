"""Failures on a device, as reported to the host. Light to import."""

from __future__ import annotations

import shutil
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vitdeploy.backends import TARGETS
from vitdeploy.devices.agent.documents import Failure
from vitdeploy.errors import HostError, MissingPackageError, StorageError, VitdeployError


@contextmanager
def explained() -> Iterator[None]:
    """Turns failures on a device into errors that say what to do there."""
    try:
        yield
    except MissingPackageError as error:
        extra = getattr(error, "extra", "")  # the error of a child process has its message only
        packages = [row.package for row in TARGETS.values() if row.extra == extra != ""]
        if packages:
            error.fix = f"{sys.executable} -m pip install {packages[0]}"
        raise
    except (VitdeployError, BrokenPipeError):
        raise
    except ModuleNotFoundError as error:
        name = {"PIL": "pillow"}.get(str(error.name), str(error.name))
        raise HostError(
            f"the package {name} is not installed for {sys.executable}",
            fix=f"{sys.executable} -m pip install numpy pillow",
        ) from None
    except OSError as error:
        raise StorageError(
            "a file cannot be read or written",
            found=f"{error.strerror or error}, {shutil.disk_usage(Path.home()).free:,} bytes free in {Path.home()}",
            fix="free some space there",
        ) from None
    except Exception as error:
        traceback.print_exc()
        raise VitdeployError(f"{type(error).__name__}: {str(error)[:300]}") from None


def failure(artifact: str, error: VitdeployError) -> Failure:
    return Failure(artifact, error.code, error.message, error.found, error.wanted, error.fix)
