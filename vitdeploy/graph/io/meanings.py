"""Decide what an output [batch, width] of a third-party model means, from its graph or its code.

Outputs of the same shape can be logits, an embedding, probabilities or measures. A softmax on anything except logits
gives wrong scores without an error, so notes report the reason for each decision and how to override it.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from vitdeploy.runtime.tasks import multi_label
from vitdeploy.spec import Evidence, Task

# How an output ends: "softmax", competing probabilities; "sigmoid", independent ones; "scaled", probabilities with a
# factor; "vector", as only embeddings do (a normalisation, a linear without a bias); "log", log-probabilities; "",
# unknown.
Ending = Literal["softmax", "sigmoid", "scaled", "vector", "log", ""]
# The tasks with independent probabilities: several labels, and one.
OWN: tuple[Task, Task] = ("multi-label", "binary")
# The tasks of logits or probabilities [batch, width] or [batch], and all tasks with outputs of these shapes.
SCORES: tuple[Task, ...] = ("classification", *OWN)
FLAT: tuple[Task, ...] = (*SCORES, "features")

# The prefix of all notes on outputs.
OUTPUTS = "outputs: "
OTHERWISE = "(source.task in a recipe, task= in Python) overrides this"
_NO_SOFTMAX = "no softmax is applied"
NOT_SOFTMAX = f"kept as raw numbers (the task tensors), and {_NO_SOFTMAX}"
ONE_NUMBER = (
    f"{OUTPUTS}one number per image, {NOT_SOFTMAX}; --task binary (yes or no) or --task regression (a measure, such "
    f"as an age) {OTHERWISE}"
)
INDEPENDENT = f"{OUTPUTS}they end in a scaled sigmoid: independent probabilities, {NOT_SOFTMAX}"
LABELS_OF_THEIR_OWN = (
    f"{OUTPUTS}they end in a sigmoid: independent probabilities, one per label, and {_NO_SOFTMAX}; --task tensors "
    f"{OTHERWISE}"
)
YES_OR_NO = (
    f"{OUTPUTS}one number that ends in a sigmoid: the probability of yes, and {_NO_SOFTMAX}; --task tensors {OTHERWISE}"
)
PROBABILITIES = f"{OUTPUTS}they end in a softmax: they are the scores, and no second softmax is applied"
_EMBEDDING = (
    f"is treated as an embedding ({{}}), the task features: --task embedding or --task classification {OTHERWISE}"
)
_ASSUMED = "is assumed to be the logits of a classifier"

# The task of each `problem_type` of transformers' configs, except competing classes.
PROBLEMS: Mapping[str, Task] = {"regression": "regression", "multi_label_classification": "multi-label"}

# The meaning of words in a name, the most reliable first.
_WORDS = (
    ("classes", re.compile(r"logits?|softmax|classifier|prob(s|ability|abilities)?")),
    ("vector", re.compile(r"emb\w*|feat\w*|pool\w*|descriptors?|representation|latent|project(ion|or)")),
    (
        "measures",
        re.compile(r"ages?|pose|angles?|yaw|pitch|roll|regress\w*|coord\w*|landmarks?|b?box(es)?|rating"),
    ),
    ("classes", re.compile(r"heads?|fc|cls|class(es|ification)?|scores?|preds?|predictions?")),
)
# Outputs for training and analysis, in addition to the answer: its parts and intermediate values.
_BESIDE = re.compile(
    r"(?i).*(hidden|attention|attn|aux|intermediate|loss|encoder_|decoder_|enc_|dec_|past_key|reference_points|"
    r"init_|token|patch|embed|feat|pool|dropout|denoising|dn_).*|labels?|pred_(label|mask|class)|argmax|topk|top_k"
)


def called(name: str) -> str:
    """The meaning of an output by its name or its layer's name: "classes", "vector", "measures" or ""."""
    if re.fullmatch(r"fc1(_output)?", name):  # the embedding of a face recognition model, as MXNet exports it
        return "vector"
    words = re.split(r"[^a-z]+", "/".join(re.split(r"[/.]", name.lower())[-3:]))
    return next((word for word, pattern in _WORDS if any(map(pattern.fullmatch, words))), "")


# Why an output with this ending does not fit a task of OWN.
_COMPETES: Mapping[Ending, str] = {
    "softmax": "outputs that end in a softmax: competing probabilities",
    "log": "outputs that end in the logarithm of a softmax: competing probabilities",
    "scaled": "probabilities with a factor, or in an unknown form",
}


@dataclass(frozen=True)
class Meaning:
    """The meaning of an output [batch, width] or [batch].

    ending: how it ends. note: what is assumed, or why it is not logits; "" for neither. refusal: why it does not fit
    the requested task or the task of its config, "" if it fits; `expected`: the outputs that fit.
    """

    task: Task
    ending: Ending = ""
    note: str = ""
    refusal: str = ""

    @property
    def scores(self) -> bool:
        """Whether the numbers are already a softmax, whose logarithm can replace the logits."""
        return self.task == "classification" and self.ending == "softmax"

    @property
    def independent(self) -> bool:
        """Whether the numbers are already independent probabilities."""
        return self.task in OWN and self.ending == "sigmoid"

    @property
    def output(self) -> str:
        """The task's name for it."""
        if self.task == "features":
            return self.task
        return multi_label.PROBABILITIES if self.independent else multi_label.LOGITS

    @property
    def expected(self) -> str:
        if self.task == "classification":
            return "logits of competing classes"
        return "logits or sigmoids of independent labels"


