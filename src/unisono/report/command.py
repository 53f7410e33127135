"""`unisono report RUN`: the report of a run as one HTML file, and a trace beside it."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from unisono.errors import UsageError
from unisono.report.page import as_page
from unisono.report.run_record import Run
from unisono.report.run_timeline import trace_json


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("report", help="write one HTML file that shows a run", allow_abbrev=False)
    parser.add_argument("run", metavar="RUN", help="the folder of fit(save=...)")
    parser.add_argument("-o", "--output", metavar="FILE", help="output file (default: RUN/report.html)")
    parser.add_argument("--json", action="store_true", help="print the names of the files as JSON")
    parser.set_defaults(handler=handle)


def handle(chosen: argparse.Namespace) -> int:
    run = Run.read(Path(chosen.run))
    page = Path(chosen.output or run.path / "report.html")
    trace = page.with_suffix(".trace.json")
    for file, text in ((page, as_page(run)), (trace, trace_json(run))):
        try:
            file.write_text(text, encoding="utf-8")
        except OSError as error:
            raise UsageError(f"{file}: cannot be written: {error.strerror}") from None
    if chosen.json:
        print(json.dumps({"page": str(page), "trace": str(trace)}))
        return 0
    print(f"wrote {page} (open it in a browser) and {trace} (open it in ui.perfetto.dev)")
    return 0
