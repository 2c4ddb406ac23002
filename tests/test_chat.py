"""The loss mask lies on exactly the assistant's tokens, whatever the template and whatever the text."""

import functools
import json

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from eyas.chat import Unusable, encode_conversation, encode_recorded, render

SPECIALS = [
    "<pad>", "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|start_header_id|>",
    "<|end_header_id|>", "<|eot_id|>", "<bos>", "<start_of_turn>", "<end_of_turn>", "[INST]", "[/INST]", "[TOOL_CALLS]",
    "<|User|>", "<|Assistant|>", "<|end_of_sentence|>", "<|user|>", "<|assistant|>", "<|observation|>",
]  # fmt: skip

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3 = (
    "{{ '<|begin_of_text|>' }}{% for m in messages %}"
    "{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
GEMMA = (
    "{{ '<bos>' }}{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}{% set role = 'model' if m.role == 'assistant' else m.role %}"
    "{{ '<start_of_turn>' + role + '\n' + m.content | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
# The system message moves into the first user turn; the generation prompt adds nothing; a space belongs to the answer.
MISTRAL = (
    "{% if messages[0].role == 'system' %}{% set sys = messages[0].content + '\n\n' %}{% set rest = messages[1:] %}"
    "{% else %}{% set sys = '' %}{% set rest = messages %}{% endif %}{{ '<s>' }}"
    "{% for m in rest %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate user and assistant') }}{% endif %}"
    "{% if m.role == 'user' %}{{ '[INST] ' + (sys if loop.first else '') + m.content + ' [/INST]' }}"
    "{% else %}{{ ' ' + m.content | trim + '</s>' }}{% endif %}{% endfor %}"
)
# Drops the thoughts of turns before the last question, opens an empty thought in the last turn, knows tools.
QWEN3 = """\
{%- if tools %}{{ '<|im_start|>system\n# Tools\n' + (tools | tojson) + '<|im_end|>\n' }}{% endif -%}
{%- set ns = namespace(last=-1) -%}
{%- for m in messages -%}
{%- if m.role == 'user' and not (m.content.startswith('<tool_response>') and m.content.endswith('</tool_response>')) -%}
{%- set ns.last = loop.index0 -%}{%- endif -%}{%- endfor -%}
{%- for m in messages -%}
{%- if m.role == 'assistant' -%}
  {%- set content = m.content or '' -%}{%- set thought = '' -%}
  {%- if m.reasoning_content is string -%}{%- set thought = m.reasoning_content -%}
  {%- elif '</think>' in content -%}
    {%- set thought = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') -%}
    {%- set content = content.split('</think>')[-1].lstrip('\n') -%}
  {%- endif -%}
  {{- '<|im_start|>assistant\n' -}}
  {%- if loop.index0 > ns.last and (loop.last or thought) -%}
    {{- '<think>\n' + thought.strip('\n') + '\n</think>\n\n' -}}
  {%- endif -%}
  {{- content -}}
  {%- for call in m.tool_calls or [] -%}
    {{- '\n<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' -}}
    {{- call.function.arguments if call.function.arguments is string else call.function.arguments | tojson -}}
    {{- '}\n</tool_call>' -}}
  {%- endfor -%}
  {{- '<|im_end|>\n' -}}
{%- elif m.role == 'tool' -%}
  {{- '<|im_start|>user\n<tool_response>\n' + m.content + '\n</tool_response><|im_end|>\n' -}}
{%- else -%}
  {{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}
{%- if enable_thinking is defined and not enable_thinking -%}{{- '<think>\n\n</think>\n\n' -}}{%- endif -%}{%- endif -%}
"""
# The generation prompt opens a thought that no past turn shows.
DEEPSEEK = (
    "{{ '<s>' }}{% for m in messages %}{% if m.role == 'user' %}{{ '<|User|>' + m.content }}"
    "{% elif m.role == 'system' %}{{ m.content }}"
    "{% else %}{{ '<|Assistant|>' + m.content.split('</think>')[-1] + '<|end_of_sentence|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|Assistant|><think>\n' }}{% endif %}"
)
MARKED = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ '<|im_start|>assistant\n' }}"
    "{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
)
# No end-of-turn token of its own: the model stops by emitting the next role's.
GLM = (
    "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
ALPACA = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ '### Instruction:\n' + m.content + '\n\n' }}"
    "{% else %}{{ '### Response:\n' + m.content + '\n\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '### Response:\n' }}{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer_for():
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=SPECIALS, initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator(
        ["assistant user system hello there, how are you? I am fine.\n\nWell then. 42 is it"] * 9, trainer
    )

    @functools.cache
    def make(template, eos="<|im_end|>"):
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=bpe, eos_token=eos, additional_special_tokens=SPECIALS, model_max_length=10_000
        )
        tokenizer.chat_template = template
        return tokenizer

    return make


