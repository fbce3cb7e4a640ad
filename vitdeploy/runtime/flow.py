"""Run several graphs as one: each part takes inputs of the flow and outputs of earlier parts."""

from collections.abc import Mapping, Sequence
from time import perf_counter

import numpy as np

from vitdeploy.bundle.layout import PartTensors, link, mismatches
from vitdeploy.errors import TargetError, TensorError
from vitdeploy.runtime.flows import inputs_of, outputs_of
from vitdeploy.runtime.runner import Array, Runner, forkable_lock
from vitdeploy.spec import FlowPart, FlowSpec

SEED = 0


class LinkedParts:
    """The runners of a flow's parts, checked for matching tensors.

    With `keep`, a part whose inputs equal those of its last run is not run again; its cached outputs are returned (an
    image's embedding across prompts). Safe to call from several threads.
    """

    def __init__(self, flow: FlowSpec, runners: Mapping[str, Runner], name: str, *, keep: bool = False) -> None:
        self.flow, self.runners, self.name, self.keep = flow, dict(runners), name, keep
        self._kept: dict[str, tuple[dict[str, Array], dict[str, Array]]] = {}
        self._turn = forkable_lock()

    @property
    def graphs(self) -> dict[str, PartTensors]:
        """The inputs and outputs of the loaded runners."""
        return {name: PartTensors(runner.inputs, runner.outputs) for name, runner in self.runners.items()}

    def load(self) -> None:
        """Load every part.

        Raises:
            TargetError: the graphs do not fit together; the error lists every mismatch.
        """
        try:
            for runner in self.runners.values():
                runner.load()
            problems = mismatches(self.flow, self.graphs)
            if problems:
                raise TargetError(
                    f"the graphs of {self.name} do not fit together",
                    found="; ".join(problems),
                    expected="graphs of one export",
                    fix="export the model again, and use all graphs of one export",
                )
        except BaseException:
            self.close()
            raise

    def values(self, feeds: Mapping[str, Array], sources: Sequence[str]) -> dict[str, Array]:
        """Return the tensors that `sources` name ("part.output", or an input of the flow), computed from the flow's
        inputs.

        Only the required parts run.
        """
        found: dict[str, Array] = dict(feeds)
        for part in self.needed(sources):
            own = {name: found[source] for name, source in part.feeds.items()}
            outputs = self._run(part, own)
            found |= {f"{part.name}.{name}": array for name, array in outputs.items()}
        return {source: found[source] for source in sources}

    def milliseconds(self, feeds: Mapping[str, Array]) -> dict[str, float]:
        """Return the time of each part in ms, run one after the other on these inputs of the flow; nothing is
        cached."""
        found, times = dict(feeds), {}
        for part in self.flow.parts:
            own = {name: found[source] for name, source in part.feeds.items()}
            start = perf_counter()
            outputs = run_rows(self.runners[part.name], own)
            times[part.name] = 1e3 * (perf_counter() - start)
            found |= {f"{part.name}.{name}": array for name, array in outputs.items()}
        return times

    def needed(self, sources: Sequence[str]) -> list[FlowPart]:
        """Return the parts that these tensors depend on, in running order."""
        expected, needed = set(sources), []
        for part in reversed(self.flow.parts):
            if any((linked := link(self.flow, source)) and linked[0] == part.name for source in expected):
                needed.append(part)
                expected |= set(part.feeds.values())
        return needed[::-1]

    def _run(self, part: FlowPart, feeds: dict[str, Array]) -> dict[str, Array]:
        runner = self.runners[part.name]
        if not self.keep:
            return run_rows(runner, feeds)
        with self._turn:
            kept = self._kept.get(part.name)
            if kept is not None and all(np.array_equal(kept[0][name], array) for name, array in feeds.items()):
                return dict(kept[1])
            outputs = run_rows(runner, feeds)
            # The caller may write to its input arrays, and gets copies of the cached outputs (`own_arrays`).
            for array in outputs.values():
                array.flags.writeable = False
            self._kept[part.name] = {name: array.copy() for name, array in feeds.items()}, outputs
            return dict(outputs)

    def close(self) -> None:
        for runner in self.runners.values():  # waits for the part's current run
            runner.close()
        with self._turn:  # a part that was still running has cached its outputs
            self._kept.clear()


def own_arrays(found: Mapping[str, Array]) -> dict[str, Array]:
    """Return the same arrays, with cached (read-only) ones copied so that the caller may write to them."""
    return {name: array if array.flags.writeable else array.copy() for name, array in found.items()}


