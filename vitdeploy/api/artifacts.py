"""Artifacts that can be verified and measured: a bundle, a graph, a model; as values or as their names."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Union

from vitdeploy.api.bundle import Bundle
from vitdeploy.api.folders import is_unnamed
from vitdeploy.api.graph import Graph
from vitdeploy.api.model import Model, model

if TYPE_CHECKING:
    from torch import nn

    from vitdeploy.models.source import Source
    from vitdeploy.workflows.subjects import Subject


@dataclass(frozen=True)
class Named:
    """An artifact by its name, with further options of the command line: `source` is for a model."""

    text: str
    source: Source


ArtifactLike = Union[Bundle, Graph, Model, Named, str, Path, "nn.Module"]


def artifact_name(artifact: ArtifactLike) -> str | None:
    """The path or name that an artifact goes by; None for a model in memory."""
    if isinstance(artifact, Named):
        return artifact.text
    if isinstance(artifact, Bundle | Graph):
        return str(artifact.folder)
    return str(artifact) if isinstance(artifact, str | Path) else None


def check_early(artifact: ArtifactLike) -> None:
    """Raise for a name that nothing has, before anything heavy is imported."""
    from vitdeploy.pipeline.early import check_artifact

    if (name := artifact_name(artifact)) is not None:
        check_artifact(name)


@contextlib.contextmanager
def opened(
    *,
    target: str | None,
    emulated: bool = False,
    trust: Path | None = None,
    accepted: Sequence[str] = (),
    proven: bool = False,
) -> Iterator[Callable[[ArtifactLike], list[Subject]]]:
    """A finder of what can be run: every engine of a bundle (or the one for `target`), a graph, which is compiled into
    a folder that goes at the end, or an original.

    Args:
        emulated: graphs that are typed for a GPU are evaluated on this CPU, with the storage of their types.
        trust: bundles must be signed by this identity.
        accepted: entries of the table of runtimes known to be wrong that are no reason to refuse a graph.
        proven: engines of graphs must give the graph's own answers.

    Raises:
        InputError: one of `accepted` is no entry.
    """
    from vitdeploy.models.source import Source
    from vitdeploy.workflows.subjects import opened as opened_by_name

    @contextlib.contextmanager
    def finder(source: Source) -> Iterator[Callable[[str], list[Subject]]]:
        with opened_by_name(
            target=target, source=source, emulated=emulated, trust=trust, accepted=accepted, proven=proven
        ) as find:
            yield find

    if accepted:
        from vitdeploy.known_bad.find import check_ids

        check_ids(accepted)
    with contextlib.ExitStack() as stack:

        def find(artifact: ArtifactLike) -> list[Subject]:
            name = artifact_name(artifact)
            if name is None:
                return [_original(model(artifact))]  # type: ignore[arg-type]
            source = artifact.source if isinstance(artifact, Named) else Source()
            return [_shortened(each, artifact) for each in stack.enter_context(finder(source))(name)]

        yield find


def _original(read: Model) -> Subject:
    """A model that was read. Without preprocessing of its own it has only what is usual or assumed: the other side's is
    then taken."""
    from vitdeploy.models.model_folder.hub import is_hub_name
    from vitdeploy.stages.batches import settle_batch
    from vitdeploy.workflows.subjects import original_subject

    source = read.source
    reference, batch = settle_batch(read.reference)
    own = read.overrides.preprocess is not None or is_hub_name(source.name)
    return original_subject(read.name, reference, own=own, noted=batch is not None)


def _shortened(subject: Subject, artifact: ArtifactLike) -> Subject:
    """Results that nobody named a folder for are called by what they are, not by a temporary path."""
    if not isinstance(artifact, Bundle | Graph) or not is_unnamed(artifact.folder):
        return subject
    return dataclasses.replace(subject, name=subject.name.replace(str(artifact.folder), artifact.folder.name))
