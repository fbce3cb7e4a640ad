"""What one output [batch, width] of somebody else's model means, by the evidence that its graph or its code gives.

Numbers of one shape are logits, an embedding, probabilities or measures. A softmax that is applied to anything but
logits gives wrong scores without an error: so what decides is said, and how to decide otherwise.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from vitdeploy.runtime.tasks import multi_label
from vitdeploy.spec import Evidence, Task

# How an output ends: in probabilities that compete, in probabilities of their own, in such with a factor, in what only
# embeddings end in (a normalisation, a linear without a bias), in log-probabilities, or in nothing that tells.
Ending = Literal["softmax", "sigmoid", "scaled", "vector", "log", ""]
# The tasks of probabilities of their own: of several labels, and of one.
OWN: tuple[Task, Task] = ("multi-label", "binary")
# The tasks of logits or probabilities [batch, width], or [batch], and those that their shape does not tell from these.
SCORES: tuple[Task, ...] = ("classification", *OWN)
FLAT: tuple[Task, ...] = (*SCORES, "features")

# All notes on outputs begin so.
OUTPUTS = "outputs: "
OTHERWISE = "(source.task in a recipe, task= in Python) says otherwise"
_NO_SOFTMAX = "no softmax is applied"
NOT_SOFTMAX = f"kept as numbers (the task tensors), and {_NO_SOFTMAX}"
ONE_NUMBER = (
    f"{OUTPUTS}one number per image has no other class to compete with: it is {NOT_SOFTMAX}; --task binary of yes or "
    f"no, and --task regression of a measure, such as an age, {OTHERWISE}"
)
INDEPENDENT = (
    f"{OUTPUTS}a sigmoid is at their end, below a factor: each is a probability of its own, and they are {NOT_SOFTMAX}"
)
LABELS_OF_THEIR_OWN = (
    f"{OUTPUTS}a sigmoid is at their end: each is the probability of a label of its own, and {_NO_SOFTMAX}; --task "
    f"tensors {OTHERWISE}"
)
YES_OR_NO = (
    f"{OUTPUTS}a sigmoid is at the end of one number: it is the probability of yes, and {_NO_SOFTMAX}; --task tensors "
    f"{OTHERWISE}"
)
PROBABILITIES = f"{OUTPUTS}a softmax is at their end: they are the scores, and no second softmax is applied"
_EMBEDDING = (
    f"is taken for an embedding ({{}}), of the task features: --task embedding or --task classification {OTHERWISE}"
)
_ASSUMED = "is taken for the logits of a classifier, which nothing in the model says"

# The task of each `problem_type` of transformers' configs that is not about classes that compete.
PROBLEMS: Mapping[str, Task] = {"regression": "regression", "multi_label_classification": "multi-label"}

# What a word of a name says, the surest first.
_WORDS = (
    ("classes", re.compile(r"logits?|softmax|classifier|prob(s|ability|abilities)?")),
    ("vector", re.compile(r"emb\w*|feat\w*|pool\w*|descriptors?|representation|latent|project(ion|or)")),
    (
        "measures",
        re.compile(r"ages?|pose|angles?|yaw|pitch|roll|regress\w*|coord\w*|landmarks?|b?box(es)?|rating"),
    ),
    ("classes", re.compile(r"heads?|fc|cls|class(es|ification)?|scores?|preds?|predictions?")),
)
# What models give for training and analysis beside their answer: its own parts, and what it was computed of.
_BESIDE = re.compile(
    r"(?i).*(hidden|attention|attn|aux|intermediate|loss|encoder_|decoder_|enc_|dec_|past_key|reference_points|"
    r"init_|token|patch|embed|feat|pool|dropout|denoising|dn_).*|labels?|pred_(label|mask|class)|argmax|topk|top_k"
)


def called(name: str) -> str:
    """What the name of an output, or of its layer, says of its numbers: "classes", "vector", "measures" or ""."""
    if re.fullmatch(r"fc1(_output)?", name):  # of face recognition, as MXNet's exporter calls an embedding
        return "vector"
    words = re.split(r"[^a-z]+", "/".join(re.split(r"[/.]", name.lower())[-3:]))
    return next((word for word, pattern in _WORDS if any(map(pattern.fullmatch, words))), "")


# Why an output that ends so has no answers of a task of OWN.
_COMPETES: Mapping[Ending, str] = {
    "softmax": "a softmax at their end: probabilities that compete",
    "log": "a softmax and a logarithm at their end: probabilities that compete",
    "scaled": "probabilities with a factor, or in a form that is not known",
}


@dataclass(frozen=True)
class Meaning:
    """What one output [batch, width], or [batch], is taken for.

    ending: what it ends in. note: what is assumed, or is no logits; "" where nothing is. refusal: why it has no answers
    of the task that is asked for, or that its config names, "" where it has; `expected`: what has.
    """

    task: Task
    ending: Ending = ""
    note: str = ""
    refusal: str = ""

    @property
    def scores(self) -> bool:
        """Whether the numbers are the softmax already, whose logarithm is as good as logits."""
        return self.task == "classification" and self.ending == "softmax"

    @property
    def independent(self) -> bool:
        """Whether the numbers are the probabilities already, each of its own."""
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
            return "logits of classes that compete"
        return "logits or sigmoids of labels that do not compete"


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
    """What one output [batch, width] is taken for.

    Args:
        ending: what it ends in.
        layer: the name of the layer that gives it.
        classes: how many the model says that it has.
        problem: what its config says, as `of_problem`.
        asked: the task that a user asks for.
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
    """The task of one output that nobody asks for, and a note."""
    word, shown = called(name) or called(layer), f"{OUTPUTS}{name or 'the output'} [batch, {width}]"
    if word == "vector" and classes != width:
        why = f"it is called {name}" if called(name) else f"{layer} gives it"
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
            f"{shown} is taken for measures by its name: --task regression or --task classification {OTHERWISE}",
        )
    if word == "classes" or ending == "log" or classes == width:
        return "classification", ""
    if ending == "vector":
        why = "it ends in a normalisation, or in a linear without a bias"
        return "features", f"{shown} {_EMBEDDING.format(why)}"
    return "classification", f"{shown} {_ASSUMED}: --task features, --task regression or --task tensors {OTHERWISE}"


