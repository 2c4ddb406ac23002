"""Operations on a draft, by name: what each does, when it may be done, and what undoes it.

    done = perform(Overlay.of("draft"), Step("absolute-to-offset")); done.after.change(); done.told; done.inverse

An operation looks at the bytes before it touches anything, and raises BadInput where its precondition does not hold.
Its arguments are JSON values, so that a repair can be written down, reviewed and replayed (plan.py).
    pytest tests/test_repair_operations.py
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

from ..draft.files import CONFIG, EYAS_JSON, TensorRef
from ..errors import BadInput
from . import ends, flags, fold, map_forms, maps, names, places, sizes, taps, tensors
from .overlay import Overlay, differing
from .step import Step


@dataclass(frozen=True)
class Operation:
    """`run(overlay, **arguments)` gives the overlay with its change, or raises BadInput saying why it must not be."""

    name: str
    run: Callable[..., Overlay]
    back: Callable[..., list[Step] | None] | None = None
    """(before, after, **arguments) -> the steps that bring the tensors back, bit for bit. None, or one that gives None:
    only the journal's undo does."""
    reads: tuple[str, ...] = ()
    """Canonical tensors that it looks at, beside those that it changes."""

    @property
    def what(self) -> str:
        """In one sentence."""
        return (self.run.__doc__ or "").strip().partition("\n")[0]


def _config_only(before: Overlay, after: Overlay, **_: Any) -> list[Step]:
    """No tensor changes; `inverse_of` puts the fields back."""
    return []


MAP = ("d2t", "t2d")
_ALL = (
    Operation("absolute-to-offset", maps.absolute_to_offset, maps.back("offset-to-absolute"), MAP),
    Operation("offset-to-absolute", maps.offset_to_absolute, maps.back("absolute-to-offset"), MAP),
    Operation("add-arange", maps.add_arange, maps.back("subtract-arange"), MAP),
    Operation("subtract-arange", maps.subtract_arange, maps.back("add-arange"), MAP),
    Operation("d2t-from-t2d", maps.d2t_from_t2d, tensors.dropped_again, MAP),
    Operation("t2d-from-d2t", maps.t2d_from_d2t, tensors.dropped_again, MAP),
    Operation("map-from-reference", map_forms.map_from_reference, tensors.dropped_again, MAP),
    Operation("map-from-head", ends.map_from_head, tensors.dropped_again, (*MAP, ends.HEAD)),
    Operation("set-map-form", map_forms.set_map_form, map_forms.form_back, MAP),
    Operation("map-dtype", maps.map_dtype, maps.dtype_back, MAP),
    Operation("drop-maps", maps.drop_maps, None, MAP),
    Operation("write-taps", taps.write_taps, taps.taps_back),
    Operation("permute-fc-slices", taps.permute_fc_slices, taps.order_back),
    Operation("set-flag", flags.set_flag, _config_only),
    Operation("declare", flags.declare, _config_only),
    Operation("set-rope", flags.set_rope, _config_only),
    Operation("set-positions", flags.set_positions, _config_only),
    Operation("write-fields", flags.write_fields, _config_only),
    Operation("name-draft-vocabulary", sizes.name_draft_vocabulary, _config_only),
    Operation("set-vocab-size", sizes.set_vocab_size, _config_only),
    Operation("sizes-from-tensors", sizes.sizes_from_tensors, _config_only),
    Operation("rename", names.rename, names.rename_back),
    Operation("rename-keys", names.rename_keys, names.keys_back),
    Operation("respell", names.respell, names.respell_back),
    Operation("split", names.split, names.split_back),
    Operation("fuse", names.fuse, names.fuse_back),
    Operation("swap", tensors.swap, tensors.itself("swap")),
    Operation("transpose", tensors.transpose, tensors.transpose_back),
    Operation("permute-rotary", tensors.permute_rotary, tensors.rotary_back),
    Operation("swap-halves", tensors.swap_halves, tensors.itself("swap-halves")),
    Operation("add-to-norms", tensors.add_to_norms, tensors.norms_back),
    Operation("norm-of-ones", tensors.norm_of_ones, tensors.dropped_again),
    Operation("without-norms", tensors.without_norms),
    Operation("tensor-from-reference", tensors.tensor_from_reference, tensors.dropped_again),
    Operation("cast", tensors.cast, tensors.cast_back),
    Operation("drop-tensors", tensors.drop_tensors),
    Operation("head-from-target", ends.head_from_target, tensors.dropped_again, (*MAP, ends.HEAD)),
    Operation("embedding-from-target", ends.embedding_from_target, tensors.dropped_again),
    Operation("drop-embedding", ends.drop_embedding),
    Operation("scale", ends.scale, ends.scale_back),
    Operation("fold", fold.fold, fold.fold_back),
)
OPERATIONS = {operation.name: operation for operation in _ALL}


