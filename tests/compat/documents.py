"""The programs of the five documents, as printed there: extracted, cut in size, run on ranks and compared.

    python -m tests.compat.documents                    # the table: document, program, ranks, edits, result
    python -m tests.compat.documents --document 002 --full

documents/NNN.txt are the texts, programs/ has the rows. Cuts change sizes and the number of printed digits, and nothing
else.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from tests.compat.programs import mindspore, paddle, pytorch, vqnet
from tests.compat.programs.texts import FULL, Size

ROWS = [*vqnet.ROWS, *pytorch.ROWS_001, *paddle.ROWS, *mindspore.ROWS, *pytorch.ROWS_004]


def main() -> int:
    parser = argparse.ArgumentParser(description="Run the documents' programs and print a table.")
    parser.add_argument("--document", default="", help="only this one, such as 002")
    parser.add_argument("--only", default="", metavar="WORD", help="only programs with this word in their titles")
    parser.add_argument("--full", action="store_true", help="the document's number of batches")
    parser.add_argument("--float32", action="store_true", help="as printed; by default their float32 is float64")
    chosen = parser.parse_args()
    rows = [row for row in ROWS if row.document.startswith(chosen.document) and chosen.only in row.title]
    size = replace(FULL if chosen.full else Size(), dtype="float32" if chosen.float32 else "float64")
    failed = 0
    print(f"sizes and printed digits cut; samples and seeds of tests/compat/prelude.py; float32 is {size.dtype}")
    print(f"{'document':9} {'program':46} {'ranks':5} {'edits':5} result")
    with tempfile.TemporaryDirectory() as folder:
        for number, row in enumerate(rows):
            try:
                result = row.compare(row, size, Path(folder) / str(number))
            except AssertionError as error:
                failed += 1
                result = f"FAILED: {error}"
            print(
                f"{row.document:9} {row.section + ' ' + row.title:46} {row.ranks:5} {row.edits:5} {result}", flush=True
            )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
