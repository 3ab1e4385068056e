"""Version of the package, stated here alone."""

__all__ = ["__version__"]

__version__ = "0.1.0"
