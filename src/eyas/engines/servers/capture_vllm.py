"""Run under vLLM's environment: record what it really feeds the draft after prefill of some prompts, in float32.

python capture_vllm.py TARGET DRAFT PROMPTS.json --out STATES.safetensors --speculative '{"method": "eagle3"}'
(PROMPTS: lists of token ids; the tensor `states.N` of prompt N is float32 [tokens, T*H], `ids.N` int64 [tokens])
"""

import argparse
import json
import os
from pathlib import Path

os.environ.update(VLLM_NO_USAGE_STATS="1", VLLM_CPU_KVCACHE_SPACE="1", VLLM_ENABLE_V1_MULTIPROCESSING="0")

if __name__ == "__main__":
    options = argparse.ArgumentParser()
    options.add_argument("target")
    options.add_argument("draft")
    options.add_argument("prompts")
    options.add_argument("--out", required=True)
    options.add_argument("--speculative", default="{}", help="more of --speculative-config, as JSON")
    options.add_argument("--dtype", default="float32")
    a = options.parse_args()
    from safetensors.torch import save_file
    from vllm import LLM, SamplingParams

    speculative = {"method": "eagle3", "num_speculative_tokens": 1} | json.loads(a.speculative) | {"model": a.draft}
    prompts = json.loads(Path(a.prompts).read_text())
    longest = max(map(len, prompts)) + 8
    llm = LLM(
        a.target, dtype=a.dtype, enforce_eager=True, max_model_len=longest, max_num_batched_tokens=max(longest, 2048),
        max_num_seqs=1, enable_prefix_caching=False, speculative_config=speculative,
    )  # fmt: skip
    runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    fed, propose = [], runner.drafter.propose

    def heard(*args, **kwargs):
        fed.append((kwargs["target_hidden_states"].detach().float().clone(), kwargs["target_token_ids"].clone()))
        return propose(*args, **kwargs)

    runner.drafter.propose = heard
    out = {}
    for n, ids in enumerate(prompts):
        fed.clear()
        llm.generate([{"prompt_token_ids": ids}], SamplingParams(temperature=0, max_tokens=2, ignore_eos=True),
                     use_tqdm=False)  # fmt: skip
        states, tokens = fed[0]
        out[f"states.{n}"], out[f"ids.{n}"] = states[: len(ids)].contiguous(), tokens[: len(ids)].long().contiguous()
    save_file(out, a.out)
    print("REPORT " + json.dumps({"prompts": len(prompts)}), flush=True)  # noqa: T201 - it is read from there
    os._exit(0)  # its own end takes seconds, and says nothing
