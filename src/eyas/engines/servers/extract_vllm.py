"""Run under vLLM's environment: the target's residual streams at some layers, for conversations that come on stdin.

python extract_vllm.py TARGET --layers 2,15,27,30 --folder SCRATCH --max-model-len 512
(a line of stdin: a JSON list of lists of token ids; for each of these lists a line on stdout: {"file": its states}, or
{"error": why there are none}. A file holds `hidden_states` [tokens, layers, H] and `token_ids` [tokens])

Where vLLM finds no CUDA, its own connector cannot run, and eyas_hidden_states stands in for it.
"""

import argparse
import fcntl
import json
import os
import signal
import sys
import threading
import time

WAIT = 120  # seconds for a file whose request has been answered


def end_with(parent):
    """Wait until whoever started this is gone, and end all processes of vLLM: they would go on writing files."""
    while os.getppid() == parent:
        time.sleep(0.2)
    os.killpg(0, signal.SIGKILL)


def written(path):
    """Wait until the connector has let go of a file's lock; is the file there?"""
    until = time.monotonic() + WAIT
    with open(path + ".lock") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > until:
                    return False
                time.sleep(0.002)
    os.remove(path + ".lock")
    return os.path.exists(path)


def answer(output):
    """What is told of one finished request."""
    path = (output.kv_transfer_params or {}).get("hidden_states_path")
    if path is None:
        return {"error": "vLLM names no file of states for it"}
    return {"file": path} if written(path) else {"error": f"vLLM did not write {path}"}


if __name__ == "__main__":
    options = argparse.ArgumentParser()
    options.add_argument("target")
    options.add_argument("--layers", required=True)
    options.add_argument("--folder", required=True)
    options.add_argument("--max-model-len", type=int, required=True)
    options.add_argument("--dtype", default="float32")
    options.add_argument("--trust-remote-code", action="store_true")
    options.add_argument("--arguments", default="{}", help="more of vllm.LLM, as JSON")
    a = options.parse_args()
    if os.getpgrp() == os.getpid():  # a group of its own, as Eyas starts it
        threading.Thread(target=end_with, args=(os.getppid(),), daemon=True).start()
    told = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # vLLM and its processes log to stdout: only answers go there
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_NO_USAGE_STATS": "1"}  # in one process files never come
    import torch
    from vllm import LLM, SamplingParams

    connector = {"kv_connector": "ExampleHiddenStatesConnector"}
    if not torch.cuda.is_available():
        connector = {"kv_connector": "HiddenStatesOnCpu", "kv_connector_module_path": "eyas_hidden_states"}
    layers = [int(n) for n in a.layers.split(",")]
    how = {
        "dtype": a.dtype,
        "max_model_len": a.max_model_len,
        "trust_remote_code": a.trust_remote_code,
        "enforce_eager": not torch.cuda.is_available(),
        "speculative_config": {
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": layers}},
        },
        "kv_transfer_config": {
            **connector,
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {"shared_storage_path": a.folder},
        },
        **json.loads(a.arguments),
        "enable_prefix_caching": False,  # what it has in its cache is not computed, and its states are not kept
    }
    llm = LLM(a.target, **how)
    print(json.dumps({"ready": True}), file=told)
    one = SamplingParams(temperature=0, max_tokens=1)
    for line in sys.stdin:
        prompts = [{"prompt_token_ids": ids} for ids in json.loads(line)]
        for output in llm.generate(prompts, one, use_tqdm=False):
            print(json.dumps(answer(output)), file=told)
