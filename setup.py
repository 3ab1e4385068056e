"""What pyproject.toml cannot say: scripts/ and patches/ are optimus_cc_ext/share, and which links a page has."""

import os
import re
from pathlib import Path

from setuptools import find_packages, setup

SHARED = {f"optimus_cc_ext.share.{folder}": folder for folder in ("scripts", "patches")}

URL_VARIABLE = "OPTIMUS_CC_URL"
"""Where the repository's files can be read, such as https://host/project/blob/main: for a wheel that is published."""


def page_for_an_index(readme: str, url: str | None) -> str:
    """README.md for a page that has no files beside it: relative links lead to `url`, or are left out without one."""
    link = re.compile(r"(!?)\[([^\]]*)\]\((?!https?:|#)([^)]*)\)")
    if url is None:
        return link.sub(lambda found: "" if found[1] else found[2], readme)
    return link.sub(rf"\1[\2]({url.rstrip('/')}/\3)", readme)


README = (Path(__file__).parent / "README.md").read_text(encoding="utf-8")

setup(
    long_description=page_for_an_index(README, os.environ.get(URL_VARIABLE)),
    long_description_content_type="text/markdown",
    packages=[*find_packages(include=["optimus_cc_ext", "optimus_cc_ext.*"]), *SHARED],
    package_dir=SHARED,
    package_data={
        "optimus_cc_ext": ["py.typed", "tools/plan/*.csv", "tools/*/*.html"],
        **{name: ["**/*"] for name in SHARED},
    },
    exclude_package_data={"": ["**/__pycache__/*", "*.pyc"]},
)
