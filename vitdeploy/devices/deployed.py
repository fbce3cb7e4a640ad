"""Reads what a device says of deployments, as untrusted data; and judges a release by it, by the same rule as there."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from dataclasses import dataclass

from vitdeploy.benchmark.results import BenchRun
from vitdeploy.benchmark.tail import Tail, p99_ms, tail_of
from vitdeploy.devices.agent.documents import (
    DEPLOYMENT,
    RELEASE,
    Deployed,
    Deployments,
    Golden,
    Missing,
    Result,
    StageOptions,
    SwitchOptions,
    Tried,
)
from vitdeploy.devices.results import MOST, check_run, clean, refuse
from vitdeploy.runtime.choice import select_engines, usable_engines
from vitdeploy.spec import Manifest

# What an agent calls the two artifacts of its comparison (agent/rollout.py, which is not imported for two words).
NEW, CURRENT = "new", "current"
MOST_DEPLOYMENTS = 1000


@dataclass(frozen=True)
class Trial:
    """How a release did on a device. `p99_ms` None: it was not measured. `tail`: against the release before it; None
    where `alone` says why there is none. `failed`: why it may not stay there; "" for a release that may."""

    engine: str
    golden: Golden
    p99_ms: float | None = None
    tail: Tail | None = None
    alone: str = ""
    failed: str = ""
    undecided: str = ""


def check_deployments(device: str, found: Deployments) -> dict[str, Deployed]:
    """By name, what is deployed on a device.

    Raises:
        DeviceResultError: it cannot be.
    """
    names = [each.name for each in found.deployed]
    if len(names) > MOST_DEPLOYMENTS or len(set(names)) < len(names) or not all(map(DEPLOYMENT.fullmatch, names)):
        raise refuse(device, "deployments of impossible names", names[:5])
    for each in found.deployed:
        for release in (each.current, each.previous, each.moving):
            if release and not RELEASE.fullmatch(release):
                raise refuse(device, "a release that is no SHA-256", release)
    return {each.name: each for each in found.deployed}


def check_missing(device: str, found: Missing, asked: Collection[str]) -> set[str]:
    """Those of the paths that a device was asked for which it has not.

    Raises:
        DeviceResultError: it names others.
    """
    odd = set(found.missing) - set(asked)
    if odd:
        raise refuse(device, "files that it was not asked for", ", ".join(sorted(odd)[:3]))
    return set(found.missing)


def judge(
    device: str, result: Result, options: StageOptions | SwitchOptions, manifest: Manifest | None, worse: float
) -> Trial:
    """How a release did on a device. Its bounds are those of its manifest here, never the device's; None for a release
    of which only the device has the manifest.

    Raises:
        DeviceResultError: the answer contradicts itself, the manifest, or what was asked.
    """
    tried = result.tried
    assert tried is not None  # check_result
    if manifest is not None:
        engines = {each.artifact for each in usable_engines(manifest, select_engines(manifest, options.target))}
        if tried.engine not in engines:
            raise refuse(device, "an engine that the release has not", tried.engine, ", ".join(sorted(engines)))
        _check_bounds(device, tried, manifest)
    found = tried.golden
    if not 1 <= found.inputs <= MOST or found.same > found.inputs or (found.difference or 0.0) < 0:
        raise refuse(device, "impossible golden answers", found)
    expected = options.expected if isinstance(options, SwitchOptions) else None
    if tried.golden.ok and expected == "" and not tried.alone and options.protocol is not None:
        raise refuse(device, "a comparison with a release that was not there")
    trial = _trial(device, result, tried, options, worse)
    if tried.kept and (trial.failed or isinstance(options, StageOptions)):
        raise refuse(device, "a release is kept that may not stay", trial.failed or "nothing was to be switched")
    if isinstance(options, SwitchOptions) and not tried.kept and not trial.failed:
        return dataclasses.replace(trial, failed="the device took it back")
    return trial


def _trial(device: str, result: Result, tried: Tried, options: StageOptions | SwitchOptions, worse: float) -> Trial:
    alone: str = clean(tried.alone)
    if not tried.golden.ok or options.protocol is None:
        if result.bench_run is not None:
            raise refuse(device, "measurements that nobody asked for")
        return Trial(clean(tried.engine), tried.golden, failed=_wrong(tried.golden), alone=alone)
    names = [NEW] if tried.alone else [NEW, CURRENT]
    bench_run: BenchRun = check_run(device, result.bench_run, options.protocol, names)
    if tried.alone:
        return Trial(tried.engine, tried.golden, p99_ms(bench_run, NEW), alone=alone)
    tail = tail_of(bench_run, NEW, CURRENT)
    failed = ""
    if tail.slower(worse):
        failed = (
            f"p99 is {tail.ratio:.2f} times that of the current release ({tail.low:.2f} to {tail.high:.2f}; "
            f"{tail.a_ms:.3g} and {tail.b_ms:.3g} ms)"
        )
    undecided = tail.undecided(worse)
    return Trial(tried.engine, tried.golden, tail.a_ms, tail, failed=failed, undecided=undecided)


def _check_bounds(device: str, tried: Tried, manifest: Manifest) -> None:
    golden, found = manifest.golden, tried.golden
    assert golden is not None  # a bundle without golden answers is not deployed
    own = golden.engines.get(tried.engine)
    target = next(each.target for each in manifest.engines if each.artifact == tried.engine)
    wanted = (own.tolerance, own.least_same) if own is not None else (golden.tolerance.get(target), 0)
    if (found.tolerance, found.least_same) != wanted:
        raise refuse(device, "other bounds than the bundle's", (found.tolerance, found.least_same), wanted)


def _wrong(golden: Golden) -> str:
    if golden.ok:
        return ""
    away = "no number" if golden.difference is None else f"{golden.difference:.1e} of the largest"
    return (
        f"golden answers: {golden.same} of {golden.inputs} are the original's (at least {golden.least_same} must be); "
        f"outputs are {away} from the recorded ones (allowed {golden.tolerance:.1e})"
    )
