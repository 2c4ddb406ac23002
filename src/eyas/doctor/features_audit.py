"""Are recorded features what the target says? A few documents are asked again, and compared tap by tap.

    audit(material, "path/to/target", "path/to/features")        eyas doctor DRAFT --features DIR --target T

Accept length is blind to a tap one off, cosine to a scale; so a state is compared by its distance, relative to its
norm, with the states of every layer at the same token and at its neighbours.
    pytest tests/test_doctor_features_audit.py
"""

from __future__ import annotations

from pathlib import Path

import torch

from ..features.layout import NOT_READ
from ..features.likeness import relative
from .finding import Finding, Severity
from .material import Material

DOCUMENTS = 3
LONGEST = 512  # tokens of a document that are asked for again
SAME = 0.15
"""Relative distance up to which states are the same: bf16 and other batches make 0.01, the next layer 0.3 and more."""
ALIKE = 0.99  # cosine from which they differ in scale alone
CHOSEN = 0.9  # share of equal choices: bf16 decides some near-ties otherwise


def audit(
    material: Material, target: str | Path, name: str, device: str = "cpu", trust_remote_code: bool = False
) -> list[Finding]:
    """Findings about the states at each tap and about the choices, errors where a draft could not learn from them.

    name: of the features, for the texts. Raises EyasError where the target cannot be loaded.
    """
    from ..machine import choose_precision
    from ..target.model import Target

    dtype = getattr(torch, choose_precision("auto", device))
    model = Target.load(target, device=device, dtype=dtype, trust_remote_code=trust_remote_code)
    layers = model.facts.num_layers
    states: list[torch.Tensor] = []  # [n+1, rows, H] of each document
    finals, spans = [], []
    for d in torch.linspace(0, material.documents - 1, DOCUMENTS).round().long().unique().tolist():
        start, end = int(material.offsets[d]), min(int(material.offsets[d + 1]), int(material.offsets[d]) + LONGEST)
        if end - start < 4:
            continue
        taps, final = model.states(material.ids[None, start:end], taps=range(layers + 1))
        states.append(taps[0].unflatten(-1, (layers + 1, -1)).transpose(0, 1).float().cpu())
        finals.append(final[0])
        spans.append((start, end))
    if not spans:
        return []
    found = [f for tap in material.states if (f := _tap(tap, material, states, spans, name)) is not None]
    said = _choices(material, torch.cat([model.head(f).argmax(-1).cpu() for f in finals]), spans, name)
    found += [said] if said else []
    if found:
        return found
    what = f"{sum(b - a for a, b in spans)} tokens of {len(spans)} documents"
    return [Finding("EY-FEATURES-SAME", Severity.OK, f"{name}: the states and choices of {what} are the target's own",
                    "What was recorded is what a server would feed")]  # fmt: skip


def _tap(
    tap: int, material: Material, states: list[torch.Tensor], spans: list[tuple[int, int]], name: str
) -> Finding | None:
    """What is wrong with the states recorded as those of one tap."""
    recorded = [material.states[tap][a:b].float() for a, b in spans]
    if recorded[0].shape[-1] != states[0].shape[-1]:
        return Finding("EY-FEATURES-OTHER", Severity.ERROR,
                       f"{name}: states are {recorded[0].shape[-1]} wide, the target's {states[0].shape[-1]}",
                       "They are of another target", "Extract the features again", convention="taps")  # fmt: skip
    distance = {s: torch.stack([_distances(r, x, s) for r, x in zip(recorded, states, strict=True)]).mean(0)
                for s in (0, -1, 1)}  # fmt: skip
    if float(distance[0][tap]) <= SAME:
        return None
    shift = min(distance, key=lambda s: float(distance[s].min()))
    layer = int(distance[shift].argmin())
    far = f"{float(distance[0][tap]):.0%} of their norm away from the target's there"
    if float(distance[shift][layer]) > SAME:
        r, x = torch.cat([r[1:-1] for r in recorded]), torch.cat([x[tap, 1:-1] for x in states])
        cosine = float(torch.cosine_similarity(r, x, dim=-1).median())
        ratio = float((r.norm(dim=-1) / x.norm(dim=-1)).median())
        why = f"they point the same way and are {ratio:.3g} times as large" if cosine > ALIKE else "no layer's are near"
        return Finding(
            "EY-FEATURES-OTHER", Severity.ERROR, f"{name}: the states recorded for tap {tap} are {far}: {why}",
            "Another target, another template, quantised weights, or a norm or scale in between: a draft trained on "
            "them reads other states than a server feeds it",
            "Extract the features again with the target that is served", convention="taps",
        )  # fmt: skip
    if shift:
        word = "before" if shift < 0 else "after"
        other = f" of tap {layer}" if layer != tap else ""
        return Finding(
            "EY-FEATURES-SHIFT", Severity.ERROR,
            f"{name}: the states recorded for tap {tap} are those{other} of the token {word} (they are {far})",
            "A draft trained on them reads the state of another token than a server feeds it",
            "Extract the features again", convention="state_shift",
        )  # fmt: skip
    return Finding(
        "EY-FEATURES-TAPS", Severity.ERROR,
        f"{name}: the states recorded for tap {tap} are those of tap {layer} (they are {far})",
        "A draft trained on them was trained for other layers than its config will say",
        "Extract the features again, or write the layers that they are of", convention="taps",
    )  # fmt: skip


def _distances(recorded: torch.Tensor, states: torch.Tensor, shift: int) -> torch.Tensor:
    """Median relative distance of recorded rows [L, H] to the states [n+1, L, H] `shift` tokens on. [n+1]

    The first rows hold a huge number of their own, the last one may never have been computed.
    """
    rows = torch.arange(2, len(recorded) - 2)
    return relative(recorded[rows], states[:, rows + shift]).median(-1).values


def _choices(material: Material, computed: torch.Tensor, spans: list[tuple[int, int]], name: str) -> Finding | None:
    """Are the recorded choices the target's, after the token that they are recorded with?"""
    rows = torch.cat([torch.arange(a, b) for a, b in spans])
    place = torch.full((len(material.ids),), NOT_READ)
    place[rows] = computed
    asked = rows[material.choice[rows] != NOT_READ]
    asked = asked[(asked > 0) & (asked < len(place) - 1)]
    if len(asked) < 16:
        return None
    share = {s: float((material.choice[asked] == place[asked + s]).float().mean()) for s in (0, -1, 1)}
    if share[0] >= CHOSEN:
        return None
    shift = max(share, key=lambda s: share[s])
    if share[shift] >= CHOSEN - 0.1:
        word = "before" if shift < 0 else "after"
        return Finding(
            "EY-FEATURES-LABELS", Severity.ERROR,
            f"{name}: what is recorded as the target's choice after a token is its choice after the token {word} "
            f"({share[shift]:.0%} of {len(asked)}, in its own place {share[0]:.0%})",
            "A draft learns to predict another token than the next one", "Extract the features again",
            convention="label_shift",
        )  # fmt: skip
    return Finding(
        "EY-FEATURES-CHOICES", Severity.ERROR,
        f"{name}: the target, asked again, makes {share[0]:.0%} of {len(asked)} recorded choices",
        "The labels are another model's, or were made with other settings", "Extract the features again",
        convention="label_shift",
    )  # fmt: skip
