"""From the results of all models to goals with pass or miss, and to Markdown."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from catalog import CATALOG, DYNAMIC, MERGED, NNCF, OURS, OURS_ORT

Results = Mapping[str, Any]

TABLE = (
    ("artifact", "---"),
    ("top-1", "---"),
    ("drop, points [95 %]", "---"),
    ("agreement [95 %]", "---"),
    ("KL, nats", "---"),
    ("p50 ms", "---"),
    ("latency / NNCF [95 %]", "---"),
    ("images/s, batch 8 [/ NNCF]", "---"),
    ("images/s, 2 streams [/ NNCF]", "---"),
    ("INT8 MACs", "---"),
    ("made in s", "---"),
    ("peak MB", "---"),
)
WIDTH = len(TABLE)


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
    rows = [[each["model"], each["goal"], each["wanted"], each["found"], each["verdict"]] for each in goals]
    return [_row(["model", "goal", "wanted", "found", ""]), _row(["---"] * 5), *(_row(row) for row in rows)]


def _model_lines(name: str, model: Results) -> list[str]:
    weights = f"{model['evaluation_images']} evaluation images" if model["checkpoint"] else "seeded weights"
    lines = [f"## {name} ({weights}, {model['calibration_images']} calibration images)", ""]
    lines += [_row([head for head, _ in TABLE]), _row([rule for _, rule in TABLE])]
    lines += [_row(_artifact(model, entry.name)) for entry in CATALOG]
    flagged = {
        scenario: sorted(row["artifact"] for row in found["rows"].values() if row["flags"])
        for scenario, found in model["measured"].items()
    }
    for scenario, artifacts in flagged.items():
        if artifacts:
            lines += ["", f"Flagged in `{scenario}` (unstable, short or contended): {', '.join(artifacts)}."]
    return lines


def _artifact(model: Results, name: str) -> list[str]:
    facts = model["artifacts"].get(name, {"error": "not made yet"})
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
    """Every goal for every model that it can be said of: with weights of its own the accuracy, without the speed."""
    found = []
    for name, model in models.items():
        rows = _accuracy_goals(model) if model["checkpoint"] else _speed_goals(model)
        found += [{"model": name, **row} for row in rows]
    return found


def _accuracy_goals(model: Results) -> list[dict[str, str]]:
    ours = model["artifacts"].get(OURS, {})
    accuracy = ours.get("accuracy") or {}
    ort = (model["artifacts"].get(OURS_ORT, {}).get("accuracy") or {}).get("agreement")
    agreement, drop = accuracy.get("agreement"), accuracy.get("drop")
    merged = (model["artifacts"].get(MERGED, {}).get("accuracy") or {}).get("drop")
    return [
        _goal(f"{OURS}: agreement with FP32", 99.0, agreement, "{:.2f} %", least=True),
        _goal(f"{OURS}: top-1 drop", 0.1, drop, "{:.2f} points"),
        _ratio_goal("latency", model, OURS, NNCF, 0.95),
        _goal(f"{OURS_ORT}: agreement with FP32", 99.0, ort, "{:.2f} %", least=True),
        _goal(f"{MERGED}: top-1 drop", 0.5, merged, "{:.2f} points"),
        _coverage_goal(model),
    ]


def _speed_goals(model: Results) -> list[dict[str, str]]:
    made = {name: (model["artifacts"].get(name) or {}).get("seconds") for name in (OURS, NNCF)}
    twice = made[OURS] / made[NNCF] if made[OURS] and made[NNCF] else None
    text = f"{{:.2f}} ({made[OURS]:.0f} s against {made[NNCF]:.0f} s)" if twice else ""
    rate = model.get("rate") or {}
    share = rate.get("share")
    told = (
        f"{{:.0f}} % ({rate['macs'] / 1e9:.2f} GMAC executed, {rate['executed'] / 1e9:.0f} of "
        f"{rate['best'] / 1e9:.0f} GMAC/s; {NNCF}: {rate['peer_share']:.0f} %)"
        if share
        else ""
    )
    return [
        _ratio_goal("latency, batch 1", model, OURS, NNCF, 0.80),
        _ratio_goal("latency, batch 1", model, MERGED, NNCF, 0.60),
        _ratio_goal("latency, batch 1", model, OURS_ORT, DYNAMIC, 0.75),
        _coverage_goal(model),
        _goal(f"{OURS}: share of the best INT8 rate", 80.0, share, told, least=True),
        _goal(f"{OURS}: seconds to make / {NNCF}'s quantize", 2.0, twice, text),
    ]


def _coverage_goal(model: Results) -> dict[str, str]:
    macs = model["artifacts"].get(OURS, {}).get("macs")
    return _goal(f"{OURS}: MACs in INT8", 90.0, int8_share(macs) if macs else None, "{:.1f} %", least=True)


def _ratio_goal(what: str, model: Results, a: str, b: str, wanted: float) -> dict[str, str]:
    found = ratio(model, "single", a, b)
    return _goal(f"{what}: {a} / {b}", wanted, found and found["ratio"], _ratio_text(found).replace("{", "{{"))


def _goal(text: str, wanted: float, found: float | None, form: str, *, least: bool = False) -> dict[str, str]:
    bound = f"{'>=' if least else '<='} {wanted:g}"
    if found is None:
        return {"goal": text, "wanted": bound, "found": "", "verdict": "not measured"}
    met = found >= wanted if least else found <= wanted
    return {"goal": text, "wanted": bound, "found": form.format(found), "verdict": "pass" if met else "miss"}
