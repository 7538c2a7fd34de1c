"""Versions of other packages that this one works with."""

from collections.abc import Mapping

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from ds_vpipe.errors import Refusal

# Package: versions that it works with, tested version. Equal to constraints.txt and setup.py, which a test sees to:
# neither is there in an installation. One version of DeepSpeed: the engine puts methods in the place of its private
# ones, and with others, 0.19.0 for one, it would train wrongly. So would Trainer's pipelines before transformers 5.19.
PACKAGES: dict[str, tuple[str, str]] = {
    "torch": (">=2.11", "2.13.0"),
    "deepspeed": ("==0.19.8", "0.19.8"),
    "transformers": (">=5.19", "5.24.0"),
}
PYTHON = "3.10"


def fits(package: str, version: str) -> bool:
    """Whether this package works with that version of another, or with one before or after its release.

    Raises:
        InvalidVersion: it is no version.
    """
    return SpecifierSet(PACKAGES[package][0]).contains(Version(version).base_version)


def refuse_others(versions: Mapping[str, str]) -> None:
    """Refuse versions of packages that are imported."""
    for package, version in versions.items():
        try:
            if fits(package, version):
                continue
        except InvalidVersion:
            pass
        wanted = package + PACKAGES[package][0]
        raise Refusal(f"version of {package}", version, wanted, f'pip install "{wanted}"').error()
