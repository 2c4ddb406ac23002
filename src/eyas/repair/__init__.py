"""Changing a draft without losing it: `operations` are small, typed, each with a precondition on the bytes; `apply`
writes a new directory, reads it back, examines it again, and keeps it only if it is better."""
