"""The one place that says which version of Rollbook this is."""

__version__ = "0.1.0"
