"""Run by every Python of SGLang's environment at its start (a .pth file imports it): costs nothing until it is needed.

PyPI's torchvision is a CUDA build, whose compiled half cannot load beside a CPU torch; its Python half, which SGLang
imports for image models, only wants two operators to be declared. They are, when torchvision is first imported.
"""

import importlib.abc
import sys


class _DeclareOperators(importlib.abc.MetaPathFinder):
    declared: object = None  # the declarations live as long as this object

    def find_spec(self, name, path, target=None):
        if name == "torchvision":
            sys.meta_path.remove(self)
            import torch

            library = torch.library.Library("torchvision", "FRAGMENT")
            for operator in ("nms", "qnms"):
                library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            _DeclareOperators.declared = library
        return


sys.meta_path.insert(0, _DeclareOperators())
