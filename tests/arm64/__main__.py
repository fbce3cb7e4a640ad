"""vitdeploy on emulated arm64 boards: every command that takes `--on`, every engine against its golden answers.

    python -m tests.arm64 [--short] [--work build/arm64]

Prints what it does, and the table of docs/devices.md at the end. Exit status: 0 all is right, 1 something is not,
77 this machine cannot run it (one line says why).
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tests.arm64.boards import Boards, started
from tests.arm64.engines import Engine, Proof, engines_of, prove, quantized_engine
from tests.arm64.instructions import dot_products
from tests.arm64.root import Unable, make_root
from tests.arm64.sums import write_graphs
from tests.arm64.table import table
from tests.command_line import ROOT, Command, command_line
from vitdeploy.devices.registry import Device, find_devices
from vitdeploy.errors import VitdeployError

CPUS = ("cortex-a53", "cortex-a72", "neoverse-n1", "max")
SHORT_CPUS = ("cortex-a53", "neoverse-n1")
# Of the short form: the engine that the agent proves on a board, and the one that an app loads there.
SHORT_ENGINES = {"cortex-a53": "onnxruntime-cpu-int8", "neoverse-n1": "openvino-cpu-int8"}
SHORT_APPS = {"cortex-a53": ("openvino-cpu",), "neoverse-n1": ("onnxruntime-cpu",)}
DIGITS = ROOT / "recipes" / "digits.yaml"
DATA = Path(os.environ.get("VITDEPLOY_TEST_DATA", ROOT.parent / "shared" / "data"))
CHECKPOINT, PHOTOGRAPHS = DATA / "weights" / "vit_tiny_patch16_224_imagenet1k.safetensors", DATA / "imagenet-sample"
# Few images, as these bundles prove the boards and not the models; and their benches are of no use at all.
FEW = (
    *("data.calibration.images=32", "data.evaluation.images=32", "bench.duration=0.1"),
    *("budget.max_drop=100", "budget.min_agreement=0"),
)
VIT_TINY = """
vitdeploy: 1
name: vit-tiny
source: {{model: vit_tiny_patch16_224, checkpoint: {checkpoint}}}
data: {{path: {images}, labels: none}}
export: {{batch: dynamic, preprocess: true}}
precision: int8
targets: [openvino-cpu, onnxruntime-cpu]
budget: {{max_drop: 100}}
"""
TARGETS = ("onnxruntime-cpu", "openvino-cpu")
# On the boards: vitdeploy, and scripts that use it.
ZONE = "/opt/vitdeploy"
# A QEMU of a few cores: more boards at once than these only wait for each other.
AT_ONCE = 2


class Wrong(Exception):
    """Something that is not as it must be."""


@dataclass
class Walk:
    """`command` is `vitdeploy` here, `devices` its names for the boards; `wrong` is what was not as it must be."""

    command: Command
    boards: Boards
    work: Path
    wrong: list[str]

    def check(self, right: bool, what: str) -> None:
        print(f"  {'ok' if right else 'WRONG'}  {what}", flush=True)
        if not right:
            self.wrong.append(what)

    def device(self, cpu: str) -> Device:
        [device] = find_devices(cpu)
        return device


def main() -> int:
    arguments = argparse.ArgumentParser(prog="python -m tests.arm64")
    arguments.add_argument(
        "--short", action="store_true", help="two boards, an engine and an app on each, in some two minutes"
    )
    arguments.add_argument("--work", type=Path, default=ROOT / "build" / "arm64", help="what is made is kept here")
    given = arguments.parse_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # the kernel's table is tidied up
    begun = time.monotonic()
    cpus = SHORT_CPUS if given.short else CPUS
    try:
        print("arm64: Debian, QEMU and wheels", flush=True)
        root = make_root(given.work.resolve())
        with tempfile.TemporaryDirectory(prefix="vitdeploy-arm64-") as scratch:
            _keep_apart(given.work.resolve())
            with (
                started(root, cpus, given.work.resolve() / "ssh") as boards,
                command_line(Path(scratch), given.work.resolve() / "store", short_bench=True) as command,
            ):
                wrong = walk(Walk(command, boards, Path(scratch), []), given.short)
    except Unable as error:
        print(f"arm64: not run: {error}")
        return 77
    except (Wrong, VitdeployError) as error:
        print(f"arm64: WRONG: {error}")
        return 1
    took = f"{time.monotonic() - begun:.0f} s"
    for what in wrong:
        print(f"arm64: WRONG: {what}")
    print(f"arm64: {f'{len(wrong)} wrong' if wrong else 'all right'}, in {took}")
    return 1 if wrong else 0


def _keep_apart(folder: Path) -> None:
    """The user's devices stay as they are; and benches here, of no use to anybody, wait for no other."""
    shutil.rmtree(folder / "config", ignore_errors=True)
    os.environ["XDG_CONFIG_HOME"] = str(folder / "config")
    (folder / "tmp").mkdir(exist_ok=True)
    os.environ["TMPDIR"] = tempfile.tempdir = str(folder / "tmp")


