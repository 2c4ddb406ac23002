"""Export: a trained or foreign draft becomes a directory that the engines, or another trainer, read as it was trained.

`plan` decides what is written, `write` writes and proves it, `check` looks at such a directory later, `convert` runs
the converters of engines that have a format of their own.
"""

from .plan import NotExpressible
from .write import ExportReport, export_draft, find_draft, parse_engines

__all__ = ["ExportReport", "NotExpressible", "export_draft", "find_draft", "parse_engines"]
