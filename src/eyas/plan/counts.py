"""What is counted from sizes alone: parameters of a draft, bytes of features, operations of extraction and training.

Symbols: H hidden size of the target, V its vocabulary, n its blocks; T taps, D draft vocabulary, I width of the draft's
MLP, q and kv width of its queries and of its keys, N its layers; s share of tokens that are supervised, K unrolled
steps, L tokens of a document.   Exercise it:  pytest tests/test_plan.py
"""

from __future__ import annotations

from ..draft.shape import DraftShape
from ..features.layout import ROW_DTYPES
from ..train.settings import TrainSettings
from .formula import Line, Section, line, total
from .target import PlannedTarget


def sizes(shape: DraftShape) -> dict[str, float]:
    """The draft's symbols."""
    return {
        "H": shape.hidden_size, "T": shape.num_taps, "D": shape.draft_vocab_size, "I": shape.intermediate_size,
        "q": shape.num_heads * shape.head_dim, "kv": shape.num_kv_heads * shape.head_dim, "N": shape.num_layers,
    }  # fmt: skip


def pick(values: dict[str, float], names: str) -> dict[str, float]:
    """The values of space-separated names."""
    return {name: values[name] for name in names.split()}


def draft_parameters(shape: DraftShape, settings: TrainSettings) -> Section:
    """Parameters of a draft by part (draft/model.py). Its embedding is the target's and is not counted."""
    z = sizes(shape)
    normed = settings.norm_before_fc or settings.fc_norm  # one norm over the taps, or one for each: as many weights
    lines = [
        line("fc", "", "T*H*H", **pick(z, "T H")),
        line("q, k, v of the first layer", "", "2*H*(q + 2*kv)", **pick(z, "H q kv")),
        line("output of attention", "", "q*H", **pick(z, "q H")),
        line("MLP", "", "3*H*I", **pick(z, "H I")),
    ]
    if shape.num_layers > 1:
        lines.append(line("further layers", "", "(N - 1)*(H*(2*q + 2*kv) + 3*H*I)", **pick(z, "N H q kv I")))
    lines.append(line("norms", "", "(2*N + 2 + norm_T*T)*H", **pick(z, "N T H"), norm_T=int(normed)))
    lines.append(line("head", "", "D*H", **pick(z, "D H")))
    return Section("Parameters of the draft", (*lines, total("parameters", "", lines)))


def feature_bytes(hidden_size: int, taps: int, tokens: int) -> Section:
    """Bytes of features on disk (features/layout.py)."""
    size = {name: dtype.itemsize for name, dtype in ROW_DTYPES.items()}
    small = size["ids"] + size["mask"] + size["top1"] + size["logsumexp"]
    states = line("states of one token", "B", "b_taps*T*H + b_final*H", b_taps=size["taps"], b_final=size["final"],
                  T=taps, H=hidden_size)  # fmt: skip
    token = line("one token", "B", "states + small", states=states.result, small=small)
    return Section(
        "Features on disk", (states, token, line("features", "B", "tokens*token", tokens=tokens, token=token.result))
    )


def extraction_flops(target: PlannedTarget, length: float, supervised: float, tokens: int) -> Section:
    """Operations of one pass of the target over all tokens, and of its head on supervised rows.

    A product with a matrix of P weights takes 2 P operations a row; a token attends to L/2 earlier ones on average.
    """
    facts = target.facts
    lines = [
        line("blocks, a token", "FLOP", "2*active", active=target.active),
        line("attention, a token", "FLOP", "2*n*heads*(d_key + d_value)*L/2", n=facts.num_layers, heads=facts.num_heads,
             d_key=target.key_width, d_value=target.value_width, L=length),
        line("head, a token", "FLOP", "2*s*H*V", s=supervised, H=facts.hidden_size, V=facts.vocab_size),
    ]  # fmt: skip
    token = total("one token", "FLOP", lines)
    all_ = line("extraction", "FLOP", "tokens*token", tokens=tokens, token=token.result)
    return Section("Operations of extraction", (*lines, token, all_))


