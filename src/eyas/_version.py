"""The version, alone in a module so that `eyas --version` and the build read it without importing anything."""

__version__ = "0.1.0"
