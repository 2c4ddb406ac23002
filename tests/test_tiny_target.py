"""The shared tiny target is what the other tests believe it is.   pytest -q tests/test_tiny_target.py"""

from pathlib import Path


def test_it_loads_renders_and_round_trips(tiny_target: Path):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_target)
    model = AutoModelForCausalLM.from_pretrained(tiny_target)
    assert len(tokenizer) == model.config.vocab_size == 300
    messages = [{"role": "user", "content": "hé!"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "<|im_start|>user\nhé!<|im_end|>\n<|im_start|>assistant\n"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert ids.count(1) == 2
    assert ids.count(2) == 1
    assert tokenizer.decode(ids) == text
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits  # (1, L, V)
    top2 = logits[0].topk(2).values
    assert logits.shape == (1, len(ids), 300)
    assert (top2[:, 0] - top2[:, 1]).min() > 1e-3, "a near-tie would make greedy comparisons flaky"