def runs(tokenizer, encoded):
    """Texts of the supervised runs."""
    mask = [0, *encoded.mask.tolist(), 0]
    edges = [i for i in range(1, len(mask)) if mask[i] != mask[i - 1]]
    return [tokenizer.decode(encoded.ids[a - 1 : b - 1]) for a, b in zip(edges[::2], edges[1::2], strict=True)]


def chat(*texts, system=None):
    messages = [{"role": "user" if i % 2 == 0 else "assistant", "content": t} for i, t in enumerate(texts)]
    return [{"role": "system", "content": system}, *messages] if system else messages


TWO_TURNS = chat("hello there", "I am fine.", "how are you?", "Well then.")
PLAIN = {  # template, eos token, what surrounds an answer within the mask
    "chatml": (CHATML, "<|im_end|>", "", "<|im_end|>"),
    "llama3": (LLAMA3, "<|eot_id|>", "", "<|eot_id|>"),
    "gemma": (GEMMA, "</s>", "", "<end_of_turn>"),  # the tokenizer's eos is not the end of a turn
    "mistral": (MISTRAL, "</s>", " ", "</s>"),
    "deepseek": (DEEPSEEK, "<|end_of_sentence|>", "", "<|end_of_sentence|>"),
    "marked": (MARKED, "<|im_end|>", "", "<|im_end|>"),
}


@pytest.mark.parametrize("name", PLAIN)
def test_turns_from_after_the_generation_prompt_to_the_end_of_turn_token(tokenizer_for, name):
    template, eos, head, end = PLAIN[name]
    tokenizer = tokenizer_for(template, eos)
    encoded = encode_conversation(tokenizer, TWO_TURNS)
    assert encoded.ids.dtype == torch.int32
    assert encoded.mask.dtype == torch.uint8
    assert runs(tokenizer, encoded) == [f"{head}I am fine.{end}", f"{head}Well then.{end}"]
    assert encoded.ids.tolist() == render(tokenizer, TWO_TURNS)


@pytest.mark.parametrize("name", ["chatml", "llama3", "mistral", "deepseek", "marked"])
def test_a_system_message_is_never_supervised(tokenizer_for, name):
    template, eos, head, end = PLAIN[name]
    tokenizer = tokenizer_for(template, eos)
    encoded = encode_conversation(tokenizer, chat("hello", "I am", system="I am"))
    assert runs(tokenizer, encoded) == [f"{head}I am{end}"]


