"""`vitdeploy sweep RECIPES -o DIR`: many recipes, one table."""

# Annotations of options are evaluated: no future import.

import dataclasses
from dataclasses import dataclass
from pathlib import Path

import click

from vitdeploy.api.options import Options, RecordedBundle, Sweep, option
from vitdeploy.cli.options import Console, api, call, command_line, command_of, recording
from vitdeploy.errors import GateError


@dataclass(frozen=True)
class Previews(Options):
    write: Path | None = option(None, "Write the recipes of grids to DIR, and run nothing.", metavar="DIR")
    dry_run: bool = option(False, "Check every input; show the stages and what they cost; make nothing.")


@dataclass(frozen=True)
class Costs(Options):
    cost_per_hour: float | None = option(None, "Of all machines together.", min=0, above=True)
    max_cost: float | None = option(None, "As --minutes, by what an hour costs.", min=0, above=True)

    def check(self) -> None:
        if self.max_cost is not None and self.cost_per_hour is None:
            self.refuse("<max_cost> needs <cost_per_hour>.")

    def limit(self, minutes: float | None) -> float | None:
        """In minutes, whichever ends first."""
        if self.max_cost is None or self.cost_per_hour is None:
            return minutes
        return min(60 * self.max_cost / self.cost_per_hour, minutes if minutes is not None else float("inf"))


@command_of(Sweep, (Previews, "resume"), (Costs, "watch"), RecordedBundle, waits=True)
def command(console: Console, options: Sweep, previews: Previews, costs: Costs, recorded: RecordedBundle) -> None:
    """Run many recipes, or those of grids, and compare them in one table.

    Recipes run one after the other, so that each is measured alone. Each bundle goes to OUTPUT/<its name>; sweep.html
    has the table of all. With --jobs or --executor, stages that measure nothing run first, several at a time and each
    once for all recipes; each of them already uses several cores. Stages in the store are reused. A recipe that fails
    does not end the others: the exit code is that of the first failure, or 5 if a budget is not met or the time was
    over. The same command again runs what failed and what was not begun.

    On a Ray cluster, nodes that were started with --resources='{"vitdeploy_device": 1}' also measure.

    With --model all recipes use that one module. For several modules, `vitdeploy export --model` writes a folder for
    each, and a recipe names the folder.

    A grid is one recipe in many variants, as in the matrix of a CI job. A field is called as --set calls it:

    \b
    grid: 1
    name: mine
    base: mine.yaml                             # the recipe whose fields the axes override
    axes:
      precision: [fp32, int8]
      targets: [[onnxruntime-cpu], [openvino-cpu]]
      source:                                   # values with names
        tiny: {model: vit_tiny_patch16_224, checkpoint: tiny.safetensors}
        small: {model: vit_small_patch16_224, checkpoint: small.safetensors}
    exclude: [{source: small, precision: fp32}]
    include: [{precision: int8, bench.duration: 20}]
    """
    limit, home = costs.limit(options.minutes), Path(options.folder or "")
    if previews.write is not None:
        how = {"overrides": options.overrides, "function": options.function}
        written = api("sweep").write_recipes(options.recipes, previews.write, **how)
        names = [str(path) for path in written]
        console.finish({"recipes": names}, names, previews.write, command_line("vitdeploy", "run", written[0]))
        return
    if previews.dry_run:
        planned = api("sweep").planned(options, costs.cost_per_hour)
        console.finish(planned.document, planned.lines(), None)
        if planned.errors:
            click.get_current_context().exit(planned.errors[0].exit_code)
        return
    with recording(console, recorded) as record:
        found = call("sweep", dataclasses.replace(options, minutes=limit))
        console.finish(found.document, found.lines(), home, f"open {command_line(found.report)}")
        record(found)
    if found.errors:
        click.get_current_context().exit(found.errors[0].exit_code)
    if found.not_begun:
        raise GateError(
            "the time was over before all recipes were measured",
            found=f"not begun: {', '.join(found.not_begun)}",
            wanted=f"{len(found.document.recipes)} recipes in {limit:g} minutes",
            fix="the same command goes on with them",
        )
    if found.unmet:
        raise GateError("a budget is not met, or not provably", found=", ".join(found.unmet))
