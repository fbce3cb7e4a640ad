"""The table of runtimes known to be wrong, asked for a device before it builds or measures anything.

Patterns are found here, once for all devices. Only where a graph shows one is the device asked for its releases.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from vitdeploy.devices.agent.documents import Placed, Probe
from vitdeploy.devices.client import Client
from vitdeploy.devices.shipment import Shipment
from vitdeploy.errors import KnownBadError
from vitdeploy.graph.io.files import load_graph
from vitdeploy.known_bad.engine import accepted_of
from vitdeploy.known_bad.entries import REFUSED
from vitdeploy.known_bad.find import Match, matches, refuse_known_bad
from vitdeploy.known_bad.platform import concerns, for_target, platform_there
from vitdeploy.spec import EngineSpec, Precision


@dataclass(frozen=True)
class Suspects:
    """Of one artifact, by the precision of each of its graphs: the entries that refuse it on some release of its
    runtime. `graphs` are its files by part; `accepted` the entries that are no reason to refuse it."""

    placed: Placed
    graphs: dict[str, Path]
    found: tuple[tuple[Precision, tuple[Match, ...]], ...]
    accepted: frozenset[str]

    def __bool__(self) -> bool:
        return any(each for _, each in self.found)

    def check(self, probe: Probe) -> None:
        """Raise where the release there computes it wrongly; nothing of a target that does not work there, which says
        so itself.

        Raises:
            KnownBadError: what goes wrong there, and the way out.
        """
        target = self.placed.target
        state = probe.targets.get(target)
        if state is None or not state.works:
            return
        for precision, found in self.found:
            platform = platform_there(target, {**probe.host, **probe.runtimes.get(target, {})}, precision)
            open_ones = [match for match in found if concerns(match.entry, platform)]
            refuse_known_bad(open_ones, platform, self.placed.name, self.accepted)

    def known_of(self, engine: EngineSpec) -> EngineSpec:
        """The engine that the device made, with the accepted entries that are about it.

        Raises:
            KnownBadError: one that is not accepted is, by what the engine records of where it was made.
        """
        taken = accepted_of(engine, self.graphs, self.placed.name, tuple(self.accepted)) if self else ()
        return dataclasses.replace(engine, accepted=taken or None)


def suspects_of(shipment: Shipment, accepted: Sequence[str]) -> Suspects:
    """What the table says of an artifact, whatever the release and the machine; errors as `entries.table`."""
    placed = shipment.placed
    graphs = {graph.part: shipment.files[graph.file] for graph in placed.graphs}
    found = []
    for graph in placed.graphs:
        precision = graph.precision or placed.precision
        entries = [entry for entry in for_target(placed.target) if entry.action in REFUSED]
        found.append((precision, tuple(matches(load_graph(graphs[graph.part]), entries))))
    return Suspects(placed, graphs, tuple(found), frozenset(accepted))


def known_there(client: Client, suspects: Sequence[Suspects]) -> dict[str, KnownBadError]:
    """By name, the refusals of artifacts that the device is known to compute wrongly. It is asked only where an
    artifact is suspect; errors as `Client.probe`."""
    if not any(suspects):
        return {}
    probe = client.probe()
    refused = {}
    for each in suspects:
        try:
            each.check(probe)
        except KnownBadError as error:
            error.message = f"{client.device.name}: {error.message}"
            refused[each.placed.name] = error
    return refused