def walk(all_of_it: Walk, short: bool) -> list[str]:
    register(all_of_it)
    digits = bundle_of_digits(all_of_it)
    commands_on(all_of_it, digits)
    engines = engines_of("digits", digits, all_of_it.work, 8, tuple(SHORT_ENGINES.values()) if short else ())
    proved = {
        cpu: [engine for engine in engines if not short or engine.name == SHORT_ENGINES[cpu]]
        for cpu in all_of_it.boards.ports
    }
    proofs = proofs_of(all_of_it, proved)
    place_zone(all_of_it)
    sums_on(all_of_it)
    executed = apps_on(all_of_it, digits, SHORT_APPS if short else dict.fromkeys(all_of_it.boards.ports, TARGETS))
    if not short:
        program_on(all_of_it, digits)
    print(f"\n{table(proofs, executed)}\n", flush=True)
    if not short and (more := vit_tiny(all_of_it)):
        print(f"\n{table(more, {})}\n")
    return all_of_it.wrong


def register(given: Walk) -> None:
    """`devices add` and `devices doctor`."""
    print("devices", flush=True)
    for cpu in given.boards.ports:
        address = ("devices", "add", cpu, f"ssh://{cpu}", "--python", "/usr/bin/python3", "--label", "arm64")
        done = given.command(*address, "--ssh-config", given.boards.config)
        given.check(done.returncode == 0, f"devices add {cpu}{done.stderr[-300:] if done.returncode else ''}")
    for cpu in tuple(given.boards.ports)[-1:]:
        done = given.command("devices", "doctor", cpu, "--json")
        found = json.loads(done.stdout) if done.returncode == 0 else {}
        host = found.get("host", {})
        given.check(host.get("emulated", "").startswith("qemu"), f"devices doctor {cpu}: emulated {host}")
        given.check(all(found["targets"][each]["works"] for each in TARGETS), f"devices doctor {cpu}: both runtimes")


def bundle_of_digits(given: Walk) -> Path:
    print("a bundle of the digits, made here", flush=True)
    out = given.work / "digits"
    settings = [word for each in FEW for word in ("--set", each)]
    done = given.command("run", DIGITS, "-o", out, *settings)
    if done.returncode:
        raise Wrong(done.stderr[-2000:])
    return out


