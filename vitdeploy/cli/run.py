"""`vitdeploy run RECIPE -o DIR`: the whole pipeline."""

# Annotations of options are evaluated: no future import.

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from vitdeploy.api.options import Options, RecordedBundle, Run, option
from vitdeploy.cli.options import Console, api, call, command_line, command_of, loaded_recipe, recording, unmet_fix
from vitdeploy.errors import GateError


@dataclass(frozen=True)
class Further(Options):
    dry_run: bool = option(False, "Check every input and show the plan; compute nothing.")
    require_recommendation: bool = option(False, "Exit code 5 too if the verdict recommends nothing.")


@command_of(Run, (Further, "executor"), RecordedBundle, waits=True)
def command(console: Console, options: Run, further: Further, recorded: RecordedBundle) -> None:
    """Run the whole pipeline: recipe in, proven bundle out.

    Checkpoint -> ONNX -> INT8 -> engines -> verified -> benched -> one folder. Exit code 5 when the budget is not met.
    The verdict has one of three grades: recommended, leading (others may be as fast), or no ranking.
    RECIPE is a YAML file. Relative paths in it start at its own folder:

    \b
    vitdeploy: 1
    name: mine
    source: {model: vit_tiny_patch16_224, checkpoint: weights.safetensors}
    preprocess: {resize: 248, crop: 224, mean: [0.5, 0.5, 0.5], std: [0.5, 0.5, 0.5]}
    data: {path: images}                        # one sub-folder per class; or labels: none
    targets: [openvino-cpu, onnxruntime-cpu]
    precision: int8                             # fp32, fp16, bf16, int8, mixed
    budget: {max_drop: 1.0, min_agreement: 98}
    bench: {duration: 10}

    With --model the original is the module that your own function returns, with the weights of source.checkpoint if the
    recipe has one. The recipe then names no model.
    """
    loaded = loaded_recipe(options)
    out = Path(options.folder or Path("out") / loaded.name)
    options = dataclasses.replace(options, recipe=loaded, overrides=(), folder=out)
    if further.dry_run:
        steps = api("deploy").planned(options)
        lines = [f"{'reuse' if step.reuse else 'make ':<5}  {step.name}" for step in steps]
        document = {"plan": [{"step": step.name, "reuse": step.reuse} for step in steps], "output": str(out)}
        console.finish(document, [*lines, "make   bench", f"make   bundle {out}"], None)
        return
    with recording(console, recorded) as record:
        made = call("run", options)
        example = "TOKENS.npz" if made.bundle.manifest.preprocess is None else "IMAGE"
        predict = command_line("vitdeploy", "predict", out, example)
        console.finish(made.document, made.tables, out, f"open {command_line(made.report)}, or: {predict}")
        record(made)
    if made.status in ("fail", "undecided"):
        raise GateError(
            f"the budget is {'not met' if made.status == 'fail' else 'not provably met'}",
            found="; ".join(made.reasons),
            wanted=made.budget,
            fix=f"{unmet_fix(made.reasons)}. The bundle is written all the same, without the engines that fail it; "
            "--set bundle.include_failed=true keeps them",
        )
    if further.require_recommendation and made.grade != "recommended":
        raise GateError(
            f"the verdict is {made.grade!r}: {made.document.verdict.sentence}",
            found="; ".join(made.document.verdict.remarks[:1]),
            wanted="a recommendation (--require-recommendation)",
            fix="run the same command on a quiet machine: only the bench is measured again. "
            "The bundle is written, with engines whose answers are verified",
        )