def run_rows(runner: Runner, feeds: Mapping[str, Array]) -> dict[str, Array]:
    """Return every output, [n, ...], for n rows of all inputs. Runs in batches of the runner's size; the last batch is
    padded by repeating its last row.

    Raises:
        TensorError: inputs differ in their number of rows, or have none.
    """
    counts = {name: len(array) for name, array in feeds.items()}
    count = next(iter(counts.values()))
    if len(set(counts.values())) > 1 or not count:
        raise TensorError(
            f"{runner.name}: inputs differ in their number of rows" if count else f"{runner.name}: inputs have no rows",
            found=", ".join(f"{name} {each}" for name, each in counts.items()),
            expected="the same number of rows in each input, at least one",
        )
    size = runner.inputs[0].shape[0]
    if not isinstance(size, int) or size == count:
        return runner.infer(feeds)
    runs = []
    for start in range(0, count, size):
        rows = {name: array[start : start + size] for name, array in feeds.items()}
        short = size - len(next(iter(rows.values())))
        if short:
            rows = {name: np.concatenate([each, np.repeat(each[-1:], short, axis=0)]) for name, each in rows.items()}
        runs.append({name: array[: size - short] for name, array in runner.infer(rows).items()})
    return {name: np.concatenate([run[name] for run in runs]) for name in runs[0]}


def one_by_one(runner: Runner, feeds: Mapping[str, Array]) -> dict[str, Array]:
    """Return every output, [n, ...], of a runner called once per row; an input with one row is passed to each call.

    Used if the parts are out of reach, such as on a device, which caches what does not change from row to row.
    """
    count = max(len(array) for array in feeds.values())
    rows = [
        runner.infer({name: array if len(array) == 1 else array[i : i + 1] for name, array in feeds.items()})
        for i in range(count)
    ]
    return {name: np.concatenate([row[name] for row in rows]) for name in rows[0]}


class FlowRunner(Runner):
    """A flow without a repeated part. It takes any number of rows: each part runs them in its own batch size.

    Inputs and outputs are those of the flow; the name of a leading axis tells what it counts.
    """

    def __init__(self, flow: FlowSpec, parts: Mapping[str, Runner], *, name: str, keep: bool = False) -> None:
        super().__init__(name)
        self.linked = LinkedParts(flow, parts, name, keep=keep)

    @property
    def flow(self) -> FlowSpec:
        return self.linked.flow

    def _load(self) -> None:
        self.linked.load()
        graphs = self.linked.graphs
        self.inputs, self.outputs = inputs_of(self.flow, graphs), outputs_of(self.flow, graphs)
        self.provider = self.linked.runners[self.flow.parts[0].name].provider

    def example(self, batch: int) -> dict[str, Array]:
        """Return seeded inputs: `batch` rows for inputs with the first part's leading axis, one row for others. Tokens
        are small numbers."""
        generator = np.random.default_rng(SEED)
        first = self.flow.parts[0].batch
        found: dict[str, Array] = {}
        for tensor in self.inputs:
            rows = batch if tensor.shape[0] == first else 1
            shape = (rows, *(size if isinstance(size, int) else 1 for size in tensor.shape[1:]))
            kind = np.dtype(tensor.dtype)
            if kind.kind == "f":
                found[tensor.name] = generator.standard_normal(shape).astype(kind)
            else:
                found[tensor.name] = generator.integers(0, 256 if kind == np.uint8 else 2, shape).astype(kind)
        return found

    def part_times(self, feeds: Mapping[str, Array]) -> dict[str, float]:
        return self.linked.milliseconds(feeds)

    def _infer(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        found = self.linked.values(feeds, list(self.flow.outputs.values()))
        return own_arrays({name: found[source] for name, source in self.flow.outputs.items()})

    def _close(self) -> None:
        self.linked.close()


class FlowView(Runner):
    """Some outputs of a flow as a separate runner, which takes and runs only what they depend on.

    Closing it closes the flow.
    """

    def __init__(self, whole: FlowRunner, outputs: Sequence[str]) -> None:
        super().__init__(whole.name)
        self.whole, self._read_outputs = whole, tuple(outputs)

    def _load(self) -> None:
        self.whole.load()
        flow = self.whole.flow
        sources = [flow.outputs[name] for name in self._read_outputs]
        fed = {source for part in self.whole.linked.needed(sources) for source in part.feeds.values()}
        self.inputs = tuple(tensor for tensor in self.whole.inputs if tensor.name in fed)
        self.outputs = tuple(tensor for tensor in self.whole.outputs if tensor.name in self._read_outputs)
        self.provider = self.whole.provider

    def _infer(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        flow = self.whole.flow
        found = self.whole.linked.values(feeds, [flow.outputs[name] for name in self._read_outputs])
        return own_arrays({name: found[flow.outputs[name]] for name in self._read_outputs})

    def _close(self) -> None:
        self.whole.close()
