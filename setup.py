"""What pyproject.toml cannot say: scripts/ and patches/ are installed, too, as optimus_cc_ext/share."""

from setuptools import find_packages, setup

SHARED = {f"optimus_cc_ext.share.{folder}": folder for folder in ("scripts", "patches")}

setup(
    packages=[*find_packages(include=["optimus_cc_ext", "optimus_cc_ext.*"]), *SHARED],
    package_dir=SHARED,
    package_data={"optimus_cc_ext": ["py.typed"], **{name: ["**/*"] for name in SHARED}},
    exclude_package_data={"": ["**/__pycache__/*", "*.pyc"]},
)
