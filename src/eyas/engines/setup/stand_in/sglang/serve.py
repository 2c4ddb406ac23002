"""SGLang's own HTTP server on a CPU without AMX, with the stand-in kernels.   python serve.py --model-path TARGET ...

Takes the options of `python -m sglang.launch_server`; those that a CPU of this kind needs are set unless given.
"""

import os
import sys

DEFAULTS = {
    "--device": "cpu",
    "--dtype": "float32",
    "--attention-backend": "intel_amx",
    "--sampling-backend": "pytorch",
    "--grammar-backend": "none",
    "--max-total-tokens": "8192",
    "--max-running-requests": "4",
}
SWITCHES = ("--disable-cuda-graph", "--disable-radix-cache", "--skip-server-warmup")


def with_defaults(arguments):
    given = {argument.split("=", 1)[0] for argument in arguments}
    added = [word for name, value in DEFAULTS.items() if name not in given for word in (name, value)]
    return [*arguments, *added, *(name for name in SWITCHES if name not in given)]


if __name__ == "__main__":  # processes that it spawns import this file again
    os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from sglang.srt.runtime_context import override_platform

    # Without AMX SGLang would turn this attention backend into one that has no part for EAGLE; the name is all that is
    # wanted of it, since what it calls is the stand-in.
    override_platform(has_amx=True).install()
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    arguments = prepare_server_args(with_defaults(sys.argv[1:]))
    try:
        from sglang.srt.entrypoints.http_server import launch_server

        launch_server(arguments)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)
