"""What a user is told when something is wrong: what, where, what to do; and never a traceback.

pytest -q tests/test_messages.py
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from drafts import make_draft
from eyas.cli import main
from eyas.draft.checkpoint import save_draft
from eyas.features.extract import extract
from eyas.target import source
from eyas.target.facts import read_facts
from raised import messages
from training import conversations, material, run

# ---------------------------------------------------------------- every message of the source

VERBS_OF_REMEDY = (
    "add ask begin cast check choose compare convert copy correct count cut declare diagnose download draft drop end "
    "examine export extract fetch fill free give import install keep leave let load look lower make measure mend merge "
    "move name pass put quote raise read rebuild regenerate remove rename repair repeat replace report restore run "
    "save say see send serve set shorten show sort start subtract supply take train try unset update use wait write"
)
ADVISES = re.compile(
    rf"(?:^|[;:.?,(] |\bor |\band )(?:`eyas [a-z]|(?:{'|'.join(VERBS_OF_REMEDY.split())})\b)", re.IGNORECASE
)
# What names the right thing instead of a deed: "expected a list", "the target has 8 layers", "--log takes a file".
NAMES = re.compile(
    r"\bexpected\b|\b(?:must|needs?|takes?)\b|\bgoes? (?:with|on)\b|\bknown are\b|--force|nothing was (?:done|changed)|"
    r"pip install|apt-get|\bits page\b",
    re.IGNORECASE,
)
# A value that brings the remedy along: a constant of the module, or the words of an error that is told in turn.
BRINGS = re.compile(
    r"REMEDY|EXPECTED|KEEPS|\b(?:remedy|full|hint|error|why|problem|lines|reasons|refused|command|said)\b|"
    r"^(?:explained|refusal|_by_options|self\._not_finite)\("
)


def test_there_are_messages_to_judge():
    assert len(messages()) > 600


@pytest.mark.parametrize("kind", ["EyasError", "BadInput", "Mismatch", "UsageError", "NotExpressible"])
def test_every_message_says_what_to_do(kind: str):
    silent = [
        (m.place, m.text)
        for m in messages()
        if m.kind == kind
        and not (ADVISES.search(m.text) or NAMES.search(m.text) or any(BRINGS.search(v) for v in m.values))
    ]
    assert silent == []


def test_every_message_names_something_that_was_found():
    """A value, an option, a file or a tensor; what has none of these says only that something is wrong."""
    told = {"EyasError", "BadInput", "Mismatch", "UsageError", "NotExpressible"}
    bare = [
        m.text
        for m in messages()
        if m.kind in told and not m.values and not re.search(r"--\w|`|[A-Z]{3}|\w_\w", m.text)
    ]
    # Of these there is nothing to name: what is missing, or was said twice.
    assert sorted(text.split(";")[0].split(":")[0] for text in bare) == [
        "a prompt without tokens cannot be decoded",
        "d2t holds absolute target ids, not offsets",
        "decoding with this draft is not lossless",
        "give a new directory or change the draft in place, not both",
        "give a plan or a finding, not both",
        "set-rope",
        "the file ended while it was copied",
        "the file ended while it was copied",
        "the target's chat template puts nothing before a user's message, so it cannot ask by itself",
        "there is no prompt to answer",
        "this draft has no embedding table yet",
        "workers answer with the target itself and record no states",
    ]


# ---------------------------------------------------------------- wrong uses, through the command line


@pytest.fixture(scope="module")
def place(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Whatever can be mixed up: two targets, features and maps of both, a run, a draft, files of the wrong kind."""
    root = tmp_path_factory.mktemp("place")
    m = material(tiny_target, tmp_path_factory)
    from conftest import build_tiny_target

    shutil.copytree(tiny_target, root / "target")
    build_tiny_target(root / "bigger", vocab=320, seed=2)
    build_tiny_target(root / "tuned", seed=5)
    shutil.copytree(m.features.dir, root / "features")
    shutil.copytree(m.held_out.dir, root / "heldout")
    m.vocab_map.save(root / "vocab/vocab.safetensors")
    run(m, root / "run", steps=1, held_out=None)
    talk = {
        "messages": [{"role": "user", "content": "hawk?"}, {"role": "assistant", "content": "it sits on the glove"}]
    }
    extract(root / "bigger", [{"id": f"t{i}", **talk} for i in range(4)], root / "of-bigger", progress=False)
    rows = [json.dumps(row) for row in conversations(4, 7)]
    (root / "talks.jsonl").write_text("\n".join(rows))
    (root / "torn.jsonl").write_text("\n".join([*rows, '{"messages": [']))
    (root / "empty.jsonl").write_text("")
    (root / "binary").write_bytes(bytes(range(256)) * 9)
    (root / "prompts.jsonl").write_text('{"prompt": "what is a hawk?"}\n')
    (root / "nothing").mkdir()
    draft, vocab_map = make_draft(3)
    prints = {"target": source.fingerprint(root / "target"), "tokenizer": source.tokenizer_fingerprint(root / "target")}
    save_draft(draft, vocab_map, root / "draft", facts=read_facts(root / "target"), fingerprints=prints)
    return root


