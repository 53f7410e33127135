"""Writes the software bill of materials: unisono and all that it needs at run time, as CycloneDX 1.6 JSON.

    python tools/sbom.py [FILE] [--extra NAME ...]     (default: build/sbom.json, without extras)

Versions and licences are those of the packages installed beside unisono, found from its requirements one by one.
"""

from __future__ import annotations

import argparse
import json
import sys
import uuid
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PACKAGE = "unisono"


def requirements_of(name: str, extras: frozenset[str]) -> list[tuple[str, frozenset[str]]]:
    """The packages that a package needs on this platform, each with the extras that are asked of it."""
    found = []
    for line in metadata.requires(name) or []:
        requirement = Requirement(line)
        environments = [{"extra": extra} for extra in (*extras, "")]
        if requirement.marker is None or any(requirement.marker.evaluate(each) for each in environments):
            found.append((canonicalize_name(requirement.name), frozenset(requirement.extras)))
    return found


def closure(name: str, extras: frozenset[str]) -> dict[str, list[str]]:
    """All packages that are needed, with those that each of them needs. PackageNotFoundError if one is missing."""
    needs: dict[str, set[str]] = {}
    seen: set[tuple[str, frozenset[str]]] = set()
    waiting = [(canonicalize_name(name), extras)]
    while waiting:
        each = waiting.pop()
        if each in seen:
            continue
        seen.add(each)
        required = requirements_of(*each)
        needs.setdefault(each[0], set()).update(other for other, _ in required if other != each[0])
        waiting += required
    return {name: sorted(others) for name, others in sorted(needs.items())}


def reference(name: str) -> str:
    return f"pkg:pypi/{name}@{metadata.version(name)}"


def component(name: str, kind: str = "library") -> dict[str, Any]:
    about = metadata.metadata(name)
    described = {"type": kind, "bom-ref": reference(name), "name": name, "version": about["Version"]}
    described["purl"] = reference(name)
    if "Summary" in about:
        described["description"] = about["Summary"]
    licence = _licence(about)
    return described | ({"licenses": [licence]} if licence else {})


def _licence(about: Any) -> dict[str, Any] | None:
    if "License-Expression" in about:
        return {"expression": about["License-Expression"]}
    classified = [line for line in about.get_all("Classifier") or [] if line.startswith("License ::")]
    text = classified[0].rpartition(" :: ")[2] if classified else (about["License"] or "").partition("\n")[0]
    return {"license": {"name": text}} if text else None


def bill(extras: frozenset[str] = frozenset()) -> dict[str, Any]:
    needs = closure(PACKAGE, extras)
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid4()}",
        "version": 1,
        "metadata": {
            "timestamp": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "component": component(PACKAGE, "application"),
        },
        "components": [component(name) for name in needs if name != PACKAGE],
        "dependencies": [
            {"ref": reference(name), "dependsOn": [reference(other) for other in others]}
            for name, others in needs.items()
        ],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="Write unisono's software bill of materials.")
    parser.add_argument("file", nargs="?", type=Path, default=Path("build/sbom.json"))
    parser.add_argument("--extra", action="append", default=[], help="an extra of unisono, such as mpi")
    chosen = parser.parse_args()
    try:
        written = bill(frozenset(chosen.extra))
    except metadata.PackageNotFoundError as error:
        print(f"{error.name} is needed and not installed; run make setup", file=sys.stderr)
        return 1
    chosen.file.parent.mkdir(parents=True, exist_ok=True)
    chosen.file.write_text(json.dumps(written, indent=1) + "\n")
    print(f"wrote {chosen.file}: {len(written['components'])} packages")
    return 0


if __name__ == "__main__":
    sys.exit(main())