def commands_on(given: Walk, bundle: Path) -> None:
    """Every command with --on, as a user gives it."""
    print("commands with --on", flush=True)
    cpu = next(iter(given.boards.ports))
    done = given.command("bench", bundle, "--on", cpu, "--duration", "1")
    refused = done.returncode == 4 and "cannot measure times in an emulator" in done.stderr
    given.check(refused and " ms" not in done.stdout, f"bench --on {cpu} is refused: {done.stderr.strip()[-300:]}")
    graph = bundle / "engines" / "openvino-cpu" / "graph.onnx"
    done = given.command("compile", graph, "--target", "openvino-cpu", "--on", cpu, "-o", given.work / "engine")
    given.check(done.returncode == 0, f"compile --on {cpu}{done.stderr[-500:] if done.returncode else ''}")
    if done.returncode == 0:
        facts = json.loads((given.work / "engine" / "manifest.json").read_text())["engines"][0]
        emulated = "emulated" in facts["device"] and facts["kernels"].get("int8", 0) > 0
        given.check(emulated, f"its record: {facts['kernels']}, {facts['device']}")
    images = DIGITS.parent.parent / "calibration" / "digits"
    common = ("--against", bundle / "model.onnx", "--data", images, "--num-samples", "16", "--json")
    done = given.command("verify", bundle, "--target", "onnxruntime-cpu", *common, "--on", cpu)
    found = json.loads(done.stdout)["devices"][0] if done.returncode == 0 else {}
    said = f"{found['agreement']:.1f} % of {found['n']}" if found else done.stderr[-500:]
    given.check(bool(found) and found["agreement"] > 90, f"verify --on {cpu}: agreement {said}")


def proofs_of(given: Walk, engines: Mapping[str, Sequence[Engine]]) -> list[Proof]:
    """Engines on each board, two boards at once."""
    print("engines, built and asked by the agent", flush=True)

    def of(pair: tuple[str, Engine]) -> Proof:
        cpu, engine = pair
        found = prove(engine, given.device(cpu))
        given.check(found.ok, f"{cpu} {engine.model} {engine.name}: {found.text}")
        return found

    with ThreadPoolExecutor(AT_ONCE) as pool:
        # One after the other on each board: one job at a time is what an agent does.
        rows = pool.map(lambda cpu: [of((cpu, engine)) for engine in engines[cpu]], engines)
        return list(itertools.chain.from_iterable(rows))


def place_zone(given: Walk) -> None:
    """What an app there imports, and the scripts that are such apps."""
    zone = given.boards.root.folder / ZONE.lstrip("/")
    shutil.rmtree(zone, ignore_errors=True)
    shutil.copytree(ROOT / "vitdeploy", zone / "vitdeploy", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("on_board.py", "sums_on_board.py"):
        shutil.copy(Path(__file__).with_name(name), zone)
    (zone / "sums").mkdir()
    write_graphs(zone / "sums")


def sums_on(given: Walk) -> None:
    """Whether INT8 products saturate there."""
    print("the largest sums of INT8 products", flush=True)

    def ask(cpu: str) -> None:
        words = (f"PYTHONPATH={ZONE}", "python3", f"{ZONE}/sums_on_board.py", f"{ZONE}/sums")
        done = given.boards.run(cpu, *words)
        found = json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else {}
        exact = len(found) == 2 * len(TARGETS) and not any(found.values())
        given.check(exact, f"{cpu}: off by {found or done.stderr.strip()[-500:]}")

    with ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(ask, given.boards.ports))


def apps_on(given: Walk, bundle: Path, targets: Mapping[str, Sequence[str]]) -> dict[tuple[str, str], str]:
    """`bundle pack` here, an app there; for each board and engine the dot products that QEMU translated."""
    print("bundle pack here, unpacked, loaded and asked there", flush=True)
    packed = given.work / "digits.vitb"
    done = given.command("bundle", "pack", bundle, "-o", packed)
    given.check(done.returncode == 0, f"bundle pack{done.stderr[-300:] if done.returncode else ''}")
    executed: dict[tuple[str, str], str] = {}

    def ask(cpu: str, target: str) -> None:
        home, there = given.boards.home(cpu), f"/home/{cpu}"
        shutil.copy(packed, home)
        log = home / "instructions.txt"
        settings = f"PYTHONPATH={ZONE} QEMU_LOG=in_asm QEMU_LOG_FILENAME={there}/{log.name}"
        words = f"{there}/{packed.name} {target} {there}/app"
        done = given.boards.run(cpu, settings, "python3", f"{ZONE}/on_board.py", words)
        found = json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else {}
        same = sum(a == b for a, b in zip(found["labels"], found["expected"], strict=True)) if found else -1
        right = bool(found) and same >= found["least"] and found["emulated"].startswith("qemu")
        executed[cpu, f"{target}-int8"] = instructions = dot_products(log) if log.is_file() else ""
        said = (
            f"{same} of {len(found['labels'])} as the original; dot products: {instructions}"
            if found
            else done.stderr.strip()[-500:]
        )
        given.check(right, f"{cpu}: the app with {target} gives {said}")
        log.unlink(missing_ok=True)

    with ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(lambda cpu: [ask(cpu, target) for target in targets[cpu]], targets))
    return executed


