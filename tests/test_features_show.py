"""What --show prints is exactly the mask, and never moves the cursor."""

import torch

from eyas.chat import Encoded
from eyas.features.conversations import Document
from eyas.features.show import FAINT, OFF, ON, legend, mask_runs, show_document


class Letters:
    """A tokenizer whose ids are code points."""

    def decode(self, ids, skip_special_tokens):
        assert not skip_special_tokens
        return "".join(map(chr, ids))


def document(text, mask):
    ids = torch.tensor([ord(c) for c in text], dtype=torch.int32)
    return Document("d", Encoded(ids, torch.tensor([int(m) for m in mask], dtype=torch.uint8)))


def test_runs_cover_every_token_once():
    runs = mask_runs(document("abcdef", "011001"))
    assert runs == [(0, 1, False), (1, 3, True), (3, 5, False), (5, 6, True)]


def test_without_colour_marks_stand_around_what_is_supervised():
    text = show_document(document("Q?\nA.\n\nrest", "00011100000"), Letters(), color=False)
    assert text == "d: 11 tokens, 3 supervised, 1 turn\nQ?↵\n⟦A.↵\n⟧↵\nrest"
    assert "⟦supervised⟧" in legend(False)
    assert "\x1b" not in legend(False)


def test_with_colour_every_line_is_closed_again():
    text = show_document(document("ab\ncd", "01111"), Letters(), color=True).split("\n", 1)[1]
    assert text == f"{FAINT}a{OFF}{ON}b↵{OFF}\n{ON}cd{OFF}"


def test_control_characters_are_shown_not_sent():
    assert "\\x1b[31m\\x07" in show_document(document("a\x1b[31m\x07", "0111111"), Letters(), color=False)
