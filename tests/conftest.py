"""What all tests share: no network, one thread, and a target so small that everything runs in milliseconds.

pytest -q tests
"""

from __future__ import annotations

import os
import signal

# Before any import of torch or transformers reads them.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from pathlib import Path

import pytest

# A job in the background of a shell starts with Ctrl-C ignored, and so would all that tests start and interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

TEXT = [
    "the young hawk sits on the glove and looks at the field",
    "a draft guesses four tokens and the target checks them all at once",
    "what is the capital of France? The capital of France is Paris.",
    "def add(a, b):\n    return a + b\n",
]


def build_tiny_target(out_dir: Path, *, seed: int = 0, layers: int = 8, vocab: int = 300, tied: bool = True) -> Path:
    """Write a random Llama with a byte-level BPE tokenizer and a ChatML template as a HF directory.

    Hidden 32, 2 heads, 8 layers (default taps 2, 4, 5). The vocabulary has all 256 bytes, three ChatML specials and a
    few learnt merges; embeddings are `tied` by default as in the demo's target. Weights are larger than the usual
    initialisation, so that the argmax is not a near-tie everywhere.
    """
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=specials,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(TEXT, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        model_max_length=256,
    )
    tokenizer.chat_template = CHATML

    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=256,
        rms_norm_eps=1e-5,
        tie_word_embeddings=tied,
        initializer_range=0.2,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config).to(torch.float32)
    model.generation_config.eos_token_id = 2
    model.generation_config.pad_token_id = 0
    out_dir.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(out_dir)
    tokenizer.save_pretrained(out_dir)
    return out_dir


@pytest.fixture(scope="session")
def tiny_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random target as a Hugging Face directory. Shared by the whole session: do not write into it."""
    return build_tiny_target(tmp_path_factory.mktemp("tiny") / "target")


@pytest.fixture
def make_tiny_target():
    """The builder itself, for tests that need another seed, untied embeddings or another number of layers."""
    return build_tiny_target
