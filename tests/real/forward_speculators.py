"""Run under an environment with torch, transformers and speculators: logits of its own draft class, step by step.

python forward_speculators.py DRAFT INPUTS.safetensors OUT.safetensors            (as forward_specforge.py)
"""

import sys
import types
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

for name, members in {"hs_connectors": ("FileTransfer", "HiddenStatesTransfer")}.items():  # its transport of states
    module = types.ModuleType(name)
    for member in members:
        setattr(module, member, type(member, (), {}))
    sys.modules[name] = module

from speculators.models.eagle3.config import Eagle3SpeculatorConfig  # noqa: E402
from speculators.models.eagle3.core import Eagle3DraftModel  # noqa: E402

folder, inputs, out = Path(sys.argv[1]), load_file(sys.argv[2]), sys.argv[3]
config = Eagle3SpeculatorConfig.from_pretrained(folder)
config.transformer_layer_config._attn_implementation = "eager"
model = Eagle3DraftModel(config).float().eval()
stored = {**load_file(folder / "model.safetensors"), "embed_tokens.weight": inputs["embedding"]}
left = model.load_state_dict(stored, strict=False)
assert not left.unexpected_keys and all("verifier" in name for name in left.missing_keys), left
ids, length, steps = inputs["ids"].long(), len(inputs["ids"]), int(inputs["steps"])
kept: list[torch.Tensor] = []
model.lm_head.register_forward_hook(lambda module, given, answer: kept.append(answer[0].detach()))
with torch.inference_mode():
    model.forward(
        inputs["taps"][None], torch.cat([ids[1:], ids.new_zeros(1)])[None],
        torch.zeros(1, length, dtype=torch.long), ttt_steps=steps,
    )  # fmt: skip
save_file({"logits": torch.stack(kept).contiguous()}, out)
print("REPORT {}")
