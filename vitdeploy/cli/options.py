"""Options that several commands have."""

from __future__ import annotations

import re
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from vitdeploy.cli.complete import complete_targets
from vitdeploy.spec import LabelKind

F = TypeVar("F", bound=Callable[..., Any])

_UNITS = {"s": 1, "m": 60, "h": 3600}


class Duration(click.ParamType):  # type: ignore[type-arg]
    """ "90s", "20m", "1.5h", in seconds."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh])", str(value))
        if match is None or float(match[1]) == 0:
            self.fail(f"{value!r} is not a time like 90s, 20m or 1h.", param, ctx)
        return float(match[1]) * _UNITS[match[2]]


def _set_longest_wait(context: click.Context, option: click.Parameter, value: float | None) -> None:
    """The process waits for no longer, whatever measures."""
    if value is not None:
        from vitdeploy.benchmark.machine_lock import MACHINE

        MACHINE.max_wait = value


wait_option = click.option(
    "--max-wait",
    type=Duration(),
    expose_value=False,
    callback=_set_longest_wait,
    help="90s, 20m, 1h: wait no longer for other measurements on this machine. Default: until they end.",
)


engine_option = click.option(
    "--target",
    shell_complete=complete_targets,
    default="auto",
    show_default=True,
    help="Which engine, by target or name; auto takes the first that works here.",
)

# A bundle may be somebody else's.
trust_option = click.option(
    "--trust",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Take bundles only if signed by this public key or certificate (PEM), as `vitdeploy bundle sign` does.",
)


def digest_of(context: click.Context, option: click.Parameter, value: str | None) -> str | None:
    """The hex of a SHA-256."""
    from vitdeploy.bundle.digests import digest_hex
    from vitdeploy.errors import InputError

    try:
        return None if value is None else digest_hex(value)
    except InputError as error:
        raise click.BadParameter(f"{error.message}: {error.wanted}.") from None


# No digest is above that of the manifest, which has those of all other files.
expect_option = click.option(
    "--expect-digest",
    callback=digest_of,
    metavar="sha256:HEX",
    help="Refuse any other bundle: the SHA-256 of its manifest.json, as `vitdeploy bundle verify` prints it.",
)


accept_option = click.option(
    "--accept-known-bad",
    multiple=True,
    metavar="ID",
    help="Compile although this entry of the table of runtimes known to be wrong is about the graph.",
)


def memory_options(function: F) -> F:
    """--history and --report-to, of a result."""
    # Not a path: a URI is none.
    history = click.option(
        "--history",
        metavar="DIR-or-URI",
        help="Add the result to this history, as one new file; `vitdeploy history` reads it.",
    )
    return history(report_option(function))


report_option = click.option(
    "--report-to",
    "trackers",
    multiple=True,
    metavar="TRACKER",
    help="Send to mlflow[:URI], wandb[:[ENTITY/]PROJECT] or bencher:FILE, once for each result.",
)
report_bundle_option = click.option("--report-bundle", is_flag=True, help="Send the bundle too, with --report-to.")


def label_options(function: F) -> F:
    """--labels and --annotations of the images of --data."""
    labels = click.option(
        "--labels",
        type=click.Choice(typing.get_args(LabelKind)),
        help="Where labels come from. Default: class folders, or what tars, tables and lists bring.",
    )
    annotations = click.option(
        "--annotations",
        type=click.Path(path_type=Path),
        help="YOLO's folder, COCO's JSON file, the folder of maps, or the JSON list of texts or prompts.",
    )
    return labels(annotations(function))


def text_options(function: F) -> F:
    """--texts and --template, for models that compare images with texts."""
    texts = click.option(
        "--texts", type=click.Path(path_type=Path), help="For models that take texts: a file, one a line."
    )
    template = click.option(
        "--template", metavar="TEXT", help="What makes a class folder's name a text, as 'a photo of a {}.'."
    )
    return texts(template(function))


def worker_options(function: F, what: str = "many calibration images are observed") -> F:
    """--executor and --jobs of commands that share out work; `what` is done there."""
    executor = click.option(
        "--executor",
        metavar="processes|ray[:HOST:PORT]",
        help=f"Where {what}: by processes of this machine, or on a Ray cluster.",
    )
    jobs = click.option(
        "--jobs",
        type=click.IntRange(min=1),
        help="How many pieces of that at a time, by processes without --executor. Default: one for each core or CPU.",
    )
    return executor(jobs(function))
