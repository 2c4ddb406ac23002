"""A target as Eyas needs it: where it comes from, its facts, the few tensors training reads, its states and its head.

    source.py     a folder, a GGUF file, a hub id or the embedded default -> a Hugging Face folder; fingerprints
    facts.py      config.json -> TargetFacts, nested configs included
    weights.py    single tensors without loading the model: embedding, head, final norm
    model.py      Target: taps and final state of a batch, logits from the final state
    generate.py   the target's own answers

Nothing is imported here, so that reading a fact never costs an import of transformers.
"""