Call = Callable[[str], tuple[int, str]]


@pytest.fixture
def call(place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    """Run a command line in `place`: exit code and what it said on standard error, in one line."""
    monkeypatch.chdir(place)

    def called(line: str) -> tuple[int, str]:
        with pytest.raises(SystemExit) as left:
            main(shlex.split(line))
        return int(left.value.code or 0), " ".join(capsys.readouterr().err.split())

    return called


TRAIN = "train features --vocab vocab --target target --out r"
WRONG = [
    # paths
    ("extract talks.jsonl --target ./nowhere --out o", 2, "no folder or file './nowhere'; a target is a model folder"),
    ("extract talks.jsonl --target talks.jsonl --out o", 2, "talks.jsonl is a file; a target is a model folder"),
    ("extract talks.jsonl --target nothing --out o", 2, "nothing has no config.json.*name a folder that has one"),
    ("extract target --target target --out o", 2, "target/config.json, line 1: not JSON.*expected a JSON object"),
    ("extract talks.jsonl --target target --out talks.jsonl", 2, "--out talks.jsonl is a file; choose a folder"),
    ("extract talks.jsonl --target target --out talks.jsonl/o", 2, "--out talks.jsonl/o: talks.jsonl is a file"),
    ("extract talks.jsonl --target target --out run", 2, "--out run is what `eyas train` wrote; choose another"),
    ("vocab features --size 9 --out run", 2, "--out run is what `eyas train` wrote; choose another"),
    ("regenerate prompts.jsonl --target target --out talks.jsonl", 2, "--out talks.jsonl is a file; choose a folder"),
    ("regenerate prompts.jsonl --target target --out features", 2, "--out features is what `eyas extract` wrote"),
    ("ask --target target --count 1 --out features", 2, "--out features is what `eyas extract` wrote"),
    ("prove draft --target target --prompts prompts.jsonl --out features", 2, "is what `eyas extract` wrote"),
    ("vocab nothing --size 9 --out o", 2, "nothing: no features lie there; run `eyas extract"),
    (f"{TRAIN} --config nowhere.yaml", 2, r"--config nowhere.yaml cannot be read \(No such file.*name a YAML file"),
    (f"{TRAIN} --config binary", 2, "--config binary is not valid YAML"),
    ("inspect run", 2, "run holds no weights.*a draft lies in run/draft: give that"),
    ("inspect nothing", 2, "nothing holds no weights.*give the directory of a draft"),
    ("doctor talks.jsonl --static", 2, "talks.jsonl cannot be read.*nothing that torch.save wrote.*Convert"),
    ("repair draft --plan nowhere.json --out o", 2, r"nowhere.json cannot be read \(No such file.*check the path"),
    ("canary --target target --out o --check torn.jsonl", 2, "torn.jsonl cannot be read as JSON.*`rounds`"),
    ("history nothing/there", 2, "no directory nothing/there; name that of a draft"),
    # contents
    ("extract empty.jsonl --target target --out o", 2, "empty.jsonl: no conversation.*it is empty.*one conversation a"),
    ("extract torn.jsonl --target target --out o", 2, "torn.jsonl, line 5 .*not JSON.*--skip-bad"),
    ("vocab torn.jsonl --size 99 --target target --out o", 2, "torn.jsonl, line 5 .*not JSON.*--skip-bad"),
    ("prove draft --target target --prompts empty.jsonl", 2, r"empty.jsonl: no prompt can be used \(it is empty\)"),
    ("repair draft --finding EY-D2T-ZERO --out o", 2, "No operation mends EY-D2T-ZERO: did you mean EY-D2T-ZEROS"),
    # pairs
    ("vocab features --size 99 --target bigger --out o", 3, "features: these features were made with tokenizer .*use"),
    ("vocab vocab --size 99 --target bigger --out o", 3, "vocab .*300 ids.*bigger has 320; name the target"),
    ("vocab features --size 99 --held-out of-bigger --out o", 3, "of-bigger: these features were made with target"),
    ("train of-bigger --vocab vocab --target target --out r", 3, "of-bigger: these features were made with target"),
    ("train features --vocab vocab --target tuned --out r", 3, "features: these features.*use the target they were"),
    ("export run o --target tuned", 3, "run/draft was trained for target.*name the target that it was trained for"),
    ("prove draft --target bigger --prompts prompts.jsonl", 3, "vocab_size 300, but bigger has 320; name the draft"),
    ("serve draft --target tuned --engine vllm --print", 3, "draft was trained for target.*--target.*--force"),
    # settings and devices
    (f"{TRAIN} --set stepz=3", 2, r"no setting 'stepz' \(did you mean 'steps'\?\).*--show-settings"),
    (f"{TRAIN} --set lr=[1", 2, r"--set 'lr=\[1': '\[1' is no YAML value; quote"),
    (f"{TRAIN} --set lr=fast", 2, "lr = 'fast': input should be a valid number"),
    (f"{TRAIN} --device gpu", 2, "device 'gpu' cannot be used here: expected cpu, cuda"),
    ("extract talks.jsonl --target target --device gpu --out o", 2, "device 'gpu' cannot be used here: expected cpu"),
    ("prove draft --target target --prompts prompts.jsonl --device gpu", 2, "device 'gpu' cannot be used here"),
    ("plan --size hidden_size=[1 --tokens 9", 2, r"--size hidden_size=\[1: '\[1' is no YAML value"),
]  # fmt: skip


@pytest.mark.parametrize(("line", "code", "said"), WRONG, ids=[line for line, _, _ in WRONG])
def test_a_wrong_use_is_named_with_what_to_do(call: Call, place: Path, line: str, code: int, said: str):
    before = files(place)
    found, told = call(line)
    assert (found, bool(re.search(said, told))) == (code, True), told
    assert files(place) == before, "something was written"


def files(place: Path) -> dict[Path, int]:
    """Every file but the locks of runs, and when it was written."""
    return {p: p.stat().st_mtime_ns for p in place.rglob("*") if p.is_file() and p.name != ".lock"}


def test_a_missing_accelerator_is_named_before_anything_is_loaded(call: Call):
    if torch.cuda.is_available():
        wrong, said = "cuda:99", "device 'cuda:99' cannot be used here"
    else:
        wrong, said = "cuda", "device 'cuda' cannot be used here: .*; give --device cpu"
    for line in (
        "extract talks.jsonl --target target --out o",
        "regenerate prompts.jsonl --target target --out o2",
        TRAIN,
    ):
        code, told = call(f"{line} --device {wrong}")
        assert (code, bool(re.search(said, told))) == (2, True), told


def test_a_draft_of_another_target_is_proven_with_a_word(call: Call):
    """A fine-tuned target with its base's draft is a fair question; that it is one must be said."""
    small = "--prompts prompts.jsonl --max-new-tokens 4"
    code, told = call(f"prove draft --target tuned {small}")
    assert code == 0
    assert re.search("note: draft was trained for target [0-9a-f]{16}, tuned is [0-9a-f]{16}", told)
    assert "note" not in call(f"prove draft --target target {small}")[1]


def test_counting_conversations_says_what_was_set_aside(call: Call, place: Path, capsys, monkeypatch):
    monkeypatch.chdir(place)
    with pytest.raises(SystemExit) as left:
        main(shlex.split("vocab torn.jsonl --size 99 --target target --out counted --skip-bad"))
    assert left.value.code == 0
    assert "set aside: 1 malformed" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(shlex.split("vocab torn.jsonl --size 99 --target target --out counted --skip-bad --json"))
    told = json.loads(capsys.readouterr().out)
    assert (told["set_aside"], told["skipped"]) == ({"malformed": 1}, True)
    shutil.rmtree(place / "counted")
