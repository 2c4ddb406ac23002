"""What is wrong with a draft, told from tests rather than from beliefs. Read-only, always.

`finding` is the form of an answer, `case` what may be looked at, `checks/` the static tests (files only, one module a
family, each a pure function), `examine` runs them.
"""
