"""How far states are from others: the one measure by which recorded states are judged, here and in the doctor.

pytest tests/test_features_audit.py
"""

from __future__ import annotations

import torch


def relative(states: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Distance of each row from the wanted one, in parts of the wanted one's norm: [..., H] -> [...].

    A cosine is blind to a scale, an accept length to a tap that is one off; this sees both. inf where not finite.
    """
    far = (states.float() - wanted.float()).norm(dim=-1) / wanted.float().norm(dim=-1).clamp(min=1e-9)
    return far.nan_to_num(torch.inf)
