"""Which releases of a runtime are asked for: "openvino==2025.2..2026.4", or any requirement of PEP 508."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from vitdeploy.errors import InputError

RUNTIMES = ("openvino", "onnxruntime")
EXAMPLE = "openvino==2025.2..2026.4"
_SERIES = re.compile(r"\s*([A-Za-z][\w.-]*?)\s*==\s*(\d+(?:\.\d+)*)\s*\.\.\s*(\d+(?:\.\d+)*)\s*")


@dataclass(frozen=True)
class Releases:
    """The releases of the package `runtime` that are in `specifier`, and up to `last` with all that begin with it."""

    runtime: str
    specifier: SpecifierSet
    last: tuple[int, ...] | None
    text: str

    def has(self, version: Version) -> bool:
        """Whether a release is asked for; pre-releases only if the specifier names one."""
        if version.is_prerelease and not self.specifier.prereleases:
            return False
        below = self.last is None or version.release[: len(self.last)] <= self.last
        return below and self.specifier.contains(version, prereleases=True)

    def of(self, versions: Iterable[Version]) -> list[Version]:
        """Those that are asked for, in order."""
        return sorted(version for version in versions if self.has(version))


def parse_releases(text: str) -> Releases:
    """The releases that a text asks for.

    Raises:
        InputError: it is no range, an empty one, or of a runtime that has no releases to compare.
    """
    series = _SERIES.fullmatch(text)
    if series is not None:
        name, first, last = series.groups()
        if Version(first) > Version(last) and Version(first).release[: last.count(".") + 1] > Version(last).release:
            raise _no_range(text, "the first release is newer than the last")
        found = Releases(name, SpecifierSet(f">={first}"), Version(last).release, text)
    else:
        try:
            asked = Requirement(text)
        except InvalidRequirement as error:
            raise _no_range(text, str(error).splitlines()[0]) from None
        if not asked.specifier or asked.url or asked.extras or asked.marker:
            raise _no_range(text, "no releases are named" if not asked.specifier else "more than a name and releases")
        found = Releases(asked.name, asked.specifier, None, text)
    if found.runtime not in RUNTIMES:
        raise InputError(
            f"releases of {found.runtime} are not compared",
            found=text,
            wanted=f"one of {', '.join(RUNTIMES)}",
            fix="a plan of TensorRT is for one release; `vitdeploy compile` builds it anew"
            if found.runtime == "tensorrt"
            else f"--runtime '{EXAMPLE}'",
        )
    return found


def _no_range(text: str, why: str) -> InputError:
    return InputError(
        f"{text!r} is no range of releases",
        found=why,
        wanted=f"NAME==FIRST..LAST, such as {EXAMPLE}, or a requirement such as 'onnxruntime>=1.20,<1.32'",
    )
