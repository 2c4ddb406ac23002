"""Contents as text and as parts, for templates that read one, the other, or both.   pytest -q tests/test_contents.py"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from eyas.chat import encode_conversation, render
from eyas.contents import settle
from eyas.features.conversations import load_tokenizer
from eyas.tracers import Unusable

OPEN, CLOSE = "{{ '<|im_start|>' + m.role + '\n' }}", "{{ '<|im_end|>\n' }}"
PROMPT = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
LOOP = "{% for m in messages %}" + OPEN + "BODY" + CLOSE + "{% endfor %}" + PROMPT
TEXT = LOOP.replace("BODY", "{{ m.content }}")
PART = "{% if p.type == 'text' %}{{ p.text }}{% elif p.type == 'image' %}<image>{% endif %}"
EACH = "{% for p in m.content %}" + PART + "{% endfor %}"
PARTS = LOOP.replace("BODY", EACH)
BOTH = LOOP.replace("BODY", "{% if m.content is string %}{{ m.content }}{% else %}" + EACH + "{% endif %}")


@pytest.fixture
def tokenizer(tiny_target: Path) -> Any:
    return load_tokenizer(tiny_target)


def messages(as_parts: bool) -> list[dict[str, Any]]:
    told = [("user", ["Name a ", "colour."]), ("assistant", ["Blue."])]
    return [{"role": role, "content": [{"type": "text", "text": t} for t in texts] if as_parts else "".join(texts)}
            for role, texts in told]  # fmt: skip


@pytest.mark.parametrize("as_parts", [True, False])
@pytest.mark.parametrize(("template", "joined"), [(TEXT, "\n"), (PARTS, ""), (BOTH, "")])
def test_both_forms_render_under_every_kind_of_template(tokenizer: Any, template: str, joined: str, as_parts: bool):
    tokenizer.chat_template = template
    encoded = encode_conversation(tokenizer, messages(as_parts))
    between = joined if as_parts else ""
    text = tokenizer.decode(encoded.ids)
    assert text == (f"<|im_start|>user\nName a {between}colour.<|im_end|>\n<|im_start|>assistant\nBlue.<|im_end|>\n")
    assert tokenizer.decode(encoded.ids[encoded.mask.bool()]) == "Blue.<|im_end|>"
    assert render(tokenizer, messages(as_parts)) == encoded.ids.tolist()


def test_plain_text_for_a_plain_template_is_left_as_it_is(tokenizer: Any):
    tokenizer.chat_template = TEXT
    given = messages(False)
    assert settle(tokenizer, given) == given


def test_another_template_is_asked_again(tokenizer: Any):
    tokenizer.chat_template = TEXT
    assert settle(tokenizer, messages(True))[0]["content"] == "Name a \ncolour."
    tokenizer.chat_template = PARTS
    assert settle(tokenizer, messages(True))[0]["content"][0] == {"type": "text", "text": "Name a "}


@pytest.mark.parametrize(
    ("part", "reason", "words"),
    [
        ({"type": "image_url", "image_url": {"url": "x"}}, "not_text", "a part of type 'image_url'"),
        ({"type": "text"}, "malformed", "has no `text`"),
        (7, "malformed", "a content part is a int"),
    ],
)
def test_what_is_no_text_is_refused(tokenizer: Any, part: Any, reason: str, words: str):
    tokenizer.chat_template = BOTH
    with pytest.raises(Unusable, match=words) as caught:
        encode_conversation(tokenizer, [{"role": "user", "content": [part]}, {"role": "assistant", "content": "a"}])
    assert caught.value.reason == reason


@pytest.mark.parametrize("name", ["chat_template.jinja", "chat_template.json", "processor_config.json"])
def test_templates_beside_the_tokenizer_are_found(tiny_target: Path, tmp_path: Path, name: str):
    """Multimodal repositories keep it with the processor, in a file of its own."""
    folder = tmp_path / "target"
    shutil.copytree(tiny_target, folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    (folder / name).write_text(BOTH if name.endswith("jinja") else json.dumps({"chat_template": BOTH}))
    tokenizer = load_tokenizer(folder)
    assert tokenizer.decode(render(tokenizer, messages(True)[:1])) == "<|im_start|>user\nName a colour.<|im_end|>\n"
