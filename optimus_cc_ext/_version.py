"""The one place that states the version."""

__all__ = ["__version__"]

__version__ = "0.1.0"
