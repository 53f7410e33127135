"""`unisono report RUN`: the report of a run as one HTML file, and a trace beside it."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from unisono.errors import UnisonoError, UsageError
from unisono.report.page import as_page
from unisono.report.run_record import Run
from unisono.report.run_timeline import trace_json


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("report", help="write one HTML file that shows a run", allow_abbrev=False)
    parser.add_argument("run", metavar="RUN", help="the folder of fit(save=...)")
    parser.add_argument("-o", "--output", metavar="FILE", help="output file (default: RUN/report.html)")
    parser.add_argument("--json", action="store_true", help="print the names of the files as JSON")
    parser.add_argument("--quiet", action="store_true", help="print only errors")
    parser.set_defaults(handler=handle)


def handle(chosen: argparse.Namespace) -> int:
    run = Run.read(Path(chosen.run))
    page = Path(chosen.output or run.path / "report.html")
    trace = page.with_suffix(".trace.json")
    texts = pages(run)
    for file, text in zip((page, trace), texts, strict=True):
        try:
            file.write_text(text, encoding="utf-8")
        except OSError as error:
            raise UsageError(f"{file}: cannot be written: {error.strerror}") from None
    if chosen.json:
        print(json.dumps({"page": str(page), "trace": str(trace)}))
    elif not chosen.quiet:
        print(f"wrote {page} (open it in a browser) and {trace} (open it in ui.perfetto.dev)")
    return 0


def pages(run: Run) -> tuple[str, str]:
    """The page and the trace; UsageError for a folder whose files are of another form."""
    try:
        return as_page(run), trace_json(run)
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        if isinstance(error, UnisonoError):
            raise
        raise UsageError(
            f"{run.path} is not as fit(save=...) writes it ({type(error).__name__}: {str(error)[:200]}); was it "
            "changed, or written by another version?"
        ) from error
