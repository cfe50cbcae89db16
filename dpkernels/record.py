"""How a model's run becomes a PerSample: one forward, one backward, no ordinary weight gradient.

Parameters are swapped for `Tracked` stand-ins during forward *and* backward (checkpointed segments recompute there).
Every torch function the model calls passes through `_Recorder`: it follows which tensors hold samples, and hands ops
that touch a parameter to the rules. See `dpkernels.tape`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from dpkernels.assemble import assemble
from dpkernels.each import Each
from dpkernels.lines import propagate, writes
from dpkernels.members import Members, members_of
from dpkernels.nested import flat_tensors, map_tensors
from dpkernels.per_sample import PerSample
from dpkernels.rules import RULES
from dpkernels.rules.broadcast import expanded
from dpkernels.rules.derived import each_of_derived
from dpkernels.rules.fallback import fallback
from dpkernels.rules.norm import refuse_mixing
from dpkernels.rules.pooling import QUICK
from dpkernels.rules.registry import apart
from dpkernels.swapping import Held, gradients_aside, running
from dpkernels.tape import LOST, Plan, RecordingError, Tape, Tracked
from dpkernels.taps import no_autocast

LossFunction = Callable[[Any, Any], Tensor]
Result = TypeVar("Result")
_HOLDING = (Tensor, list, tuple)  # what may hold tensors


class _Recorder(TorchFunctionMode):
    """Sees every torch function while a model runs."""

    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self.tape = tape
        tape.mode = self

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tape, kwargs = self.tape, kwargs or {}
        if func.__name__ == "__get__":  # most of what a model asks for is a shape or a type
            plain = func(_value(args[0]), *args[1:])
            if not isinstance(plain, Tensor):
                return plain
        if Tracked in types and func not in tape.replaced:
            return tape.run(func, args, kwargs)
        if func is torch.autograd.backward and tape.in_backward:  # of a reentrant checkpoint
            with self:
                return backward(*args, **kwargs)
        if func in tape.replaced:
            result = tape.replaced[func](*args, **kwargs)
        else:
            refuse_mixing(func, args, kwargs)
            if not tape.replaced:
                _refuse_overwriting(tape, func, args, kwargs)
            result = QUICK.get(func, func)(*args, **kwargs)
        if result is None or isinstance(result, _HOLDING):
            propagate(tape, func, args, kwargs, result)
        return result


def backward(tensors: Any, grad_tensors: Any = None, *_: Any, **__: Any) -> None:
    """torch.autograd.backward, which as a torch function would switch the recorder off while it runs."""
    roots = (tensors,) if isinstance(tensors, Tensor) else tuple(tensors)
    grads = (grad_tensors,) if isinstance(grad_tensors, Tensor) else grad_tensors or (None,) * len(roots)
    seeds = tuple(torch.ones_like(t) if g is None else g for t, g in zip(roots, grads, strict=True))
    engine = torch.autograd.Variable._execution_engine
    engine.run_backward(roots, seeds, False, False, (), allow_unreachable=True, accumulate_grad=True)


def _run(tape: Tape, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """An op with a parameter among its arguments."""
    tensors = flat_tensors((args, kwargs) if kwargs else args)
    name = getattr(func, "__name__", "")
    operands = []
    for t in tensors:
        if not isinstance(t, Tracked):
            if tape.holds_samples(t):
                operands.append(t)
        elif t._tape is not tape:
            raise RecordingError(
                f"parameter {t._label}: a tensor made of it was kept from an earlier call; make it anew in each forward"
            )
    _refuse_writing(name, args, kwargs)
    refuse_mixing(func, args, kwargs)
    if operands and tape.walking:
        _refuse_whole(name, tensors)
    if not torch.is_grad_enabled() and not apart(*tensors):
        result = func(*map_tensors(_detached, args), **map_tensors(_detached, kwargs))
    elif not operands:
        copies = expanded(tape, func, args, kwargs)
        return _derive(tape, func, name, tensors, args, kwargs) if copies is None else copies
    else:
        tape.op = name
        rule = RULES.get(func)
        result = fallback(tape, func, args, kwargs) if rule is None else rule(tape, *args, **kwargs)
    propagate(tape, func, args, kwargs, result, operands)
    return result


def _derive(tape: Tape, func: Any, name: str, tensors: list[Tensor], args: Any, kwargs: Any) -> Any:
    """An op on parameters and constants alone: its results are derived parameters."""
    parents = [t for t in tensors if isinstance(t, Tracked)]
    if func in (Tensor.contiguous, Tensor.clone, torch.clone):
        return parents[0]  # nobody may write into it, so it needs no copy
    own = apart(*parents)
    if name in _READING and own:
        raise RecordingError(
            f"parameter {parents[0]._label}: {name} reads its value, which differs between samples that take steps of "
            "their own. Choose by inputs or activations instead"
        )
    values = {id(t._value): t for t in parents}
    leaves = tuple(dict.fromkeys(leaf for t in parents for leaf in t._leaves))
    # Hooks of a checkpoint must not take what this op saves: its backward runs after the model's.
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        result = func(*map_tensors(_value, args), **map_tensors(_value, kwargs))
        each = each_of_derived(func, name, args, kwargs, result) if own else {}

    def wrap(t: Tensor) -> Tensor:
        if id(t) in values:
            return values[id(t)]
        if not t.requires_grad and id(t) not in each:
            tape.mark(t, False)
            return t
        derived = Tracked(t, tape, f"{name}({', '.join(leaves)})", leaves)
        derived._each = each.get(id(t))
        if func is F.embedding and isinstance(args[1], Tracked) and not isinstance(args[0], Tracked):
            names = ("padding_idx", "max_norm", "norm_type", "scale_grad_by_freq")
            options = dict(zip(names, args[2:6], strict=False)) | kwargs
            if options.get("padding_idx") is None and not options.get("max_norm") and not options.get(names[3]):
                derived._lookup = (args[1], args[0])
        return derived

    return map_tensors(wrap, result) if isinstance(result, _HOLDING) else result


def _refuse_whole(name: str, tensors: list[Tensor]) -> None:
    """Parameters are made into whole numbers only where they are another one for each sample."""
    for t in tensors:
        if isinstance(t, Tracked) and not t._value.is_floating_point():
            raise RecordingError(
                f"parameter {t._label}: is made into whole numbers or truth values, which differ between samples that "
                f"take steps of their own, and meets samples in {name}. Choose by inputs or activations instead"
            )


def _refuse_writing(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    if writes(name) and name != "__setitem__" and args and isinstance(args[0], Tracked):
        raise RecordingError(
            f"parameter {args[0]._label}: is written in place by {name} during forward; make a new tensor"
        )
    if name == "__setitem__" or kwargs.get("out") is not None:
        label = next(t._label for t in flat_tensors((args, kwargs)) if isinstance(t, Tracked))
        raise RecordingError(
            f"parameter {label}: is written by index ({name}); build the tensor with torch.cat, stack or where instead"
        )


def _refuse_overwriting(tape: Tape, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Writing into the memory of a parameter or buffer would release what samples leave there, without noise."""
    name = getattr(func, "__name__", "")
    if not writes(name) and "out" not in kwargs:
        return
    for t in flat_tensors([kwargs.get("out"), *args[:1]]):
        if t.layout is torch.strided and t.untyped_storage().data_ptr() in tape.guarded:
            raise RecordingError(_changed(tape.guarded[t.untyped_storage().data_ptr()]))


