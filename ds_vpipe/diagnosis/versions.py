"""Which versions of which packages this project works with, and which it is tested with."""

from __future__ import annotations

from dataclasses import dataclass

from packaging.version import InvalidVersion, Version

from ds_vpipe.diagnosis.facts import NodeFacts
from ds_vpipe.diagnosis.finding import Finding, Level


@dataclass(frozen=True)
class Supported:
    """Versions of a package: from ``least`` to before ``below`` (None: no end), tested with ``tested``."""

    least: str
    below: str | None
    tested: str


# Equal to constraints.txt and setup.py, which a test sees to: neither is there in an installation.
PACKAGES = {
    "torch": Supported("2.6", None, "2.13.0"),
    "deepspeed": Supported("0.19", "0.20", "0.19.8"),
    "transformers": Supported("5", None, "5.23.0"),
}
PYTHON = "3.10"
_INSTALL = "pip install -c constraints.txt -e ."


def check_versions(node: NodeFacts) -> list[Finding]:
    """Python and the packages on one machine."""
    findings = []
    if Version(node.python) < Version(PYTHON):
        findings.append(Finding("error", "python", f"{node.python} on {node.host}", f"install {PYTHON} or newer"))
    else:
        findings.append(Finding("ok", "python", node.python))
    for name, supported in PACKAGES.items():
        found = node.packages.get(name)
        if found is None:
            findings.append(Finding("error", name, f"not installed on {node.host}", _INSTALL))
            continue
        level, text = _compare(found, supported)
        findings.append(Finding(level, name, text, "" if level == "ok" else _INSTALL))
    return findings


def _compare(found: str, supported: Supported) -> tuple[Level, str]:
    try:
        version = Version(found)
    except InvalidVersion:
        return "warning", f"{found}, which is no version; tested with {supported.tested}"
    if version < Version(supported.least) or (supported.below and version >= Version(supported.below)):
        end = f", before {supported.below}" if supported.below else ""
        return "error", f"{found}; supported: {supported.least} and newer{end}"
    if version.release != Version(supported.tested).release:
        return "warning", f"{found}; works by its number, tested with {supported.tested}"
    return "ok", found
