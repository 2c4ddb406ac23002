"""Expected tensors are those of the module, for every option.   pytest -q tests/test_expected.py"""

import itertools

import pytest

from drafts import make_draft
from eyas.draft.expected import expected_tensors

FLAGS = ("norm_before_fc", "fc_norm", "fc_bias", "attention_bias", "mlp_bias", "qk_norm")


# All of up to two flags, but for the two that exclude each other.
TOGETHER = [c for n in (0, 1, 2) for c in itertools.combinations(FLAGS, n) if c != ("norm_before_fc", "fc_norm")]


@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("on", TOGETHER)
def test_against_the_module(layers: int, on: tuple[str, ...]):
    draft, _ = make_draft(sizes={"num_layers": layers, "target_hidden_size": 48}, **dict.fromkeys(on, True))
    module = {name: tuple(tensor.shape) for name, tensor in draft.owned_state_dict().items()}
    assert expected_tensors(draft.shape, draft.conventions) == module
