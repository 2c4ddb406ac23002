"""Engines that serve drafts: how each version reads a directory (profiles), and private environments that run them.

`reading` is what a profile answers with; `sglang`, `vllm`, `llamacpp` and `openvino` are the profiles, collected in
`profiles`; `compare` sets what an engine reads against what was declared. Nothing here needs torch.
"""
