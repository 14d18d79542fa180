"""Make one self-contained HTML page from training runs and benchmark results."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from gradwire.errors import GradwireError, InvalidArgument, Unsupported
from gradwire_lab.report import inputs
from gradwire_lab.report.inputs import Inputs
from gradwire_lab.report.sections import Section, make_sections
from gradwire_lab.results.plots import css_variables
from gradwire_lab.results.records import write_text

__all__ = ["write_report"]


def write_report(
    run_dirs: Sequence[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    title: str = "gradwire report",
    baseline: str | None = None,
) -> Path:
    """Write one HTML page with all figures inside; it needs no network, no script and no other file.

    Args:
        run_dirs: run folders of `gradwire train`, JSON files of `gradwire bench --json`, or folders that hold either.
        out: the page; its folder is made if need be, and an older page stays as it is if anything fails.
        baseline: the label (scheme) to compare with; by default `ddp`, else `plain`.
    Returns: `out` as a path.
    Raises: InvalidArgument (missing input, unknown baseline, page not writable), CorruptMessage (a file that holds
        something else), Unsupported (the packages of the extra `report` are missing).
    """
    found = inputs.load_inputs(run_dirs)
    schemes = {run.label for run in found.runs}
    schemes |= {str(record["scheme"]) for kind in ("allreduce", "train") for record in found.records[kind]}
    if baseline is not None and baseline not in schemes:
        there_are = ", ".join(sorted(schemes)) or "none"
        raise InvalidArgument(f"no run or record is of a scheme called {baseline!r}; there are: {there_are}")
    sections = make_sections(found.runs, found.records, baseline)
    page = _render(title, sections, found)
    out = Path(out)
    try:
        write_text(out, page)
    except GradwireError as error:
        raise InvalidArgument(f"cannot write the report to {out}: {error.__cause__}") from error
    return out


def _render(title: str, sections: Sequence[Section], found: Inputs) -> str:
    try:
        import jinja2
    except ImportError as error:
        raise Unsupported(
            f"a report needs jinja2 ({error}); install it with: pip install 'gradwire[report]'"
        ) from error
    days = sorted({str(place["date"])[:10] for place in found.places() if place.get("date")})
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,  # names come from files that anyone may have written
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("report.html.j2").render(
        title=title,
        sections=sections,
        runs=found.runs,
        environments=found.environments(),
        light=css_variables(dark=False),
        dark=css_variables(dark=True),
        dates=" to ".join(dict.fromkeys((days[0], days[-1]))) if days else "",
    )
