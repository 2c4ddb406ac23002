"""What leaves a verb and is no EyasError, in words: no memory, a full disk, a path that the system refuses, Ctrl-C.

    explained(error, "train")        # an EyasError, or None: a bug, which keeps its traceback
Exercise it:  pytest tests/test_failures.py

Most of these are caught where they happen, with all that is known there (memory.py, writes.disk_errors). This is the
net below: here only the verb is known, and what the system says.
"""

from __future__ import annotations

import errno
from collections.abc import Container, Sequence

from eyas.errors import BadInput, EyasError, OutOfMemory

# verb -> what makes it need less. The settings are those of its --help.
LOWERS = {
    "plan": "leave --calibrate out, or lower what is planned",
    "ask": "lower --slots (what was said is kept), or --max-new-tokens",
    "regenerate": "lower --slots (answers that are done are kept), or --max-new-tokens",
    "extract": "lower --batch-tokens, then --max-length, then --shard-mib",
    "vocab": "count features instead of a file of conversations, or fewer of these",
    "train": "give --set recompute=true or, on several GPUs, --set parallel=fsdp, with which the same run goes on; or "
             "begin anew in another --out, with a smaller --set micro_tokens=…",
    "doctor": "give fewer or shorter requests (--prompts), or examine the files alone with --static",
    "repair": "repair one finding without trials (--finding ID, without --target), or on a larger machine",
    "prove": "lower --batch, or --max-new-tokens",
    "measure": "lower --concurrency, or measure a server elsewhere (--url)",
    "chat": "load it as --dtype bfloat16, or talk to a server (--url)",
    "canary": "lower --count",
    "run": "lower the size of the stage that was at work (--override with train.micro_tokens, train.recompute, "
           "extract.batch_tokens or regenerate.slots); stages that are done are kept",
}  # fmt: skip
ELSEWHERE = "end other programs, or use a machine with more memory"

# verb -> what a second call finds. Verbs that are not named keep nothing, and change nothing.
GOES_ON = ("ask", "regenerate", "extract", "train", "engines", "run")
CHANGES = ("repair", "revert")

REFUSED = {
    errno.ENOENT: "check the path: a folder on the way to it is missing, too, where it is one to write",
    errno.ENOTDIR: "a file is where a folder should be: choose another path",
    errno.EISDIR: "a folder is where a file should be: name the file in it",
    errno.EEXIST: "something is there already: choose another path",
    errno.EACCES: "mend its permissions, or choose another path",
    errno.EPERM: "mend its permissions, or choose another path",
    errno.EROFS: "that file system is read-only: choose another path",
    errno.ENAMETOOLONG: "the name is too long for the file system: choose a shorter one",
    errno.ELOOP: "its symlinks lead in a circle: mend them",
}
EXHAUSTED = {
    errno.ENOSPC: "the disk is full: free some space, or choose another --out, and run the same command again",
    errno.EDQUOT: "the quota is used up: free some space, or choose another --out, and run the same command again",
    errno.EMFILE: "too many files are open: raise the limit (ulimit -n 65536) and run the same command again",
    errno.ENFILE: "too many files are open on this machine: end other programs and run the same command again",
    errno.EIO: "the disk fails: look at the system's log, and run the same command again on another one",
}


def verb_of(argv: Sequence[str], verbs: Container[str]) -> str:
    """The first word of a command line that is a verb; '' where there is none."""
    return next((word for word in argv if word in verbs), "")


def explained(error: BaseException, verb: str = "") -> EyasError | None:
    """What can be told to a user of an error that is not Eyas's own; None for a bug."""
    from eyas.memory import is_out_of_memory, wanted

    if is_out_of_memory(error):
        doing = f"`eyas {verb}`" if verb else "this command"
        return OutOfMemory(f"out of memory in {doing}{wanted(error)}: {LOWERS.get(verb, ELSEWHERE)}")
    if not isinstance(error, OSError) or error.errno is None:
        return None
    where = f"{error.filename}: " if error.filename is not None else ""
    if error.errno in EXHAUSTED:
        return EyasError(f"{where}{error.strerror}; {EXHAUSTED[error.errno]}")
    if error.errno in REFUSED and where:
        return BadInput(f"{where}{error.strerror}; {REFUSED[error.errno]}")
    return None


def interrupted(verb: str = "", by: str = "") -> str:
    """What Ctrl-C left behind, or a signal of that name."""
    how = f"ended by {by}" if by else "interrupted"
    if verb in GOES_ON:
        return f"{how}; the same command goes on where this one stopped."
    if verb in CHANGES:
        return f"{how}; nothing is half changed: `eyas history DRAFT` tells, and finishes what was begun in place."
    return f"{how}; nothing was changed. The same command begins anew."
