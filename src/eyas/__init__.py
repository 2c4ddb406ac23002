"""Eyas trains, proves and debugs EAGLE-3 draft models.

Follow one token of data by opening, in this order: pipeline.py, prompts.py, regenerate.py, features/, vocab.py, train/,
draft/, decode/.
The words are those of README.md; `eyas --help` lists the verbs. Importing this package imports nothing else.
"""

from eyas._version import __version__

__all__ = ["__version__"]
