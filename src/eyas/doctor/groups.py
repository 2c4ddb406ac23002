"""What each group of hypotheses means to a user: the finding's id, what happens when it is served so, what to do.

Also which static findings speak of the same thing, so that a fault seen in the files and one measured become one.
"""

from __future__ import annotations

from dataclasses import dataclass

EXPORT = "eyas export writes what was measured where each engine looks for it"
RETRAIN = "train again: no repair of the files can undo this"


@dataclass(frozen=True)
class Group:
    """One convention, or one kind of tensor."""

    id: str
    what: str
    consequence: str
    remedy: str
    statics: tuple[str, ...] = ()
    """Beginnings of the ids of static findings about the same, without "EY-"."""
    where: str = "checkpoint"


HEAD_ROWS = "the head's rows in the target"
"""Label of the map that a head itself tells (maps.of_head)."""
GROUPS = {
    "d2t": Group(
        "EY-MEASURED-D2T", "the vocabulary map", "Draft ids become other tokens than those that were trained, so "
        "next to nothing is accepted", "restore the map: eyas repair", ("D2T-", "T2D-", "VOCAB-UNNAMED"),
    ),
    "taps": Group(
        "EY-MEASURED-TAPS", "the layers whose states feed fc", "fc reads states that it was not trained on",
        "write the layers that fit: " + EXPORT, ("TAPS-",),
    ),
    "slice_order": Group(
        "EY-MEASURED-SLICES", "the order of the slices of fc", "fc reads each layer's state with another one's weights",
        "permute the columns of fc into ascending order", ("TAPS-",),
    ),
    "norm_before_residual": Group(
        "EY-MEASURED-RESIDUAL", "norm_before_residual", "the residual stream starts from another state than trained",
        "set the flag as measured for vLLM; SGLang knows false only: another engine, or a short fine-tune",
        ("NORM-RESIDUAL",),
    ),
    "norm_output": Group(
        "EY-MEASURED-FEEDBACK", "norm_output, the state that is fed back", "the first drafted token is good as ever, "
        "from the second on the draft reads a state that it does not know", "set the flag as measured",
        ("NORM-OUTPUT",),
    ),
    "norm_before_head": Group(
        "EY-MEASURED-HEAD-NORM", "the norm before the head", "engines norm before the head, this draft was trained "
        "otherwise", RETRAIN,
    ),
    "norm_before_fc": Group(
        "EY-MEASURED-FC-NORM", "the norm before fc", "fc reads states of another scale",
        "set norm_before_fc as measured",
        ("NORM-UNFLAGGED", "NORM-MISSING"),
    ),
    "fc_norm": Group(
        "EY-MEASURED-FC-NORMS", "the norms on the slices of fc", "fc reads states of another scale",
        "set fc_norm as measured", ("NORM-UNFLAGGED", "NORM-MISSING"),
    ),
    "hidden_act": Group(
        "EY-MEASURED-ACTIVATION", "the activation of the MLP", "SGLang and vLLM run silu only and stop at any other",
        "write the activation that fits", ("ACTIVATION",),
    ),
    "rms_norm_offset": Group(
        "EY-MEASURED-NORM-OFFSET", "how norm weights are stored", "every norm multiplies by another weight",
        "add or subtract one on the norm weights",
    ),
    "norm_names": Group(
        "EY-MEASURED-NORM-NAMES", "which norm is which", "two norms act in each other's place",
        "exchange the two names",
        ("NORM-ONES",),
    ),
    "layer_input": Group(
        "EY-MEASURED-HALVES", "the order of [embedding, state] in q, k and v", "attention reads the state where the "
        "embedding belongs", "exchange the two halves of the columns of q, k and v",
    ),
    "qkv": Group(
        "EY-MEASURED-QKV", "which projection is q, k or v", "attention computes with exchanged projections",
        "exchange the two names, or split the fused projection in the right order",
    ),
    "gate_up": Group(
        "EY-MEASURED-GATE-UP", "which projection is gate and which is up", "the MLP computes something else",
        "exchange the two names, or split the fused projection in the right order",
    ),
    "transposed": Group(
        "EY-MEASURED-TRANSPOSED", "the orientation of a matrix", "a square matrix is applied the other way round, any "
        "other stops the engine", "transpose it", ("TENSOR-SHAPE", "TAPS-WIDTH"),
    ),
    "rope_layout": Group(
        "EY-MEASURED-ROPE-LAYOUT", "the layout of rotary pairs in q and k", "positions rotate the wrong pairs",
        "permute the rows of q and k",
    ),
    "rope_theta": Group(
        "EY-MEASURED-ROPE", "rope_theta", "positions are read wrongly, the more the further apart",
        "write the base that fits", ("ROPE-",),
    ),
    "rope_type": Group(
        "EY-MEASURED-ROPE-KIND", "the scaling of RoPE", "positions are read wrongly in long texts",
        "write the scaling that fits", ("ROPE-",),
    ),
    "rope_step": Group(
        "EY-MEASURED-ROPE-STEP", "positions of later steps", "engines advance the position with each drafted token",
        RETRAIN, ("ROPE-STEP",),
    ),
    "sliding_window": Group(
        "EY-MEASURED-WINDOW", "the attention window", "attention reaches further or less far than in training",
        "write the window that fits",
    ),
    "embedding": Group(
        "EY-MEASURED-EMBEDDING", "where the embedding comes from", "vLLM and llama.cpp read the stored embedding, "
        "SGLang the target's", "drop the stored embedding, or replace it with the target's", ("EMBED-",),
    ),
    "embedding_scale": Group(
        "EY-MEASURED-EMBEDDING-SCALE", "the scale of the embedding", "the first norm sees rows of another size",
        "scale the stored embedding", (),
    ),
    "head": Group(
        "EY-MEASURED-HEAD", "where the head comes from", "another head chooses", "write the head into the file",
        ("HEAD-", "TIED-"),
    ),
    "state_shift": Group(
        "EY-MEASURED-STATES", "states and tokens against each other", "the states belong to another token than the one "
        "beside them", "extract the features again, or train with the shift that servers have", (), "data",
    ),
    "label_shift": Group(
        "EY-MEASURED-LABELS", "which token is predicted", "the draft predicts another token than the next one", RETRAIN,
        (), "training",
    ),
}  # fmt: skip


def group(name: str) -> Group:
    """The group; one for `name of TENSOR` and `tensor TENSOR`, which are made as they come."""
    if name in GROUPS:
        return GROUPS[name]
    if name.startswith("name of "):
        return Group(
            "EY-MEASURED-NAME", f"the {name}", "engines drop the tensor under the name that it has", "rename it",
            ("TENSOR-MISSING", "TENSOR-UNKNOWN", "HEAD-MISSING"),
        )  # fmt: skip
    return Group(
        "EY-MEASURED-TENSOR", name, "the tensor is not the one that was trained", "restore it from the reference",
        ("NORM-ONES", "TENSOR-"),
    )  # fmt: skip
