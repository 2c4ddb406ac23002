"""A recipe says what it means, or is refused with file, field and value.   pytest -q tests/test_config.py"""

from pathlib import Path

import pytest

from eyas.config import RECIPES, RunConfig, load_config, validate
from eyas.errors import BadInput


def write(folder: Path, text: str) -> Path:
    path = folder / "recipe.yaml"
    path.write_text(text)
    return path


def test_an_empty_recipe_is_the_defaults(tmp_path: Path):
    assert load_config(write(tmp_path, "")) == RunConfig()


@pytest.mark.parametrize("name", RECIPES)
def test_the_shipped_recipes_are_valid_and_named(name: str):
    assert load_config(name).name == name


def test_overrides_reach_into_sections_and_are_typed(tmp_path: Path):
    path = write(tmp_path, "seed: 1\nregenerate: {temperature: 0.5}\n")
    config = load_config(
        path, ["extract.taps=[1, 2, 3]", "regenerate.temperature=1e-3", "seed=7", "prompts.limit=null", "vocab.size=64"]
    )
    assert config.extract.taps == [1, 2, 3]
    assert config.regenerate.temperature == 0.001
    assert config.seed == 7
    assert config.prompts.limit is None
    assert config.vocab.size == 64


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("regenrate: {}", "unknown field 'regenrate'.*did you mean 'regenerate'"),
        ("prove: {prompt: 3}", "unknown field 'prove.prompt'.*did you mean 'prompts'"),
        ("vocab: {size: many}", "'vocab.size' is 'many'"),
        ("vocab: {size: 0}", "'vocab.size' is 0: .*greater than or equal to 1"),
        ("vocab: {size: 0}\nprove: {prompts: -1}", "vocab.size.*prove.prompts"),
        ("- a\n- b", "expected sections.*list"),
        ("a: [", "line 1.*not valid YAML"),
        ("seed: 1\nseed: 2\n", "line 2.*'seed' is given twice"),
    ],
)
def test_what_is_wrong_is_named_with_the_file(tmp_path: Path, text: str, words: str):
    with pytest.raises(BadInput, match=rf"recipe\.yaml.*{words}"):
        load_config(write(tmp_path, text))


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("seed", "expected section.field=value"),
        (".seed=1", "expected section.field=value"),
        ("seed.x=1", "'seed' is a single value"),
        ("seed=[", "not a YAML value"),
        ("train_steps=3", "unknown field 'train_steps'"),
    ],
)
def test_a_wrong_override_is_named(tmp_path: Path, override: str, words: str):
    with pytest.raises(BadInput, match=words):
        load_config(write(tmp_path, "seed: 1\n"), [override])


def test_a_missing_file_names_the_shipped_recipes(tmp_path: Path):
    with pytest.raises(BadInput, match=r"nothing\.yaml cannot be read.*demo, quick, long"):
        load_config(tmp_path / "nothing.yaml")


@pytest.mark.parametrize(("has", "chosen"), [(True, "bfloat16"), (False, "float32")])
def test_auto_is_what_the_machine_computes_fastest_and_a_name_stays(monkeypatch, has: bool, chosen: str):
    """Decided before a run begins, since its results depend on it: `auto` itself must reach no stage."""
    monkeypatch.setattr("eyas.machine.native_bfloat16", lambda device: has)
    config = validate({"target": {"dtype": "auto"}, "train": {"dtype": "auto"}}).on_this_machine()
    assert (config.target.dtype, config.train.dtype) == (chosen, chosen)
    named = validate({"target": {"dtype": "float16"}, "train": {"dtype": "float32"}})
    assert named.on_this_machine() == named