# Texts that a search would trip over: headers, ends, tags, white space, the same text again, tracer look-alikes.
PIECES = [
    "hello", "I am", " ", "\n", "\n\n", "é", "日本", "👩‍🔬", "<|im_start|>assistant\n", "assistant\n", "[INST]", "<b>",
    "<think>", "### Response:\n", "model\n", "{", "}", '"', "\\", "&amp;", "Zq000Kv000000b", "{{ x }}", "7",
]  # fmt: skip
TEXTS = st.lists(st.sampled_from(PIECES), min_size=1, max_size=6).map("".join) | st.text(min_size=1, max_size=12)
VISIBLE = TEXTS.map(lambda t: t if t.strip() else t + "x")


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    texts=st.lists(VISIBLE, min_size=2, max_size=6).filter(lambda t: len(t) % 2 == 0),
    name=st.sampled_from(sorted(PLAIN)),
)
def test_any_text_is_masked_by_where_it_is(tokenizer_for, texts, name):
    """The expected spans come from building the rendering by hand, piece by piece, outside of the code under test."""
    template, eos, head, end = PLAIN[name]
    if any("</think>" in t for t in texts) and name == "deepseek":
        return
    tokenizer = tokenizer_for(template, eos)
    trim = name in ("llama3", "gemma", "mistral")
    text, spans = tokenizer.apply_chat_template(chat(texts[0]), tokenize=False, add_generation_prompt=True), []
    if name == "marked":
        text += "<|im_start|>assistant\n"
    for i in range(1, len(texts), 2):
        if name == "deepseek":
            text = text.removesuffix("<think>\n")
        answer = head + (texts[i].strip() if trim else texts[i]) + end
        spans.append((len(text), len(text) + len(answer)))
        text += answer
        if i + 1 < len(texts):
            text = tokenizer.apply_chat_template(chat(*texts[: i + 2]), tokenize=False, add_generation_prompt=True)
            if name == "marked":
                text += "<|im_start|>assistant\n"
    full = tokenizer.apply_chat_template(chat(*texts), tokenize=False)
    tokens = tokenizer(full, add_special_tokens=False, return_offsets_mapping=True)
    expected = [int(any(a <= s < b for a, b in spans)) for s, _ in tokens["offset_mapping"]]
    encoded = encode_conversation(tokenizer, chat(*texts))
    assert encoded.ids.tolist() == tokens["input_ids"]
    assert encoded.mask.tolist() == expected


def test_old_thoughts_are_dropped_and_the_last_one_is_supervised(tokenizer_for):
    tokenizer = tokenizer_for(QWEN3)
    messages = chat("a?", "<think>\nhm one\n</think>\n\nI am", "b?", "<think>\nhm two\n</think>\n\nI am")
    encoded = encode_conversation(tokenizer, messages)
    assert runs(tokenizer, encoded) == ["I am<|im_end|>", "<think>\nhm two\n</think>\n\nI am<|im_end|>"]
    messages = chat("a?", "I am", "b?", "Well")
    assert runs(tokenizer, encode_conversation(tokenizer, messages))[-1] == "<think>\n\n</think>\n\nWell<|im_end|>"
    encoded = encode_conversation(tokenizer, messages, enable_thinking=False)  # now the prompt holds the empty thought
    assert runs(tokenizer, encoded) == ["I am<|im_end|>", "Well<|im_end|>"]


@pytest.mark.parametrize("arguments", [{"city": "Ghent", "n": 2}, json.dumps({"city": "Ghent"})])
@pytest.mark.parametrize("role", ["tool", "user"])
def test_tool_calls_are_supervised_and_their_results_are_not(tokenizer_for, arguments, role):
    tokenizer = tokenizer_for(QWEN3)
    call = {"type": "function", "function": {"name": "weather", "arguments": arguments}}
    result = "sun" if role == "tool" else "<tool_response>\nsun\n</tool_response>"
    messages = [
        {"role": "user", "content": "weather?"},
        {"role": "assistant", "content": "", "reasoning_content": "need it", "tool_calls": [call]},
        {"role": role, "content": result},
        {"role": "assistant", "content": "sun", "reasoning_content": "so"},
        {"role": "user", "content": "thanks"},
        {"role": "assistant", "content": None, "tool_calls": [call, call]},
    ]
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]
    for messages_ in (messages, messages[:4], messages[:2]):
        encoded = encode_conversation(tokenizer, messages_, tools=tools)
        found = runs(tokenizer, encoded)
        assert len(found) == sum(m["role"] == "assistant" for m in messages_)
        assert all(f.endswith("<|im_end|>") and "<|im_start|>" not in f for f in found)
        assert found[0].count("</tool_call><|im_end|>") == 1
        assert "need it" in found[0] or len(messages_) == 6  # that template forgets it once a new question is asked
        if len(messages_) > 2:
            assert found[1].endswith("sun<|im_end|>")
        if len(messages_) == 6:
            assert found[2].count("<tool_call>") == 2
        text = tokenizer.decode(encoded.ids[encoded.mask == 0])
        assert "tool_response" in text or len(messages_) == 2


