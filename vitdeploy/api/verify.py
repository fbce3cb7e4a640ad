"""Does an artifact still give the original's answers?"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from vitdeploy.api.bundle import ArtifactLike, artifact_name, check_early, opened
from vitdeploy.api.images import Images, ImagesLike, images
from vitdeploy.api.values import Line, Reporter, Shown, interval, reporting, unrelated
from vitdeploy.errors import InputError
from vitdeploy.runtime.host import usable_cores
from vitdeploy.spec import Budget, GateStatus

if TYPE_CHECKING:
    from vitdeploy.document import report as document
    from vitdeploy.tasks.adapter import DataChoice
    from vitdeploy.tasks.tensors import OutputFacts
    from vitdeploy.workflows.subjects import Subject


@dataclass(frozen=True, repr=False)
class Verification(Shown):
    """An artifact against its original on the same samples; `found` has everything, with the gate."""

    found: document.Verification
    noun: str = "image"

    @property
    def status(self) -> GateStatus:
        """ "pass", "fail" or "undecided" of the budget; "none" without one."""
        return self.found.gate.status

    @property
    def reasons(self) -> tuple[str, ...]:
        """A sentence for each bound that is not met, or not provably."""
        return self.found.gate.reasons

    @property
    def agreement(self) -> float:
        """Percent of the samples with the original's answer."""
        return self.found.verified.agreement

    @property
    def drop(self) -> float | None:
        """Points of the metric that are lost; None without labels."""
        return self.found.verified.drop

    def document(self) -> dict[str, object]:
        """The document that the command line prints with --json."""
        return self.found.document()

    def lines(self) -> list[Line]:
        from vitdeploy.tasks.features import FeatureComparison
        from vitdeploy.tasks.tensors import TensorComparison
        from vitdeploy.verification.agreement import Agreement

        found, verified, gate = self.found, self.found.verified, self.found.gate
        lines: list[Line] = [f"{found.artifact} against {found.against} on {verified.n} {self.noun}s"]
        if verified.metric is not None:
            lines.append(
                f"{verified.metric + ' ':<12}{verified.value:.2f} %, original {verified.reference_value:.2f} %, "
                f"drop {interval(verified.drop or 0.0, verified.drop_ci95)} points"
            )
        if isinstance(verified, Agreement) and verified.top5 is not None:
            lines.append(f"top-5       {verified.top5:.2f} %, original {verified.reference_top5:.2f} %")
        agreement = interval(verified.agreement, verified.agreement_ci95)
        lines.append(f"agreement   {agreement} % ({verified.agreement_of}){unrelated(verified.control)}")
        distance = [f"KL {verified.kl:.2e} nats"] if isinstance(verified, Agreement) else []
        if isinstance(verified, Agreement | FeatureComparison):
            distance.append(f"cosine {verified.cosine_mean:.6f} (least {verified.cosine_min:.6f})")
        lines += [
            f"distance    {'; '.join([*distance, 'largest difference ' + format(verified.max_difference, '.1e')])}",
            f"diagnosis   {verified.diagnosis}",
        ]
        if isinstance(verified, TensorComparison):
            lines += [f"output      {_output(each)}" for each in verified.outputs]
        lines += found.remarks
        lines += [f"warning: {text}" for text in found.warnings]
        if gate.status != "none":
            lines.append(f"gate        {gate.status}" + "".join(f"; {reason}" for reason in gate.reasons))
        return lines


def _output(facts: OutputFacts) -> str:
    """One output of no known task, in a line."""
    if facts.equal is not None:
        return f"{facts.name}: {facts.equal:.2f} % of the elements are equal"
    noise = "no error" if facts.snr is None else f"signal to noise {facts.snr:.1f} dB"
    return f"{facts.name}: {noise}, cosine {facts.cosine_mean:.6f}, largest difference {facts.max_difference:.1e}"


@dataclass(frozen=True, repr=False)
class Bisection(Shown):
    """Where the error of an engine enters, and what fixes it; `document` has every part and layer that was tested.

    `fix` is the command that fixes it, "" without one.
    """

    document: Mapping[str, object]
    text: tuple[str, ...]
    fix: str

    def lines(self) -> list[Line]:
        return [*self.text, *([self.fix] if self.fix else [])]