def meaning_of(
    name: str,
    width: int | str,
    ending: Ending,
    layer: str = "",
    classes: int | None = None,
    *,
    problem: tuple[Task, str] | None = None,
    asked: Task | None = None,
) -> Meaning:
    """Return the meaning of an output [batch, width].

    Args:
        ending: how it ends.
        layer: the name of the layer that computes it.
        classes: the number of classes that the model declares.
        problem: the task and note of its config, from `of_problem`.
        asked: the task that the user requests.
    """
    if asked is not None and asked in OWN:
        return Meaning(asked, ending, refusal=_COMPETES.get(ending, ""))
    task, note = problem or _guessed(name, width, ending, layer, classes)
    if asked != "classification":
        contradicts = problem is not None and task in OWN
        return Meaning(task, ending, note, _COMPETES.get(ending, "") if contradicts else "")
    refusal = "" if ending == "softmax" or may_be_logits(note) else note.removeprefix(OUTPUTS)
    return Meaning(asked, ending, PROBABILITIES if ending == "softmax" else "", refusal)


def _guessed(name: str, width: int | str, ending: Ending, layer: str, classes: int | None) -> tuple[Task, str]:
    """The task of an output when the user requests none, and a note."""
    word, shown = called(name) or called(layer), f"{OUTPUTS}{name or 'the output'} [batch, {width}]"
    if word == "vector" and classes != width:
        why = f"its name is {name}" if called(name) else f"the layer {layer} computes it"
        return "features", f"{shown} {_EMBEDDING.format(why)}"
    measures = word == "measures" and classes != width
    if ending == "scaled":
        return "tensors", INDEPENDENT
    if ending == "sigmoid" and not measures:
        labels, one = OWN
        return (one, YES_OR_NO) if width == 1 else (labels, LABELS_OF_THEIR_OWN)
    if width == 1:
        return "tensors", ONE_NUMBER
    if ending == "softmax":
        return "classification", PROBABILITIES
    if measures:
        return (
            "tensors",
            f"{shown} is treated as measures because of its name: --task regression or --task classification "
            f"{OTHERWISE}",
        )
    if word == "classes" or ending == "log" or classes == width:
        return "classification", ""
    if ending == "vector":
        why = "it ends in a normalisation or in a linear without a bias"
        return "features", f"{shown} {_EMBEDDING.format(why)}"
    return "classification", f"{shown} {_ASSUMED}: --task features, --task regression or --task tensors {OTHERWISE}"


def evidence_of(name: str, width: int | str, ending: Ending, layer: str = "") -> Evidence:
    """The evidence for one of several heads; its task is None if it would only be an assumption."""
    meaning = meaning_of(name, width, ending, layer)
    sure = {
        "classification": meaning.note in ("", PROBABILITIES),
        **dict.fromkeys(OWN, True),
        "features": "vector" in (called(name), called(layer)),
    }
    known = "embedding" if meaning.task == "features" else meaning.task
    return Evidence(
        known if sure.get(meaning.task, False) else None,
        "" if ending == "vector" else ending,
        width if isinstance(width, int) else None,
    )


def of_problem(config: Mapping[str, Any]) -> tuple[Task, str] | None:
    """The task and a note for a model whose config.json says that its outputs are not logits of competing classes;
    None for other configs."""
    kind = config.get("problem_type")
    if not isinstance(kind, str) or kind not in PROBLEMS:
        return None
    task = PROBLEMS[kind]
    return task, f"{OUTPUTS}problem_type in config.json is {kind}: the task is {task}, and {_NO_SOFTMAX}"


def may_be_logits(note: str) -> bool:
    """Whether the numbers may still be logits: only a name suggests otherwise, and a user may override it."""
    return _NO_SOFTMAX not in note


def without_assumption(notes: Iterable[str]) -> tuple[str, ...]:
    """The notes without the assumption of a classifier, for a model that has a name for each class."""
    return tuple(note for note in notes if not (note.startswith(OUTPUTS) and _ASSUMED in note))


def of_training(name: str) -> bool:
    """Whether the name of a further output shows that it is not an answer."""
    return _BESIDE.fullmatch(name) is not None


def left_out(names: Iterable[str]) -> str:
    return f"{OUTPUTS}left out, and not compared: {', '.join(names)}"


def all_kept(task: Task, answer: Iterable[str], others: Iterable[str]) -> str:
    """The note on `others`, outputs that may be answers in addition to the one of `task`."""
    named, further = ", ".join(answer), ", ".join(others)
    return (
        f"{OUTPUTS}in addition to {named} the model has {further}: all are kept as raw numbers (the task tensors); "
        f"--task {task} (source.task in a recipe, task= in Python) uses {named} and leaves out the rest; --task heads "
        "uses all"
    )