def test_parts_as_content(tokenizer_for):
    template = CHATML.replace(
        "m.content", "(m.content if m.content is string else m.content | map(attribute='text') | join)"
    )
    tokenizer = tokenizer_for(template)
    parts = [{"type": "text", "text": "hello"}, {"type": "text", "text": " there"}]
    messages = [{"role": "user", "content": parts}, {"role": "assistant", "content": parts}]
    assert runs(tokenizer, encode_conversation(tokenizer, messages)) == ["hello there<|im_end|>"]


def test_a_role_may_end_the_turn_and_a_template_may_have_no_end(tokenizer_for):
    tokenizer = tokenizer_for(GLM, "<pad>")
    ids = [tokenizer.convert_tokens_to_ids("<|user|>")]
    encoded = encode_conversation(tokenizer, TWO_TURNS, eos_ids=ids)
    assert runs(tokenizer, encoded) == ["I am fine.<|user|>", "Well then."]
    tokenizer = tokenizer_for(ALPACA, "</s>")
    assert [r.strip() for r in runs(tokenizer, encode_conversation(tokenizer, TWO_TURNS))] == [
        "I am fine.",
        "Well then.",
    ]


def test_markers_that_stop_early_or_late_still_end_with_the_end_of_turn(tokenizer_for):
    early = MARKED.replace("+ '<|im_end|>' }}{% endgeneration %}{{ '\n'", "}}{% endgeneration %}{{ '<|im_end|>\n'")
    late = MARKED.replace("{% endgeneration %}{{ '\n' }}", "{{ '\n' }}{% endgeneration %}")
    assert early != MARKED != late
    for template in (early, late):
        tokenizer = tokenizer_for(template)
        assert runs(tokenizer, encode_conversation(tokenizer, TWO_TURNS)) == [
            "I am fine.<|im_end|>",
            "Well then.<|im_end|>",
        ]


def test_a_role_may_end_a_tool_call(tokenizer_for):
    template = (
        "{% for m in messages %}{{ '<|' + ('observation' if m.role == 'tool' else m.role) + '|>\n' }}{{ m.content }}"
        "{% for c in m.tool_calls or [] %}{{ '\n<tool_call>' + c.function.arguments | tojson + '</tool_call>' }}"
        "{% endfor %}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
    )
    tokenizer = tokenizer_for(template, "<pad>")
    calls = [{"function": {"name": "f", "arguments": {"city": "Ghent", "n": 2}}}]
    messages = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "so", "tool_calls": calls},
        {"role": "tool", "content": "sun"},
        {"role": "assistant", "content": "sun"},
    ]
    found = runs(tokenizer, encode_conversation(tokenizer, messages))
    assert found == ['so\n<tool_call>{"city": "Ghent", "n": 2}</tool_call><|observation|>', "sun"]


def test_a_generation_prompt_that_no_turn_begins_with(tokenizer_for):
    """Spaced differently from the turns: the header is what all answers share, the space before a word is its own."""
    template = (
        "{% for m in messages %}{% if m.role == 'user' %}{{ 'USER: ' + m.content + '\n' }}"
        "{% else %}{{ 'ASSISTANT: ' + m.content + '</s>\n' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '  ASSISTANT:' }}{% endif %}"
    )
    tokenizer = tokenizer_for(template, "</s>")
    assert runs(tokenizer, encode_conversation(tokenizer, TWO_TURNS)) == [" I am fine.</s>", " Well then.</s>"]


def test_an_assistant_may_speak_first_or_twice(tokenizer_for):
    tokenizer = tokenizer_for(CHATML)
    messages = [
        {"role": r, "content": c}
        for r, c in [("assistant", "hi"), ("user", "hi"), ("assistant", "hi"), ("assistant", "you")]
    ]
    assert runs(tokenizer, encode_conversation(tokenizer, messages)) == [
        "hi<|im_end|>",
        "hi<|im_end|>",
        "you<|im_end|>",
    ]