def evidence_of(name: str, width: int | str, ending: Ending, layer: str = "") -> Evidence:
    """The same of one of several heads, each of which may be anything: what is assumed is not known."""
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
    """The task of a model whose config.json says that its outputs are no logits of classes that compete, and a note;
    None where it says no such thing."""
    kind = config.get("problem_type")
    if not isinstance(kind, str) or kind not in PROBLEMS:
        return None
    task = PROBLEMS[kind]
    return task, f"{OUTPUTS}config.json says problem_type {kind}: they are of the task {task}, and {_NO_SOFTMAX}"


def may_be_logits(note: str) -> bool:
    """Whether only a name speaks against it that the numbers are logits: a user may know better."""
    return _NO_SOFTMAX not in note


def without_assumption(notes: Iterable[str]) -> tuple[str, ...]:
    """The notes of a model that has a name for each class: that it is a classifier is no assumption then."""
    return tuple(note for note in notes if not (note.startswith(OUTPUTS) and _ASSUMED in note))


def of_training(name: str) -> bool:
    """Whether an output beside the answer is known to be no answer."""
    return _BESIDE.fullmatch(name) is not None


def left_out(names: Iterable[str]) -> str:
    return f"{OUTPUTS}left out, and not compared: {', '.join(names)}"


def all_kept(task: Task, answer: Iterable[str], others: Iterable[str]) -> str:
    """Of an output that may be an answer beside the one of `task`."""
    named, beside = ", ".join(answer), ", ".join(others)
    return (
        f"{OUTPUTS}beside {named} there is {beside}: all are kept as numbers (the task tensors); --task {task} "
        f"(source.task in a recipe, task= in Python) answers by {named}, and leaves the others out; --task heads "
        "answers by all"
    )