@dataclass(frozen=True)
class Done:
    """A step that was performed; nothing has been written."""

    step: Step
    before: Overlay
    after: Overlay

    @property
    def told(self) -> tuple[str, ...]:
        """What it found, what it writes, what it reads back."""
        return self.after.told[len(self.before.told) :]

    @property
    def tensors(self) -> dict[str, TensorRef | None]:
        """By stored name, what became another tensor; None: taken out."""
        return differing(self.before.tensors, self.after.tensors)

    @cached_property
    def inverse(self) -> list[Step] | None:
        """The steps that undo it bit for bit; None where only the journal does."""
        return inverse_of(self.step, self.before, self.after)


def perform(overlay: Overlay, step: Step) -> Done:
    """Do one step on an overlay. Raises BadInput where the operation is unknown, its arguments are not what it takes,
    or its precondition does not hold."""
    operation = find(step.operation)
    arguments = _checked(operation, step)
    done = Done(step, overlay, operation.run(overlay, **arguments))
    after = done.after
    if not done.tensors and after.config == overlay.config and after.eyas == overlay.eyas:
        raise BadInput(f"{step}: {overlay.path} is so already, nothing would change; leave the step out")
    return done


def find(name: str) -> Operation:
    """The operation. Raises BadInput naming those that there are."""
    if name not in OPERATIONS:
        raise BadInput(f"there is no operation {name!r}; known are {', '.join(OPERATIONS)}")
    return OPERATIONS[name]


def inverse_of(step: Step, before: Overlay, after: Overlay) -> list[Step] | None:
    """The steps that make `before` of `after`, tensors bit for bit, configs field by field; None where there are none.

    Where a fused projection was taken apart on the way, it is put together again.
    """
    operation = find(step.operation)
    if operation.back is None:
        return None
    steps = operation.back(before, after, **step.arguments)
    if steps is None:
        return None
    cut = sorted(name for name in before.tensors if names.is_fused(name) and name not in after.tensors)
    if cut and step.operation not in ("split", "rename-keys", "respell", "rename"):
        steps = [*steps, Step("fuse", {"names": cut})]
    values, removed = {}, {}
    for file, old, new in ((CONFIG, before.config, after.config), (EYAS_JSON, before.eyas, after.eyas)):
        changed, gone = places.between(new or {}, old or {})
        if changed:
            values[file] = changed
        if gone:
            removed[file] = gone
    return [*steps, Step("write-fields", {"values": values, "removed": removed})] if values or removed else steps


def concerned(done: Done) -> list[str]:
    """Stored names, before the step, of the tensors that it looked at or changed."""
    looked = [held for n in find(done.step.operation).reads if (held := done.before.stored(n)) is not None]
    return sorted({*looked, *(name for name in done.tensors)})


def _checked(operation: Operation, step: Step) -> dict[str, Any]:
    """The arguments, each of the type that the operation names."""
    from pydantic import ValidationError

    try:
        inspect.signature(operation.run).bind(None, **step.arguments)
    except TypeError as error:
        raise BadInput(f"step {step.operation}: {error}; it takes {_takes(operation)}") from error
    out = {}
    for name, value in step.arguments.items():
        try:
            out[name] = _types(operation.name)[name].validate_python(value, strict=True)
        except ValidationError as error:
            what = error.errors()[0]["msg"]
            raise BadInput(
                f"step {step.operation}: {name} = {value!r:.80}: {what}; it takes {_takes(operation)}"
            ) from error
    return out


@cache
def _types(name: str) -> dict[str, Any]:
    from pydantic import TypeAdapter

    hints = typing.get_type_hints(OPERATIONS[name].run)
    return {key: TypeAdapter(hint) for key, hint in hints.items() if key not in ("overlay", "return")}


def _takes(operation: Operation) -> str:
    parameters = list(inspect.signature(operation.run).parameters.values())[1:]
    return ", ".join(f"{p.name}: {p.annotation}" for p in parameters) or "no arguments"