def test_a_token_that_straddles_the_header_is_not_the_assistants(tokenizer_for):
    """`assistant:` and an answer that begins with `:`, tokenised as one, is not what the target would generate."""
    vocab = {c: i for i, c in enumerate(":abQ\n")} | {"::": 5, "<e>": 6}
    bpe = Tokenizer(models.BPE(vocab=vocab, merges=[(":", ":")]))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<e>")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ ('Q:' if m.role == 'user' else 'a:') + m.content + '<e>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'a:' }}{% endif %}"
    )
    encoded = encode_conversation(tokenizer, chat("b", ":b"))
    assert tokenizer.convert_ids_to_tokens(encoded.ids.tolist()) == ["Q", ":", "b", "<e>", "a", "::", "b", "<e>"]
    assert encoded.mask.tolist() == [0, 0, 0, 0, 0, 0, 1, 1]


@pytest.mark.parametrize(
    ("messages", "reason", "says"),
    [
        (chat("hello"), "no_assistant_turn", "roles here: user"),
        (chat("hello", "  "), "empty_turn", "message 1"),
        ([], "malformed", "non-empty list"),
        ("hello", "malformed", "non-empty list"),
        ([{"content": "x"}], "malformed", "message 0"),
        ([{"role": "user"}], "malformed", "neither"),
        (chat("hello", "I am", system="be good"), "template_rejects", "System role not supported"),
    ],
)
def test_what_cannot_be_trained_on_says_why(tokenizer_for, messages, reason, says):
    with pytest.raises(Unusable, match=says) as caught:
        encode_conversation(tokenizer_for(GEMMA), messages)
    assert caught.value.reason == reason


def test_length_and_empty_masks_are_refused(tokenizer_for):
    tokenizer = tokenizer_for(CHATML)
    with pytest.raises(Unusable, match="--max-length") as caught:
        encode_conversation(tokenizer, TWO_TURNS, max_length=10)
    assert caught.value.reason == "too_long"
    with pytest.raises(Unusable) as caught:  # the template swallows the assistant
        encode_conversation(
            tokenizer_for("{% for m in messages %}{{ m.content if m.role == 'user' }}{% endfor %}"), TWO_TURNS
        )
    assert caught.value.reason == "mask_all_zero"
    with pytest.raises(Unusable) as caught:
        encode_conversation(
            tokenizer_for("{% for m in messages %}{{ m.content if m.role == 'assistant' }}{% endfor %}"), TWO_TURNS
        )
    assert caught.value.reason == "mask_all_one"


def test_recorded_ids_are_used_as_they_are():
    encoded = encode_recorded([5, 6, 7], [8, 9])
    assert encoded.ids.tolist() == [5, 6, 7, 8, 9]
    assert encoded.mask.tolist() == [0, 0, 0, 1, 1]
    for prompt, response, reason in (([1], [], "mask_all_zero"), ([], [1], "mask_all_one")):
        with pytest.raises(Unusable) as caught:
            encode_recorded(prompt, response)
        assert caught.value.reason == reason


def test_a_template_that_mangles_text_is_refused_not_guessed(tokenizer_for):
    template = "{% for m in messages %}{{ m.role + m.content | length | string + (m.content | reverse) }}{% endfor %}"
    with pytest.raises(Unusable, match="generation") as caught:
        encode_conversation(tokenizer_for(template), TWO_TURNS)
    assert caught.value.reason == "turn_not_found"


def test_recorded_conversations_of_several_turns_supervise_every_turn():
    encoded = encode_recorded([5, 6, 7, 8, 9], [1, 2], supervised=[[2, 4], [5, 7]])
    assert encoded.mask.tolist() == [0, 0, 1, 1, 0, 1, 1]
    for bad in ([[2, 9]], [[3, 3]], [[-1, 2]]):
        with pytest.raises(Unusable, match="range"):
            encode_recorded([5, 6, 7, 8, 9], [1, 2], supervised=bad)
