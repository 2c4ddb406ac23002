"""What OpenVINO's converter makes of EAGLE-3 drafts.   load_report_openvino.py DRAFT ... --target TARGET

Runs optimum-intel's own export, as its command line does, on a copy of each draft whose tensors are numbered. What the
converter holds is read between loading and tracing: its class is a torch module, filled by transformers.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import openvino
import openvino_genai
import optimum.intel.openvino  # noqa: F401  imported once, before the forks
import torch
from optimum.exporters.openvino import main_export
from reporting import MAPS, Report, main
from transformers import PreTrainedModel

VERSION = openvino_genai.__version__.split("-")[0]


def load(report: Report, draft: Path, target: Path) -> None:
    report.stage = "convert"
    with tempfile.TemporaryDirectory() as scratch:
        copy, converted = Path(scratch) / draft.name, Path(scratch) / "converted"
        report.numbered_copy(draft, copy)
        watch(report)
        main_export(
            str(copy), output=str(converted), task="text-generation-with-past", trust_remote_code=True,
            library_name="transformers", convert_tokenizer=False,
        )  # fmt: skip
        model = openvino.Core().read_model(converted / "openvino_model.xml")
        info = ("eagle3_mode", "hidden_layers_list")
        report.fields["metadata"] = {
            name: model.get_rt_info([name]).value for name in info if model.has_rt_info([name])
        }
        report.fields["outputs"] = [sorted(output.get_names()) for output in model.outputs]


def watch(report: Report) -> None:
    """Read parameters and maps as soon as transformers has filled the class."""
    base: Any = PreTrainedModel
    original = base.from_pretrained.__func__

    def watched(kind: Any, *arguments: Any, **options: Any) -> Any:
        model = original(kind, *arguments, **options)
        seen = set()
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if tensor.is_floating_point():
                values = torch.unique(tensor.detach().float()).tolist()
                keys = report.named(values)
                if len(keys) < len(values):
                    keys = []  # numbers of its own: transformers initialises what is missing
            else:
                keys = [
                    k
                    for k, stored in report.maps.items()
                    if k == name.split(".")[-1] and bool((stored == tensor).all())
                ]
            seen.update(keys)
            if "rotary_emb" in name or name.endswith(MAPS[1]):
                continue
            report.fields["parameters"][name] = {
                "shape": list(tensor.shape),
                "keys": keys,
                "filled": "whole" if keys else "not",
                "created": "ones" if "norm" in name else "other",
            }
        report.fields["architecture"] = type(model).__name__
        report.fields["ignored"] = [key for key in report.keys if key not in seen]
        d2t = getattr(getattr(model, "model", None), "d2t", None)
        report.fields["d2t"] = None if d2t is None else (torch.arange(len(d2t)) + d2t)[:8].tolist()
        return model

    base.from_pretrained = classmethod(watched)


if __name__ == "__main__":
    main("openvino", VERSION, load)
