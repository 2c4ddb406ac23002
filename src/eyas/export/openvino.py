"""OpenVINO's converted draft: which layers are tapped stands in the model itself, and its default is one layer off.

    mend(Path("ov-draft"), taps=(2, 15, 27))

GenAI reads `hidden_layers_list` from the `rt_info` of openvino_model.xml: numbers of layers whose *outputs* are taken,
by spaces. Where it is absent it takes 2, n//2 and n-3 in that counting, which are everybody else's taps plus one
(docs/facts/README.md).   pytest tests/test_export_openvino.py
"""

from __future__ import annotations

import re
from pathlib import Path

from ..errors import BadInput
from ..writes import atomic_write

MODEL = "openvino_model.xml"
LIST = re.compile(r"[ \t]*<hidden_layers_list\b[^>]*/>[ \t]*\n?")
MODE = re.compile(r"([ \t]*)<eagle3_mode\b[^>]*/>")


def layer_list(taps: tuple[int, ...]) -> str:
    """Taps as OpenVINO counts them: "1 14 26". Raises BadInput for tap 0 and for other than three."""
    if len(taps) != 3 or taps[0] < 1:
        raise BadInput(
            f"taps {list(taps)}: OpenVINO GenAI takes exactly three, none of them the embedding output; export for "
            "another engine (--for), or train with three"
        )
    return " ".join(str(tap - 1) for tap in taps)


def mend(folder: Path, taps: tuple[int, ...]) -> bool:
    """Write the taps into the converted model in `folder`; False where they were there already.

    Raises BadInput where there is no converted EAGLE-3 draft.
    """
    path, wanted = folder / MODEL, layer_list(taps)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"{path} cannot be read ({error}); convert the draft first") from error
    mode = MODE.search(text)
    if mode is None:
        raise BadInput(
            f"{path} says no eagle3_mode: OpenVINO's converter did not take it for an EAGLE-3 draft. Export it with "
            f"--to openvino, and convert that with --trust-remote-code"
        )
    line = f'{mode[1]}<hidden_layers_list value="{wanted}" />\n'
    bare = LIST.sub("", text)
    at = MODE.search(bare)
    assert at is not None
    mended = bare[: at.end()] + "\n" + line.rstrip("\n") + bare[at.end() :]
    if mended == text:
        return False
    atomic_write(path, mended)
    return True
