"""vitdeploy: from a Vision Transformer checkpoint to a verified engine in one folder.

From a module and images to a predictor::

    import vitdeploy as vd

    model = vd.model(module, preprocess=vd.Preprocess(resize=248, crop=(224, 224)), labels=names)
    bundle = vd.deploy(model, "images", targets=["openvino-cpu"], max_drop=1.0)
    predictor = vd.load(bundle.folder)

Importing this loads nothing heavy: each name is imported on first use.
"""

__version__ = "0.1.0"

# The location of each public name: a module of `vitdeploy`, and the name in it.
_HOMES = {
    **dict.fromkeys(("Bundle", "Graph", "Model"), "api.artifacts"),
    "model": "api.model",
    **dict.fromkeys(("Images", "images"), "api.images"),
    **dict.fromkeys(("compile", "export", "optimize"), "api.graph"),
    **dict.fromkeys(("QuantizedGraph", "quantize"), "api.quantize"),
    **dict.fromkeys(("Bisection", "Compared", "Verification", "bisect", "compare", "verify"), "api.verify"),
    **dict.fromkeys(("Benchmark", "bench"), "api.bench"),
    **dict.fromkeys(("Deployment", "Tuned", "deploy", "plan", "run", "tune", "tune_recipe"), "api.deploy"),
    **dict.fromkeys(("SweepPlan", "Swept", "plan_sweep", "sweep"), "api.sweep"),
    "Predictor": "runtime.predictor",
    "load": "runtime.load",
    "Monitor": "runtime.monitor",
    "Preprocess": "spec",
    "Postprocess": "runtime.tasks.detection",
    # From wings.
    **dict.fromkeys(("History", "Reported", "read_history", "record", "report_to"), "history.api"),
    **dict.fromkeys(("Versions", "versions"), "releases.api"),
    **dict.fromkeys(("bench_on", "verify_on"), "devices.api"),
}
_CALLED = {"Preprocess": "PreprocessSpec", "Postprocess": "PostprocessSpec"}

__all__ = ["__version__", *sorted(_HOMES)]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from vitdeploy.extensions import wing  # raises an error if the wing is not installed

    return getattr(wing(_HOMES[name]), _CALLED.get(name, name))


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
