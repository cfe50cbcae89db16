"""What a recording writes down: tracked parameters, which tensors hold samples and where, and the terms.

A `Tracked` stands for a parameter, or for something made of parameters and constants alone (a *derived* parameter: a
view, an exponential, merged low-rank weights), while a model runs. An op that brings one together with samples goes to
a rule (`dpkernels.rules`). A rule runs the op on plain tensors, so that autograd itself finds the input's gradient and
never an ordinary weight gradient, and puts a *tap* on the output: when the output's gradient arrives, the tap turns it
into terms of `dpkernels.factors`.

Which tensors hold samples is followed from the inputs through every op; constants (buffers, frozen parameters, what
the model makes itself) are so by descent, never by shape. Where in a tensor the sample is can only be read off its
shape; `dpkernels.self_check` proves that reading, and its result is the plan for later runs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from dpkernels import planner
from dpkernels.each import Each
from dpkernels.factors import Dense, Faults, Later, Outer, Rows, Term, at_least_float
from dpkernels.forming import outer_rows
from dpkernels.layouts import Layout
from dpkernels.nested import flat_tensors
from dpkernels.taps import RecordingError as RecordingError
from dpkernels.taps import Replaced, Tap, applied, is_whole_view

Plan = dict[str, set[str]]  # op and parameter: kinds of Layout
Mark = bool | Tensor | Literal["lost"]  # see dpkernels.lines
LOST: Literal["lost"] = "lost"
_DIM_0, _NOT_DIM_0 = Layout(0), frozenset(("dim 1", "none", "aligned"))


class Tracked(Tensor):
    """A parameter, or something derived from parameters, under recording."""

    _value: Tensor  # plain; its autograd graph leads to the plain leaves
    _tape: Tape
    _label: str
    _leaves: tuple[str, ...]
    _is_param: bool
    _lookup: tuple[Tracked, Tensor] | None  # where this is lines of another parameter, and which
    _each: Each | None  # what it is for each sample, where they differ

    @staticmethod
    def __new__(cls, value: Tensor, tape: Tape, label: str, leaves: tuple[str, ...], is_param: bool = False) -> Tracked:
        """Wrap `value`."""
        self: Tracked = Tensor._make_wrapper_subclass(
            cls,
            value.size(),
            strides=value.stride(),
            storage_offset=value.storage_offset(),
            dtype=value.dtype,
            layout=value.layout,
            device=value.device,
            requires_grad=value.is_floating_point(),
        )
        self._value, self._tape, self._label, self._leaves = value, tape, label, leaves
        self._is_param = is_param  # what isinstance(x, nn.Parameter) asks
        self._lookup = None
        self._each = None
        tape.tracked.append(self)
        return self

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Tracked({self._label}, {tuple(self._value.shape)})"

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for x in flat_tensors((args, kwargs)):
            if isinstance(x, Tracked):
                return x._tape.run(func, args, kwargs or {})
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        names = sorted({x._label for x in flat_tensors((args, kwargs)) if isinstance(x, Tracked)})
        raise RecordingError(
            f"parameter {', '.join(names)}: reached {func} without passing through a recorded op; a custom "
            "autograd.Function or C++ code uses it directly. Write that part with ordinary torch ops"
        )


class Tape:
    """One recording: of a forward and its backward, over `batch` samples."""

    def __init__(
        self, batch: int, run: Callable[..., Any], plan: Plan | None = None, room: Callable[[], int] | int = 0
    ) -> None:
        self.batch = batch
        self._room = room  # bytes that rows may take; found when first asked for
        self.choices: list[planner.Choice] = []
        self.plan = plan  # proven in an earlier run; None to go by shapes alone
        self.seen: Plan = {}
        self.in_backward = False
        self.away = False  # the model's forward is over, and its backward is not running
        self.walking = False  # rows are added to weights at once and dropped: none is formed or kept
        self.replaced: Mapping[Any, Callable[..., Any]] = {}  # stand-ins for random ops, while checking
        self.op = ""  # that runs, or whose tap writes
        self.ops: dict[int, set[str]] = {}  # by parameter
        self.tracked: list[Tracked] = []
        self.terms: dict[int, list[Term]] = {}
        self.aligned: dict[int, list[Tensor]] = {}  # gradients [B, ...] of derived parameters whose dim 0 is the sample
        self.constants: set[int] = set()  # ids of what does not hold samples
        self.owned: set[int] = set()  # memory that changes after the step: parameters, buffers, inputs
        self.guarded: dict[int, str] = {}  # memory of parameters and buffers, and their names
        self.anchor = torch.zeros((), requires_grad=True)
        self.mode: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        self._run = run
        self._token = object()  # marks outlive the recording on tensors that do; they must not count in another

    def close(self) -> None:
        """Let go of all tensors: tape, stand-ins and recorder hold one another."""
        self.tracked, self.terms, self.aligned = [], {}, {}
        self.mode = contextlib.nullcontext()

    def run(self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """An op that has a Tracked among its arguments."""
        return self._run(self, func, args, kwargs)

    def add(self, parameter: Tracked, term: Term) -> None:
        """A term of the parameter's rows."""
        own: Term
        if isinstance(term, Later):
            own = term
        elif isinstance(term, Dense):
            own = Dense(self.own(term.values), term.squares)
        elif isinstance(term, Outer):
            own = Outer(self.own(term.a), self.own(term.g), term.fixed, term.faults)
        else:
            own = Rows(self.own(term.ids), self.own(term.g))
        self.terms.setdefault(id(parameter), []).append(own)
        self.ops.setdefault(id(parameter), set()).add(self.op)

    def own(self, t: Tensor) -> Tensor:
        """Without the graph that activations carry, and not in memory that the next step overwrites."""
        t = t.detach()
        return t.clone() if not self.walking and t.untyped_storage().data_ptr() in self.owned else t

    def add_dense(self, parameter: Tracked, values: Tensor, squares: Tensor | None = None) -> None:
        """A term that is a tensor [B, *parameter shape], with its rows' norm^2 where they are known."""
        shape = parameter._value.shape
        height = shape[0] if shape else 1
        self.add(parameter, Dense(values.reshape(self.batch, height, shape[1:].numel()), squares))

    def add_outer(
        self, parameter: Tracked, a: Tensor, g: Tensor, fixed: bool = False, faults: Faults | None = None
    ) -> None:
        """The term sum_t g_t a_t^T, from a [B, T, width] and g [B, T, height]: as factors, or formed."""
        if self.walking:
            return self.add(parameter, Outer(a, g, fixed, faults))
        length, height, width = a.shape[1], g.shape[2], a.shape[2]
        itemsize = at_least_float(g[:0]).element_size()
        way = planner.choose(self.batch, length, height, width, self.room if length > 1 else 0, itemsize)
        self.note(parameter, way, length, height, width, itemsize)
        if way is not planner.Way.KEEP:
            self.add(parameter, Outer(a, g))
        elif parameter._value.dim() == 2 and parameter._value.stride(0) < parameter._value.stride(1):
            turned = outer_rows(g, a)  # in the order of the memory that this is a transpose of
            self.add(parameter, Dense(turned.values.transpose(1, 2), turned.squares))
        else:
            self.add(parameter, outer_rows(a, g))

    @property
    def room(self) -> int:
        """Bytes that rows may still take."""
        if not isinstance(self._room, int):
            self._room = self._room()
        return self._room

    def note(
        self, parameter: Tracked, way: planner.Way, length: int, height: int, width: int, itemsize: int = 4
    ) -> None:
        """What is done with the rows of one use of a parameter: for `explain`, and what it takes off the room."""
        chosen = planner.Choice(parameter._label, self.op, way, self.batch, length, height, width, itemsize)
        self.choices.append(chosen)
        if chosen.stored_bytes:
            self._room = self.room - chosen.stored_bytes

    def add_aligned(self, parameter: Tracked, gradient: Tensor) -> None:
        """The gradient of a derived parameter of which sample i uses line i alone."""
        self.aligned.setdefault(id(parameter), []).append(gradient.detach())
        self.ops.setdefault(id(parameter), set()).add(self.op)

    # Which tensors hold samples ---------------------------------------------------------------------------------

    def holds_samples(self, t: Any) -> bool:
        """Whether a tensor depends on samples."""
        if not isinstance(t, Tensor) or isinstance(t, Tracked):
            return False
        mark = self.mark_of(t)
        if mark is not None or id(t) in self.constants:
            return mark is not None and mark is not False
        # A tensor out of a custom autograd.Function or a reentrant checkpoint was not seen being made. If it has a
        # graph, that leads to a tap: parameters themselves enter no other op than as Tracked.
        return t.requires_grad or (t._base is not None and self.holds_samples(t._base))

    def mark(self, t: Any, samples: Mark) -> None:
        """Note about a tensor what `dpkernels.lines` found."""
        if isinstance(t, Tensor) and not isinstance(t, Tracked):
            if self.batch == 1 and samples is not False:
                samples = True  # of one sample no order is lost
            t._dpk_mark = (self._token, samples)  # type: ignore[attr-defined]

    def mark_of(self, t: Tensor) -> Mark | None:
        """What was noted about a tensor in this recording."""
        token, samples = getattr(t, "_dpk_mark", (None, None))
        if token is not self._token:
            return None
        return LOST if isinstance(samples, Tensor) and len(samples) != t.shape[:1].numel() else samples

    def lines_of(self, t: Tensor) -> Tensor | None:
        """For each line of dim 0, which sample it belongs to, where that is not simply its place."""
        mark = self.mark_of(t)
        return mark if isinstance(mark, Tensor) else None

    def layout(self, t: Tensor, lead: int, what: str, fixed: Sequence[int] = ()) -> Layout:
        """Where the samples are among the first `lead` dimensions of `t` that are not `fixed`, or an error.

        `what` names the op and its parameter, in errors and in the plan.
        """
        mark = self.mark_of(t)
        if mark is True and self.plan is not None and self._only_in_dim_0(t.shape, lead, fixed):
            kinds = self.plan.get(what)
            if kinds is None or not kinds <= _NOT_DIM_0:
                return _DIM_0  # nearly always
        if mark is LOST:
            raise RecordingError(
                f"{what}: an operand of shape {tuple(t.shape)} holds samples in an order that was lost, by indexing, "
                "sorting or moving dimensions. Put samples back in their places in dim 0 first"
            )
        candidates = self._candidates(t, lead, fixed)
        if not candidates:
            raise RecordingError(
                f"{what}: an operand has shape {tuple(t.shape)}, must have the {self.batch} samples in dim 0 (or in "
                "dim 1, or as consecutive lines of dim 0). Keep samples in dim 0, without mixing them"
            )
        chosen = self._choose(candidates, what)
        if chosen is None:
            raise RecordingError(
                f"{what}: an operand has shape {tuple(t.shape)}, where {self.batch} samples can be in more than one "
                "dimension, and the check of this model has not settled which. Use another batch size"
            )
        return chosen

    def _only_in_dim_0(self, shape: torch.Size, lead: int, fixed: Sequence[int]) -> bool:
        """Whether samples in their usual place can be nowhere else, by the shape."""
        batch = self.batch
        return lead > 0 and not fixed and shape[0] == batch and (lead == 1 or shape[1] != batch)

    def find_layout(self, t: Tensor, lead: int, what: str) -> Layout | Literal["lost"] | None:
        """The same; None where samples are in none of these dimensions, LOST where it is not settled in which."""
        if self.mark_of(t) is LOST:
            return LOST
        candidates = self._candidates(t, lead, ())
        return (self._choose(candidates, what) or LOST) if candidates else None

    def choose_copies(self, dims: list[int], what: str) -> int | None:
        """Which dimension, of those that grow to B, is the sample's; None for none of them.

        The check notes both: a size that happens to equal B there is none here.
        """
        kinds = None if self.plan is None or self.batch == 1 else self.plan.get(what, {"none"})
        if kinds is None:
            self.seen.setdefault(what, set()).add(Layout(dims[0]).kind if dims else "none")
            return dims[0] if dims else None
        chosen = [dim for dim in dims if Layout(dim).kind in kinds]
        if dims and (len(chosen) > 1 or (chosen and "none" in kinds)):
            raise RecordingError(
                f"{what}: makes {self.batch} copies, as many as there are samples, and is used in more than one way. "
                "Use another batch size"
            )
        return chosen[0] if chosen else None

    def _candidates(self, t: Tensor, lead: int, fixed: Sequence[int]) -> list[Layout]:
        lines = self.lines_of(t)
        free = [dim for dim in range(min(lead, 2)) if dim not in fixed]
        if lines is not None:
            return [Layout(lines=lines)] if 0 in free else []
        candidates = [Layout(dim) for dim in free if t.shape[dim] == self.batch]
        if 0 in free and t.shape[0] != self.batch and t.shape[0] % self.batch == 0:
            candidates.append(Layout(0, t.shape[0] // self.batch))
        return candidates

    def _choose(self, candidates: list[Layout], what: str) -> Layout | None:
        """The candidate that the plan has for this op; the first while there is no plan; None if it is not settled."""
        chosen = candidates[0]
        if self.plan is not None and self.batch > 1:
            kinds = self.plan.get(what)
            if kinds is not None:
                zero = not kinds <= _NOT_DIM_0
                candidates = [c for c in candidates if (zero if c.in_dim_0 else "dim 1" in kinds)]
            if len(candidates) != 1:
                return None
            chosen = candidates[0]
        self.seen.setdefault(what, set()).add(chosen.kind)
        return chosen

    def by_sample(self, t: Tensor, layout: Layout, event: int) -> Tensor:
        """`t` as [B, T, *its last `event` dimensions]."""
        return layout.by_sample(t, self.batch, event)

    # Taps -------------------------------------------------------------------------------------------------------

    def tap(
        self,
        outputs: tuple[Tensor, ...],
        saved: tuple[Tensor, ...],
        write: Callable[[tuple[Tensor, ...], tuple[Tensor | None, ...]], None],
        kind: Literal["fresh", "kept", "view"] = "fresh",
    ) -> tuple[Tensor, ...]:
        """The outputs, with `write(saved, gradients)` called when their gradients arrive.

        An op may have kept its outputs for its own backward: those are copied, so that the model may write into them.
        `fresh` outputs were not and are handed on; a `view` of a parameter is handed on for reading.
        """
        shapes = [t.shape for t in outputs]
        if kind == "fresh" and any(is_whole_view(t) for t in outputs):
            # Writing into a view copies its gradient twice in backward: tap what it is a view of.
            bases = tuple(t._base if is_whole_view(t) else t for t in outputs)

            def write_shaped(saved: tuple[Tensor, ...], gradients: tuple[Tensor | None, ...]) -> None:
                write(saved, tuple(None if g is None else g.view(s) for g, s in zip(gradients, shapes, strict=True)))

            tapped = applied(Tap, self.anchor, self, write_shaped, kind, len(bases), *bases, *saved)
            return tuple(t.view(s) for t, s in zip(tapped, shapes, strict=True))
        return applied(Tap, self.anchor, self, write, kind, len(outputs), *outputs, *saved)  # type: ignore[no-any-return]

    def tap_one(self, output: Tensor, input: Tensor | None, write: Callable[[Tensor, Tensor], None]) -> Tensor:
        """The output, with `write(input, gradient)` called when its gradient arrives.

        Where no row is made of an input, none is held, and `write` is given the gradient in its place.
        """

        def write_saved(saved: tuple[Tensor, ...], gradients: tuple[Tensor | None, ...]) -> None:
            (g,) = gradients
            assert g is not None
            write(saved[0] if saved else g, g)

        return self.tap((output,), () if input is None else (input,), write_saved)[0]

    def replace(
        self,
        output: Tensor,
        input: Tensor,
        given: Callable[[Tensor, Tensor, bool, bool], Tensor | None],
        operands: Sequence[Tensor | None] = (),
    ) -> Tensor:
        """The output of an op on `input`, computed without autograd, whose backward is ours.

        `given(input, gradient, write, needed)` writes the terms, if `write`, and returns the gradient of the input, if
        `needed`. It uses `operands`, which must be then what they are now.
        """
        versions = [(t, t._version) for t in operands if t is not None and not t.is_inference()]

        def backward(x: Tensor, g: Tensor, write: bool, needed: bool) -> Tensor | None:
            if any([t._version != version for t, version in versions]):
                raise RuntimeError(f"{self.op}: an operand was modified in place between forward and backward")
            return given(x, g, write, needed)

        if output._base is None:
            return applied(Replaced, self.anchor, self, backward, output, input)  # type: ignore[no-any-return]
        # Nobody may write into a view that was made without autograd: replace what it is a view of.
        shape, base = output.shape, output._base if is_whole_view(output) else output.clone()

        def shaped(x: Tensor, g: Tensor, write: bool, needed: bool) -> Tensor | None:
            return backward(x, g.view(shape), write, needed)

        return applied(Replaced, self.anchor, self, shaped, base, input).view(shape)  # type: ignore[no-any-return]