def training_flops(
    shape: DraftShape, settings: TrainSettings, length: float, supervised: float, tokens: int, steps: int
) -> Section:
    """Operations of training: forward and twice as many backward, and the optimizer's own.

    fc, keys, values and the token's share run on every token once, the rest on supervised rows at each of K steps
    (draft/unroll.py); the teacher is made once for each position (train/head_loss.py).
    """
    z = {**sizes(shape), "s": supervised, "K": settings.ttt_steps, "L": length}
    head = 3 if settings.train_head else 2
    lines = [
        line("once a token", "FLOP", "3*2*(T*H*H + H*(q + 4*kv))", **pick(z, "T H q kv")),
        line("K steps of the layer", "FLOP", "3*2*s*K*(N*(H*(q + 2*kv) + q*H + 3*H*I) + (N - 1)*H*q)",
             **pick(z, "s K N H q kv I")),
        line("attention", "FLOP", "7*2*s*K*N*q*L/2", **pick(z, "s K N q L")),
        line("head at K steps", "FLOP", "2*f*s*K*H*D", f=head, **pick(z, "s K H D")),
        line("teacher", "FLOP", "2*f*s*H*D", f=head, **pick(z, "s H D")),
    ]  # fmt: skip
    token = total("one token", "FLOP", lines)
    seen = settings.epochs * tokens if settings.steps is None else steps * settings.batch_tokens
    out = [*lines, token, line("all tokens seen", "FLOP", "seen*token", seen=seen, token=token.result)]
    if settings.optimizer == "muon":
        out.append(line("Muon, a step", "FLOP", "orthogonalise", orthogonalise=sum(map(muon_flops, matrices(shape)))))
    else:
        out.append(line("AdamW, a step", "FLOP", "12*trained", trained=trained(shape, settings)))
    out.append(line("all steps of the optimizer", "FLOP", "steps*one", steps=steps, one=out[-1].result))
    begin = line("linear start", "FLOP", "begin", begin=start_flops(shape, settings, tokens * supervised))
    tokens_seen = out[len(lines) + 1].result
    out += [begin, line("training", "FLOP", "seen + optimizer + start", seen=tokens_seen, optimizer=out[-1].result,
                        start=begin.result)]  # fmt: skip
    return Section("Operations of training", tuple(out))


def matrices(shape: DraftShape) -> list[tuple[int, int]]:
    """Sizes of the matrices inside the draft, which Muon updates; not the head."""
    h, i = shape.hidden_size, shape.intermediate_size
    q, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    out = [(h, shape.num_taps * shape.target_hidden_size)]
    for layer in range(shape.num_layers):
        wide = h if layer else 2 * h
        out += [(q, wide), (kv, wide), (kv, wide), (h, q), (i, h), (i, h), (h, i)]
    return out


def muon_flops(matrix: tuple[int, int]) -> float:
    """Five Newton-Schulz steps on one matrix as train/muon.py makes them in float32: on the gram matrix where wide."""
    from ..train.muon import WIDE

    m, n = sorted(matrix)
    if n > WIDE * m:
        return 4 * m * m * n + 34 * m**3  # gram and last product; 17 products of [m, m]
    return 5 * (4 * m * m * n + 2 * m**3)


def start_flops(shape: DraftShape, settings: TrainSettings, supervised_tokens: float) -> float:
    """Of the regression that a new draft begins with (train/linear.py); 0 without it. float64 counts twice."""
    if settings.start != "regression" or settings.init_from:
        return 0.0
    from ..train.ridge import keeps_rows

    h = shape.target_hidden_size
    u, rows = (shape.num_taps + 1) * h, min(settings.start_rows, supervised_tokens)
    side, other = (rows, u) if keeps_rows(u, round(rows)) else (u, rows)
    decomposed = 60 * h**3 if shape.num_kv_heads * shape.head_dim < h else 0  # eigenvalues of two squares [H, H]
    return other * side**2 + 2 * rows * u * h + 2 * (side**3 / 3 + 2 * side**2 * h) + decomposed


def trained(shape: DraftShape, settings: TrainSettings) -> float:
    """Parameters that are trained."""
    section = draft_parameters(shape, settings)
    return section["parameters"].result - (0 if settings.train_head else section["head"].result)


def lines_of(sections: list[Section]) -> dict[str, Line]:
    """{section title / line name: line}."""
    return {f"{section.title} / {each.name}": each for section in sections for each in section.lines}
