"""Packaging of ds_vpipe.

``ds_vpipe.engine`` and ``ds_vpipe.models`` live in the top-level folders ``engine/`` and ``models/``. The links
``ds_vpipe/engine`` and ``ds_vpipe/models`` serve a bare checkout; ``package_dir`` serves wheels, also where the
links did not survive (a zip download).
"""

from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).resolve().parent


def tree(package: str, folder: str) -> dict[str, str]:
    """Map ``package`` and its sub-packages to ``folder`` and its sub-folders."""
    subpackages = find_packages(str(ROOT / folder), exclude=["engine", "engine.*", "models", "models.*"])
    return {package: folder} | {f"{package}.{sub}": f"{folder}/{sub.replace('.', '/')}" for sub in subpackages}


PACKAGE_DIR = tree("ds_vpipe", "ds_vpipe") | tree("ds_vpipe.engine", "engine") | tree("ds_vpipe.models", "models")
README = ROOT / "README.md"

setup(
    name="ds_vpipe",
    version="0.1.0",
    description="Asynchronous pipeline-parallel training for DeepSpeed",
    long_description=README.read_text(encoding="utf-8") if README.is_file() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.10",
    packages=sorted(PACKAGE_DIR),
    package_dir=PACKAGE_DIR,
    package_data={
        "ds_vpipe": ["py.typed"],
        "ds_vpipe.timelines": ["*.html"],
        "ds_vpipe.models.bert": ["*.json", "*/*.json"],
    },
    install_requires=[
        "torch>=2.11",
        "deepspeed==0.19.8",
        "transformers>=5.19",
        "pydantic>=2",
        "pyyaml",
        "tokenizers",
        "numpy>=1.24",
        "datasets>=4.3",
        "filelock",
        "tqdm",
        "matplotlib",
        "h5py",
        "safetensors",
    ],
    extras_require={
        "test": [
            *("accelerate>=1.15", "hypothesis", "mypy", "pytest", "pytest-xdist", "ruff", "setuptools>=77"),
            *(
                "bitsandbytes>=0.50",
                "peft>=0.21",
                "trl>=1.16",
            ),  # fine-tuning scripts use them, and tests stand for those
            "types-PyYAML",
        ],
    },
    zip_safe=False,
)