def _changed(name: str) -> str:
    return (
        f"{name}: changes during forward; what it learns from samples would be released without noise. Use layers "
        "without running statistics, or put them in eval mode"
    )


def _detached(t: Tensor) -> Tensor:
    return t._value.detach() if isinstance(t, Tracked) else t


def _value(t: Tensor) -> Tensor:
    return t._value if isinstance(t, Tracked) else t


_READING = {"item", "tolist", "numpy", "equal", "allclose", "is_nonzero", "__contains__", "__array__"}
_READING |= {"__float__", "__int__", "__bool__", "__index__", "__complex__"}


def call(model: Callable[..., Any], inputs: Any) -> Any:
    """The model on a tensor, a tuple (as arguments) or a dict (as keywords; under numbers, as arguments)."""
    if isinstance(inputs, Mapping):
        named = {key: value for key, value in inputs.items() if not isinstance(key, int)}
        return model(*(value for key, value in inputs.items() if isinstance(key, int)), **named)
    return model(*inputs) if isinstance(inputs, list | tuple) else model(inputs)


class Recording:
    """A forward and a backward of a model, recorded: whoever calls it runs both, in one go or one after the other.

    Linear layers may form and keep rows of up to `room` bytes. With `each` samples walk: parameters have a value of
    their own for each sample (none yet if it is empty), and rows are for adding to it at once. Others are for the
    self-check: stand-ins for parameters, buffers and random ops.
    """

    def __init__(
        self,
        members: Members,
        batch: int,
        *,
        plan: Plan | None = None,
        values: Mapping[str, Tensor] = {},
        buffers: Mapping[int, Tensor] | None = None,
        replaced: Mapping[Any, Callable[..., Any]] | None = None,
        room: Callable[[], int] | int = 0,
        each: Mapping[str, Each] | None = None,
    ) -> None:
        self.members, self.parameters = members, members.trainable
        self.tape = tape = Tape(batch, _run, plan, room)
        tape.replaced = replaced or {}
        tape.walking = each is not None
        self._each = each or {}
        self._recorder = _Recorder(tape)
        self._leaves = {n: values.get(n, p).detach().requires_grad_() for n, p in self.parameters.items()}
        swaps: dict[int, Tensor] = {id(b): b for b in members.buffers.values()} | dict(buffers or {})
        fixed = [*swaps.values(), *(p for p in members.parameters.values() if not p.requires_grad)]
        tape.constants.update(id(t) for t in fixed if not t.requires_grad)
        self._versions = {id(t): t._version for t in (*self._leaves.values(), *swaps.values())}
        for name, p in self.parameters.items():
            swaps[id(p)] = stand_in = Tracked(self._leaves[name], tape, name, (name,), is_param=True)
            stand_in._each = self._each.get(name)
        for name, t in (*self._leaves.items(), *members.parameters.items(), *members.buffers.items()):
            if t.numel():
                tape.guarded[t.untyped_storage().data_ptr()] = name
        for name, own in self._each.items():
            if own.memory is not None:
                tape.guarded[own.memory] = name
        tape.owned = set(tape.guarded)
        self._swaps = swaps
        self._held: list[Held] = []

    def take_in(self, inputs: Any) -> Any:
        """What the model is given, whose dim 0 is the sample: followed from here on."""
        with torch.inference_mode(False):
            inputs = map_tensors(lambda t: t.clone() if t.is_inference() else t, inputs)
        for t in flat_tensors(inputs):
            self.tape.mark(t, t.dim() > 0)
            self.tape.owned.add(t.untyped_storage().data_ptr())
        return inputs

    def run(self, part: Callable[[], Result]) -> Result:
        """A part of the recording: with parameters swapped, and watched."""
        with (
            gradients_aside(self.members.parameters.values()),  # frozen ones too: forward may unfreeze them
            running(self.members, self._swaps, undone=bool(self.tape.replaced)) as self._held,
        ):
            self.tape.away = False
            with self._recorder:
                result = part()
            self.tape.away = True
            refuse_bypass(self.members.parameters)
            return result

    def refuse_changes(self) -> None:
        """Refuse a forward that changed parameters or buffers."""
        with torch._C.DisableTorchFunction():  # versions are no business of the recorder
            _refuse_changed(self._held, self._swaps, self._versions)

    def backward(self, outputs: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        """Within `run`: the terms of all rows."""
        self.tape.in_backward = True
        with no_autocast():  # gradients have the types that forward chose
            backward(tuple(outputs), tuple(gradients))

    def rows(self, inspect: Callable[[Tape], None] | None = None) -> PerSample:
        """What was recorded."""
        _refuse_leaks(self.tape)
        if inspect is not None:
            inspect(self.tape)
        with no_autocast():
            return assemble(self.tape, self._leaves, self._each)

    def closing(self) -> contextlib.closing[Tape]:
        """Lets go of all tensors in the end."""
        return contextlib.closing(self.tape)


def record(
    model: nn.Module,
    loss_fn: LossFunction,
    inputs: Any,
    targets: Any,
    batch: int,
    *,
    plan: Plan | None = None,
    weights: Tensor | None = None,
    values: Mapping[str, Tensor] = {},
    buffers: Mapping[int, Tensor] | None = None,
    replaced: Mapping[Any, Callable[..., Any]] | None = None,
    inspect: Callable[[Tape], None] | None = None,
    room: Callable[[], int] | int = 0,
    members: Members | None = None,
    each: Mapping[str, Each] | None = None,
) -> PerSample:
    """Run forward and backward once; the rows are gradients of weights_i * loss_i (weights are 1 unless given).

    Other arguments are those of `Recording`; `inspect` is for a look at the tape.
    """
    recording = Recording(
        members_of(model) if members is None else members,
        batch,
        plan=plan,
        values=values,
        buffers=buffers,
        replaced=replaced,
        room=room,
        each=each,
    )
    inputs, targets = recording.take_in((inputs, targets))

    def differentiate() -> None:
        losses = loss_fn(call(model, inputs), targets)
        recording.refuse_changes()
        check_losses(losses, batch)
        if recording.tape.mark_of(losses) is LOST or recording.tape.lines_of(losses) is not None:
            raise RecordingError("loss_fn: its losses are not in the order of the samples; put them back in order")
        if losses.requires_grad:
            recording.backward((losses,), (torch.ones_like(losses) if weights is None else weights.to(losses),))

    with recording.closing():
        recording.run(differentiate)
        return recording.rows(inspect)


def check_losses(losses: Any, batch: int) -> None:
    """One loss for each sample, or an error."""
    if isinstance(losses, Tracked):
        raise RecordingError(
            "loss_fn: its losses do not come from the inputs by torch ops (but through NumPy?), so that samples could "
            "not be followed. Use torch ops on the inputs"
        )
    if not isinstance(losses, Tensor):
        raise RecordingError(
            f"loss_fn: returned a {type(losses).__name__}, must return a tensor with one loss per sample"
        )
    if losses.shape != (batch,):
        cure = "use reduction='none'" if losses.dim() == 0 else "reduce each sample's losses to one"
        raise RecordingError(
            f"loss_fn: returned shape {tuple(losses.shape)}, must be one loss per sample, ({batch},); {cure}"
        )


def _refuse_changed(held: list[Held], swaps: Mapping[int, Tensor], versions: Mapping[int, int]) -> None:
    for where, name, tensor in held:
        now = where.get(name)
        value = now._value if isinstance(now, Tracked) else now
        if now is not swaps[id(tensor)] or value is None or value._version != versions[id(value)]:
            raise RecordingError(_changed(name))


def refuse_bypass(parameters: Mapping[str, nn.Parameter]) -> None:
    """Refuse a gradient on the parameters themselves, for which others stood in."""
    for name, p in parameters.items():
        if p.grad is not None:
            raise RecordingError(
                f"parameter {name}: got a gradient that bypasses recording: the model (or loss_fn) uses it otherwise "
                "than as an attribute of its module. Use it through the module"
            )


def _refuse_leaks(tape: Tape) -> None:
    with torch._C.DisableTorchFunctionSubclass():
        leaked = [t._label for t in tape.tracked if t.grad is not None]
    if leaked:
        raise RecordingError(
            f"parameter {leaked[0]}: got a gradient that bypasses recording, from a custom autograd.Function or C++ "
            "code. Write that part with ordinary torch ops"
        )
