"""Run under an environment with torch, transformers and SpecForge: logits of SpecForge's own draft class, step by step.

    python forward_specforge.py DRAFT INPUTS.safetensors OUT.safetensors

INPUTS: `ids` [L], `taps` [L, 3H], `embedding` [V, H], `steps` [1]. OUT: `logits` [K, L, D]; step k reads the ids k + 1
further on, as training-time test does; its last k + 1 rows read padding.
"""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from specforge.modeling.draft.llama3_eagle import LlamaForCausalLMEagle3, prepare_decoder_attention_mask
from transformers import LlamaConfig

folder, inputs, out = Path(sys.argv[1]), load_file(sys.argv[2]), sys.argv[3]
config = LlamaConfig(**json.loads((folder / "config.json").read_text()))
model = LlamaForCausalLMEagle3(config, attention_backend="sdpa").float().eval()
model.load_state_dict({**load_file(folder / "model.safetensors"), "embed_tokens.weight": inputs["embedding"]})
ids, length = inputs["ids"].long(), len(inputs["ids"])
mask = prepare_decoder_attention_mask(torch.ones(1, length, dtype=torch.bool), (1, length), inputs["taps"][None], 0)
logits, cache = [], [[], []]
with torch.inference_mode():
    state = model.project_hidden_states(inputs["taps"][None])
    for k in range(int(inputs["steps"])):
        shifted = torch.cat([ids[k + 1 :], ids.new_zeros(k + 1)])[None]
        state = model.backbone(
            input_embeds=model.embed_input_ids(shifted), hidden_states=state, cache_hidden=cache, attention_mask=mask,
            position_ids=torch.arange(length)[None],
        )  # fmt: skip
        logits.append(model.compute_logits(state)[0])
save_file({"logits": torch.stack(logits).contiguous()}, out)
print("REPORT {}")
