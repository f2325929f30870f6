"""The `gputally` command and the Python client; composes the stages, imports them lazily."""

from importlib.metadata import version

__version__ = version("gputally")