def verify(
    artifact: ArtifactLike,
    against: ArtifactLike,
    data: ImagesLike,
    *,
    target: str | None = None,
    max_drop: float | None = None,
    min_agreement: float | None = None,
    num_samples: int | None = None,
    seed: int = 0,
    emulate: bool = False,
    skip_bad: bool = False,
    trust: str | Path | None = None,
    accept_known_bad: Sequence[str] = (),
    jobs: int = 0,
    executor: str | None = None,
    progress: bool | Reporter = True,
) -> Verification:
    """Compare an artifact with the original on the same images. A bound that is not met is reported, not raised.

    Args:
        artifact: a `Bundle`, a `Graph`, or the path of one; with several engines the first, or the one for `target`.
        against: the original: a `Model`, a name, a `torch.nn.Module`, a graph or a bundle.
        data: images, as `vitdeploy.images` takes them, best with labels.
        target: which engine, by target or name, or what a graph is compiled for.
        max_drop: points of top-1 (or the task's metric) that may be lost.
        min_agreement: percent of equal answers.
        num_samples: evaluate on this many of the images, chosen by `seed`; None takes all.
        emulate: evaluate a graph typed for a GPU on this CPU, with its types' storage.
        skip_bad: go on without unreadable images.
        trust: bundles must be signed by this public key or certificate (PEM).
        accept_known_bad: ids of the table of runtimes known to be wrong that are no reason to refuse a graph.
        jobs: how many shards of an evaluation are done at the same time; 0: with an executor one for each
            core, or as many as the Ray cluster has CPUs for.
        executor: where they are done: by "processes" of this machine, on a cluster of "ray" on it, or "ray:HOST:PORT".
            None: by processes for more than one job, else in this process, which has others that decode for it.
        progress: as for `vitdeploy.export`.

    Raises:
        InputError: the two are for other tasks or classes, or no executor that is known. DataError, ImageError: of the
            images. WorkerError, MissingPackageError: of the executor. Errors of engines.

    >>> import numpy as np
    >>> import vitdeploy as vd
    >>> graph = vd.export("vit_w32d2h2_patch8_32", progress=False)
    >>> colours = np.random.default_rng(0).integers(0, 256, (80, 3), np.uint8)
    >>> plain = [np.tile(colour, (32, 32, 1)) for colour in colours]
    >>> vd.verify(graph, "vit_w32d2h2_patch8_32", plain, min_agreement=80, progress=False).status
    'pass'
    """
    chosen = checked_call(artifact, against, data, target)
    from vitdeploy.workflows.comparison import verify_subjects
    from vitdeploy.workflows.executors import RayCluster, executor_of
    from vitdeploy.workflows.subjects import emulation_offered

    shares = executor_of(executor, jobs or (usable_cores() if executor == "processes" else 1))
    if jobs and isinstance(shares, RayCluster):
        shares = dataclasses.replace(shares, at_a_time=jobs)

    reporter, budget = reporting(progress), Budget(max_drop=max_drop, min_agreement=min_agreement)
    name = artifact_name(artifact)
    offer = contextlib.nullcontext() if emulate or name is None else emulation_offered(name, target)
    accepted = tuple(accept_known_bad)
    with reporter, offer, opened(target=target, emulated=emulate, trust=path_or_none(trust), accepted=accepted) as find:
        ours, theirs = find(artifact)[0], find(against)[0]
        found = verify_subjects(
            ours,
            theirs,
            _choice(chosen, ours, num_samples, seed),
            skip_bad=skip_bad,
            budget=budget,
            progress=reporter.progress,
            note=reporter.note,
            executor=shares,
        )
    return Verification(found, noun_of(chosen))


def bisect(
    artifact: ArtifactLike,
    against: ArtifactLike,
    data: ImagesLike,
    *,
    target: str | None = None,
    num_samples: int | None = None,
    seed: int = 0,
    skip_bad: bool = False,
    progress: bool | Reporter = True,
) -> Bisection:
    """Find which part and which layer, its input or its weight, makes an engine's answers differ from those of its
    float graph, on calibration images. Both are graphs or bundles; arguments and errors as of `verify`."""
    name, original = require_path(artifact), require_path(against)
    chosen = checked_call(artifact, against, data, target)
    from vitdeploy.workflows.bisection import bisect_artifact

    reporter = reporting(progress)
    if chosen.path is None:
        from vitdeploy.graph.io.files import admitted_metadata
        from vitdeploy.pipeline.setting import graph_setting
        from vitdeploy.stages.step import find_graph

        file = find_graph(Path(original))
        place, _ = chosen.place(graph_setting(file, admitted_metadata(file)))
    else:
        place = chosen.path
    with reporter:
        found = bisect_artifact(
            name,
            original,
            place,
            target=target,
            num_samples=num_samples,
            seed=seed,
            skip_bad=skip_bad,
            progress=reporter.progress,
        )
    return Bisection(found.document, tuple(found.lines), found.then)


def checked_call(artifact: ArtifactLike, against: ArtifactLike, data: ImagesLike, target: str | None) -> Images:
    """Check names and paths before anything heavy is imported."""
    from vitdeploy.pipeline.early import check_data, check_engine, require_annotations

    if target is not None:
        check_engine(target)
    for each in (artifact, against):
        check_early(each)
    chosen = images(data)
    if chosen.path is not None:
        check_data(chosen.path)
    require_annotations(chosen.annotations)
    return chosen


def _choice(chosen: Images, ours: Subject, num_samples: int | None, seed: int) -> DataChoice:
    place, kind = chosen.place(ours.setting)
    return data_choice(chosen, place, kind, num_samples, seed)


def data_choice(chosen: Images, place: Path, kind: str, num_samples: int | None, seed: int) -> DataChoice:
    from vitdeploy.tasks.adapter import TEMPLATE, DataChoice

    asked = chosen.texts, chosen.template or TEMPLATE
    return DataChoice(place, kind, chosen.annotations, 0, num_samples or "all", seed, *asked)


def noun_of(chosen: Images) -> str:
    return "sequence" if chosen.path is not None and chosen.path.suffix == ".npz" else "image"


def require_path(artifact: ArtifactLike) -> str:
    name = artifact_name(artifact)
    if name is None:
        raise InputError("a model in memory has no graph", wanted="a graph or a bundle", fix="export it first")
    return name


def path_or_none(value: str | Path | None) -> Path | None:
    return None if value is None else Path(value)
