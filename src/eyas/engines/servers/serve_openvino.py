"""Run under OpenVINO's environment: answer prompts greedily in float32, with a draft or without, and report the counts.

python serve_openvino.py TARGET DRAFT|none PROMPTS.json --k 4 --tokens 64
(TARGET, DRAFT: converted folders; PROMPTS: lists of token ids)
"""

import json

import numpy as np
import openvino as ov
import openvino_genai as genai
from serve_options import parse

a, prompts = parse()
exact = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32", "INFERENCE_NUM_THREADS": 1}
scheduler = genai.SchedulerConfig()
scheduler.cache_size = 1
drafted = {} if a.draft == "none" else {"draft_model": genai.draft_model(a.draft, "CPU", **exact)}
pipe = genai.LLMPipeline(a.target, "CPU", scheduler_config=scheduler, **drafted, **exact)
config = genai.GenerationConfig()
config.max_new_tokens, config.do_sample, config.ignore_eos = a.tokens, False, True
if drafted:
    config.num_assistant_tokens = a.k
report: dict = {"tokens": [], "rounds": 0, "accepted": 0}
for ids in prompts:
    tensor = ov.Tensor(np.array([ids], dtype=np.int64))
    said = pipe.generate(genai.TokenizedInputs(tensor, ov.Tensor(np.ones_like(tensor.data))), config)
    report["tokens"].append([int(i) for i in said.tokens[0]])
    if drafted:
        metrics = said.extended_perf_metrics
        report["accepted"] += metrics.get_num_accepted_tokens()
        report["rounds"] += len(metrics.main_model_metrics.raw_metrics.m_durations) - 1  # the first is the prefill
print("REPORT " + json.dumps(report), flush=True)  # noqa: T201 - it is read from there
