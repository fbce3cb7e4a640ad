"""Many devices at once: an OpenSSH server each, with a home folder of its own, on one machine.

They share the folder for temporary files, and with it the lock of all measurements: they are one machine, so they are
measured one after the other.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.devices.conftest import Board, await_board, make_keys, start_board
from tests.faults.forking import in_child
from tests.golden_bundle import with_one_weight_changed
from vitdeploy.bundle.read import file_sha256, read_bundle, verify_files
from vitdeploy.devices.agent.releases import DeploymentFolder
from vitdeploy.devices.registry import Device, write_devices
from vitdeploy.spec import FileEntry


class Shop:
    """The devices of one label; `names` are theirs, in order."""

    def __init__(self, folder: Path, count: int) -> None:
        folder.mkdir(exist_ok=True)
        self.keys, self.temporary = folder / "keys", folder / "tmp"
        make_keys(self.keys)
        self.names = [f"till-{number:02d}" for number in range(count)]
        self.boards = {name: self._start(folder / name) for name in self.names}
        for board in self.boards.values():
            await_board(board)

    def _start(self, folder: Path, port: int = 0) -> Board:
        folder.mkdir(exist_ok=True)
        return start_board(folder, self.keys, self.temporary, port)

    def register(self) -> None:
        """As if each had been added by hand."""
        write_devices(
            {
                name: Device(name, "board", python=sys.executable, labels=("shop",), ssh_config=str(board.config()))
                for name, board in self.boards.items()
            }
        )

    def place(self, name: str, deployment: str = "small") -> DeploymentFolder:
        return DeploymentFolder(deployment, self.boards[name].home / ".local/share/vitdeploy/deployed")

    def runs(self, name: str) -> str:
        """The digest of the bundle that an app loads there, which must be whole; "" without one."""
        link = self.place(name).link
        if not link.is_symlink():
            return ""
        verify_files(link, read_bundle(link))
        return file_sha256(link / "manifest.json")

    def running(self) -> dict[str, str]:
        return {name: self.runs(name) for name in self.names}

    def switch_off(self, name: str) -> None:
        """Everything of a device dies at once, as when its power is cut."""
        board = self.boards[name]
        mark = f"HOME={board.home}".encode()
        with contextlib.suppress(ProcessLookupError):
            board.server.kill()
        board.server.wait()
        for _ in range(3):  # what one of them has just started dies in the next round
            for process in Path("/proc").glob("[0-9]*"):
                with contextlib.suppress(OSError):
                    if mark in (process / "environ").read_bytes().split(b"\0"):
                        os.kill(int(process.name), signal.SIGKILL)

    def switch_on(self, *names: str) -> None:
        for name in names:
            old = self.boards[name]
            self.boards[name] = self._start(old.folder, old.port)
        for name in names:
            await_board(self.boards[name])

    def end(self) -> None:
        for board in self.boards.values():
            board.server.terminate()
        for board in self.boards.values():
            board.server.wait()


@contextlib.contextmanager
def shop_of(folder: Path, count: int) -> Iterator[Shop]:
    shop = Shop(folder, count)
    try:
        yield shop
    finally:
        shop.end()


def slowed(model: Path, products: int = 12) -> None:
    """Let an ONNX file compute much for nothing: its answers stay what they were."""
    import numpy as np
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    graph = onnx.load(model)
    (output,) = graph.graph.output
    producer = next(node for node in graph.graph.node if output.name in node.output)
    producer.output[list(producer.output).index(output.name)] = "early"
    nodes, source = [], graph.graph.input[0].name
    # One number of the input, spread over a matrix that is then multiplied by itself; 0 times of it is added.
    nodes.append(helper.make_node("Cast", [source], ["slow_in"], to=TensorProto.FLOAT))
    nodes.append(helper.make_node("ReduceMean", ["slow_in"], ["slow_mean"], keepdims=0))
    graph.graph.initializer.append(numpy_helper.from_array(np.full((640, 640), 1e-4, np.float32), "slow_matrix"))
    nodes.append(helper.make_node("Add", ["slow_matrix", "slow_mean"], ["slow_0"]))
    names = [f"slow_{number}" for number in range(products + 1)]
    nodes += [helper.make_node("MatMul", [one, "slow_matrix"], [next_]) for one, next_ in itertools.pairwise(names)]
    nodes.append(helper.make_node("ReduceMean", names[-1:], ["slow_out"], keepdims=0))
    graph.graph.initializer.append(numpy_helper.from_array(np.float32(0), "slow_zero"))
    nodes.append(helper.make_node("Mul", ["slow_out", "slow_zero"], ["slow_nothing"]))
    nodes.append(helper.make_node("Add", ["early", "slow_nothing"], [output.name]))
    graph.graph.node.extend(nodes)
    onnx.save(graph, model)


def relisted(bundle: Path, out: Path, change: Callable[[Path], None] | None = None) -> Path:
    """A copy of a bundle that lists what `change` made of its engine; another release in any case."""
    shutil.copytree(bundle, out)
    document = json.loads((out / "manifest.json").read_text())
    [name] = document["engines"][0]["files"]
    if change is not None:
        change(out / name)
    document["provenance"] = {**document["provenance"], "copy": out.name}
    for entry in document["files"]:
        if entry["path"] == name:
            entry.update(bytes=(out / name).stat().st_size, sha256=file_sha256(out / name))
    (out / "manifest.json").write_text(json.dumps(document))
    return out


def releases_of(first: Path, folder: Path) -> dict[str, Path]:
    """Bundles by name: `first`, another good one, one that answers wrongly, one that is slow."""
    return {
        "first": first,
        "second": relisted(first, folder / "second"),
        "wrong": with_one_weight_changed(first, folder / "wrong"),
        "slow": relisted(first, folder / "slow", slowed),
    }


def die_in_a_move(place: DeploymentFolder, bundle: Path) -> None:
    """Bring a release there, move the link to it, and die before anybody has found it good."""
    digest, entries = file_sha256(bundle / "manifest.json"), list(read_bundle(bundle).files)
    listed = bundle / "manifest.json"
    entries.append(FileEntry("manifest.json", listed.stat().st_size, digest))

    def die() -> None:
        with place.held():
            place.add(digest, entries, bundle)
        found = place.look()
        with place.moved(digest, found.current, found.counter):
            os.kill(os.getpid(), signal.SIGKILL)

    assert in_child(die).status is None  # killed
