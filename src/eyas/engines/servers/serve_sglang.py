"""Run under SGLang's environment: answer prompts greedily in float32, with a draft or without, and report the counts.

python serve_sglang.py TARGET DRAFT|none PROMPTS.json --k 4 --tokens 64        (PROMPTS: lists of token ids)
"""

import itertools
import json
import os

from serve_options import parse

os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")

if __name__ == "__main__":
    a, prompts = parse()
    from sglang.srt.runtime_context import override_platform

    override_platform(has_amx=True).install()  # the stand-in kernels answer to that name
    import sglang

    drafted = {} if a.draft == "none" else {
        "speculative_algorithm": "EAGLE3", "speculative_draft_model_path": a.draft, "speculative_num_steps": a.k,
        "speculative_eagle_topk": 1, "speculative_num_draft_tokens": a.k + 1,
    }  # fmt: skip
    engine = sglang.Engine(
        model_path=a.target, device="cpu", dtype="float32", attention_backend="intel_amx", sampling_backend="pytorch",
        disable_radix_cache=True, max_total_tokens=8192, max_running_requests=4, context_length=1024,
        grammar_backend="none", skip_server_warmup=True, cuda_graph_backend_decode="disabled",
        cuda_graph_backend_prefill="disabled", log_level="error", **drafted,
    )  # fmt: skip
    greedy = {"temperature": 0, "max_new_tokens": a.tokens, "ignore_eos": True}
    answers = engine.generate(input_ids=prompts, sampling_params=greedy)
    report: dict = {"tokens": [answer["output_ids"] for answer in answers]}
    if a.draft != "none":
        metas = [answer["meta_info"] for answer in answers]
        histograms = (m["spec_correct_drafts_histogram"] for m in metas)  # as long as the best round needs
        exactly = [sum(column) for column in itertools.zip_longest(*histograms, fillvalue=0)]
        report |= {
            "rounds": sum(m["spec_verify_ct"] for m in metas),
            "accepted": sum(m["spec_num_correct_drafts"] for m in metas),
            "at_least": [sum(exactly[j:]) for j in range(1, a.k + 1)],
        }
    print("REPORT " + json.dumps(report), flush=True)  # noqa: T201 - it is read from there
    engine.shutdown()