def program_on(given: Walk, bundle: Path) -> None:
    """The C++ program, built there by Debian's g++ with the headers and libraries of OpenVINO's wheel."""
    print("the C++ program, built there", flush=True)
    cpu = "neoverse-n1"
    done = given.command("embed", bundle, "--as", "cpp", "-o", given.work / "app")
    given.check(done.returncode == 0, f"embed --as cpp{done.stderr[-300:] if done.returncode else ''}")
    app = given.boards.root.folder / "opt" / "app"
    shutil.rmtree(app, ignore_errors=True)
    shutil.copytree(given.work / "app", app)
    lines = (
        "cd /opt/app",
        "cmake -B build -DOpenVINO_DIR=\"$(python3 -c 'import openvino.utils as u; print(u.get_cmake_path())')\"",
        "cmake --build build",
    )
    done = given.boards.run(cpu, " && ".join(lines), timeout=1800)
    given.check(done.returncode == 0, f"cmake and g++{(done.stdout + done.stderr)[-1500:] if done.returncode else ''}")
    for each in given.boards.ports if done.returncode == 0 else ():
        done = given.boards.run(each, "ctest --test-dir /opt/app/build")
        passed = done.returncode == 0 and "100% tests passed" in done.stdout
        given.check(passed, f"{each}: ctest of the program{'' if passed else (done.stdout + done.stderr)[-800:]}")


def vit_tiny(given: Walk) -> list[Proof]:
    """ViT-Tiny on photographs: two boards and two images, as each image takes QEMU a minute."""
    if not (CHECKPOINT.is_file() and PHOTOGRAPHS.is_dir()):
        print(f"ViT-Tiny: left out, as {CHECKPOINT} or {PHOTOGRAPHS} is not there (VITDEPLOY_TEST_DATA)", flush=True)
        return []
    print("a bundle of ViT-Tiny, made here", flush=True)
    recipe, out = given.work / "vit-tiny.yaml", given.work / "vit-tiny"
    recipe.write_text(VIT_TINY.format(checkpoint=CHECKPOINT, images=PHOTOGRAPHS), encoding="utf-8")
    settings = [word for each in FEW for word in ("--set", each)]
    done = given.command("run", recipe, "-o", out, *settings)
    if done.returncode:
        raise Wrong(done.stderr[-2000:])
    engines = engines_of("ViT-Tiny", out, given.work, 2)
    refused = next(engine for engine in engines if engine.convolutions)
    way_out = ("--ignore", "patch_embed.proj", "-o", given.work / "ignored")
    data = ("--data", PHOTOGRAPHS, "--num-samples", "32")
    done = given.command("quantize", out / "model.onnx", "--target", "openvino-cpu", *data, *way_out)
    given.check(done.returncode == 0, f"quantize --ignore{done.stderr[-500:] if done.returncode else ''}")
    file = given.work / "ignored" / "model.onnx"
    engines.append(quantized_engine(refused, f"{refused.name}, convolution in float", file, given.work))
    return proofs_of(given, dict.fromkeys(SHORT_CPUS, engines))


if __name__ == "__main__":
    sys.exit(main())
