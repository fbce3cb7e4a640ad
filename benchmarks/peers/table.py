"""From the results of all models to goals with pass or miss, and to Markdown."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from catalog import CATALOG, DYNAMIC, MERGED, NNCF, OURS, OURS_8, OURS_ORT, OURS_ORT_8

Results = Mapping[str, Any]

COLUMNS = [
    "artifact",
    "top-1",
    "drop, points [95 %]",
    "agreement [95 %]",
    "KL, nats",
    "p50 ms",
    "latency / NNCF [95 %]",
    "images/s, batch 8 [/ NNCF]",
    "images/s, 2 streams [/ NNCF]",
    "INT8 MACs",
    "made in s",
    "peak MB",
]
WIDTH = len(COLUMNS)


def markdown(results: Results) -> str:
    host = results["host"]
    lines = [
        "# INT8 beside the peers",
        "",
        f"`{results['command']}`",
        "",
        f"{host['cpu']} ({host['isa']}), {results['threads']} threads; "
        + ", ".join(f"{name} {version}" for name, version in results["versions"].items())
        + ".",
        "",
        *_goal_lines(results["goals"]),
    ]
    for name, model in results["models"].items():
        lines += ["", *_model_lines(name, model)]
    return "\n".join(lines) + "\n"


def _goal_lines(goals: list[dict[str, str]]) -> list[str]:
    rows = [[goal["model"], goal["goal"], goal["bound"], goal["value"], goal["verdict"]] for goal in goals]
    return [_row(["model", "goal", "bound", "measured", ""]), _row(["---"] * 5), *(_row(row) for row in rows)]


def _model_lines(name: str, model: Results) -> list[str]:
    weights = f"{model['evaluation_images']} evaluation images" if model["checkpoint"] else "seeded weights"
    lines = [f"## {name} ({weights}, {model['calibration_images']} calibration images)", ""]
    rows = [_artifact(model, entry.name) for entry in CATALOG if entry.name in model["artifacts"]]
    columns = [i for i in range(WIDTH) if any(row[i] for row in rows)]  # seeded weights have no accuracy
    lines += [_row([row[i] for i in columns]) for row in (COLUMNS, ["---"] * WIDTH, *rows)]
    if rate := model["rate"]:
        lines += [
            "",
            f"{OURS}: {rate['share']:.0f} % of the best INT8 rate ({rate['macs'] / 1e9:.2f} GMAC executed, "
            f"{rate['executed'] / 1e9:.0f} of {rate['best'] / 1e9:.0f} GMAC/s)"
            + (f"; {NNCF}: {rate['peer_share']:.0f} %." if rate["peer_share"] else "."),
        ]
    flagged = {
        scenario: sorted(row["artifact"] for row in found["rows"].values() if row["flags"])
        for scenario, found in model["measured"].items()
    }
    for scenario, artifacts in flagged.items():
        if artifacts:
            lines += ["", f"Flagged in `{scenario}` (unstable, short or contended): {', '.join(artifacts)}."]
    return lines


def _artifact(model: Results, name: str) -> list[str]:
    facts = model["artifacts"][name]
    if "error" in facts:
        return [name, facts["error"], *[""] * (WIDTH - 2)]
    accuracy = facts.get("accuracy") or {}
    macs = facts.get("macs")
    return [
        name,
        _number(accuracy.get("top1"), "{:.2f}"),
        _with_interval(accuracy.get("drop"), accuracy.get("drop_ci95"), "{:.2f}"),
        _with_interval(accuracy.get("agreement"), accuracy.get("agreement_ci95"), "{:.2f}"),
        _number(accuracy.get("kl"), "{:.2g}"),
        _measured(model, "single", name, lambda row: f"{row['latency_ms']['p50']:.2f}"),
        _ratio_text(ratio(model, "single", name, NNCF)) if name != NNCF else "1",
        _throughput(model, "offline", name),
        _throughput(model, "streams", name),
        f"{int8_share(macs):.1f} %" if macs else "",
        _number(facts["seconds"], "{:.0f}"),
        _number(facts["peak_mb"], "{:.0f}"),
    ]


def _throughput(model: Results, scenario: str, name: str) -> str:
    text = _measured(model, scenario, name, lambda row: f"{row['throughput']:.1f}")
    found = ratio(model, scenario, name, NNCF)
    return f"{text} [{found['ratio']:.2f}]" if text and found else text


def _measured(model: Results, scenario: str, name: str, text: Callable[[Any], str]) -> str:
    row = model["measured"].get(scenario, {}).get("rows", {}).get(name)
    return text(row) if row else ""


def ratio(model: Results, scenario: str, a: str, b: str) -> Results | None:
    """a / b, or None where the two were not measured together."""
    pairs = model["measured"].get(scenario, {}).get("ratios", ())
    return next((each for each in pairs if (each["a"], each["b"]) == (a, b)), None)


def int8_share(macs: Mapping[str, int]) -> float:
    """Percent of the multiplications of linears and convolutions that run in INT8."""
    return 100 * macs.get("int8", 0) / sum(macs.values())


def _number(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)


def _with_interval(value: float | None, interval: Any, form: str) -> str:
    if value is None:
        return ""
    return f"{form.format(value)} [{form.format(interval[0])}, {form.format(interval[1])}]"


def _ratio_text(found: Results | None) -> str:
    if found is None:
        return ""
    return _with_interval(found["ratio"], found["ci95"], "{:.2f}") if found["ci95"] else f"{found['ratio']:.2f}"


def _row(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def goals(models: Results) -> list[dict[str, str]]:
    """Every goal that applies to each model: some need trained weights, others apply without."""
    rows = {name: (_trained_goals if model["checkpoint"] else _seeded_goals)(model) for name, model in models.items()}
    return [{"model": name, **goal} for name, model_goals in rows.items() for goal in model_goals]


def _trained_goals(model: Results) -> list[dict[str, str]]:
    accuracies = {name: model["artifacts"].get(name, {}).get("accuracy") or {} for name in (OURS, OURS_ORT)}
    return [
        *(
            _goal(f"{name}: agreement with FP32", 99.0, accuracy.get("agreement"), "{:.2f} %", least=True)
            for name, accuracy in accuracies.items()
        ),
        *(
            _goal(f"{name}: top-1 drop", 0.1, accuracy.get("drop"), "{:.2f} points")
            for name, accuracy in accuracies.items()
        ),
        _ratio_goal("single", model, OURS, NNCF, 0.85),
        _ratio_goal("offline", model, OURS_8, NNCF, 1.10),
        _ratio_goal("single", model, OURS_ORT, NNCF, 1.05),
        _ratio_goal("offline", model, OURS_ORT_8, NNCF, 0.95),
        _seconds_goal(model, 2.5),
    ]


def _seeded_goals(model: Results) -> list[dict[str, str]]:
    return [
        _seconds_goal(model, 2.0),
        _goal(f"{OURS}: peak memory, MB", 2500, model["artifacts"].get(OURS, {}).get("peak_mb"), "{:.0f}"),
        _ratio_goal("single", model, OURS, NNCF, 0.80),
        _ratio_goal("offline", model, OURS_8, NNCF, 1.10),
        _ratio_goal("streams", model, OURS_8, NNCF, 1.10),
        _ratio_goal("single", model, MERGED, NNCF, 0.65),
        _ratio_goal("single", model, OURS_ORT, DYNAMIC, 0.78),
    ]


def _seconds_goal(model: Results, bound: float) -> dict[str, str]:
    ours, theirs = (model["artifacts"].get(name, {}).get("seconds") for name in (OURS, NNCF))
    ratio_made = ours / theirs if ours and theirs else None
    text = f"{{:.2f}} ({ours:.0f} s against {theirs:.0f} s)" if ratio_made else ""
    return _goal(f"{OURS}: seconds to make / {NNCF}'s quantize", bound, ratio_made, text)


def _ratio_goal(scenario: str, model: Results, a: str, b: str, bound: float) -> dict[str, str]:
    """Of latencies at most the bound, of images per second at least."""
    measured = ratio(model, scenario, a, b)
    what = {"single": "latency, batch 1", "offline": "images/s, batch 8", "streams": "images/s, 2 streams"}[scenario]
    text = _ratio_text(measured)
    return _goal(f"{what}: {a} / {b}", bound, measured["ratio"] if measured else None, text, least=scenario != "single")


def _goal(text: str, limit: float, value: float | None, form: str, *, least: bool = False) -> dict[str, str]:
    bound = f"{'>=' if least else '<='} {limit:g}"
    if value is None:
        return {"goal": text, "bound": bound, "value": "", "verdict": "not measured"}
    met = value >= limit if least else value <= limit
    return {"goal": text, "bound": bound, "value": form.format(value), "verdict": "pass" if met else "miss"}
