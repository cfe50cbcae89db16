"""The proof, once for each model and form of input, that recording it is exact.

An op sees shapes, not which dimension is the sample: time-major flattening, `x - x.mean(0)` or a permuted batch would
otherwise run silently wrong. On made-up inputs of the same form (never on data, so that nothing raises because of it),
with random ops held still:

  (i)   sum_i c_i row_i, for random c, is the plain autograd gradient of sum_i c_i loss_i
  (ii)  a part of the batch gives the same rows as the whole
  (iii) with the loss of some samples masked, their terms are exactly zero

Failing any refuses the model, naming parameter and op. What passed is the plan for later runs: where samples are in the
operands of each op.
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpkernels import factors
from dpkernels.nested import flat_tensors, map_tensors
from dpkernels.per_sample import PerSample
from dpkernels.record import LossFunction, backward, call, check_losses, record, running, trainable
from dpkernels.tape import Plan, RecordingError, Tape, no_autocast

# by model and form of input: the plan, and the loss function, kept so that its id is not given to another
_proven: weakref.WeakKeyDictionary[nn.Module, dict[Any, tuple[Plan, Any]]] = weakref.WeakKeyDictionary()


def ensure(model: nn.Module, loss_fn: LossFunction, inputs: Any, targets: Any) -> Plan:
    """The plan for this model and form of input; checks it when it is new."""
    plans = _proven.setdefault(model, {})
    key = _signature(model, loss_fn, inputs, targets)
    if key not in plans:
        plans[key] = check(model, loss_fn, inputs, targets), loss_fn
    return plans[key][0]


def check(model: nn.Module, loss_fn: LossFunction, inputs: Any, targets: Any) -> Plan:
    """Prove (i), (ii) and (iii), or raise."""
    batch = _check_batch(inputs)
    weights = torch.rand(batch, generator=torch.Generator().manual_seed(1), dtype=torch.float64) + 0.5
    generator = torch.Generator().manual_seed(0)
    x = map_tensors(partial(_made_up, batch, generator, False), inputs)
    y = map_tensors(partial(_made_up, batch, generator, True), targets)
    with torch.random.fork_rng(devices=[]):
        try:
            plain = _plain_gradients(model, loss_fn, x, y, weights)
        except RecordingError:
            raise
        except Exception:  # the model wants particular values: real ones, then
            x, y = map_tensors(partial(_repeated, batch), inputs), map_tensors(partial(_repeated, batch), targets)
            plain = _plain_gradients(model, loss_fn, x, y, weights)
        return _prove(model, loss_fn, x, y, weights, plain)


def _prove(
    model: nn.Module, loss_fn: LossFunction, inputs: Any, targets: Any, weights: Tensor, plain: dict[str, Tensor]
) -> Plan:
    batch = len(weights)
    part = batch // 2 + 1
    inside = (torch.arange(batch) < part).double()

    plan: Plan = {}
    ops: dict[str, str] = {}

    def look(tape: Tape) -> None:
        plan.update(tape.seen)
        ops.update(_ops(tape))

    def recorded(count: int, mask: Tensor | None, inspect: Callable[[Tape], None] | None) -> PerSample:
        torch.manual_seed(0)
        x, y = (map_tensors(lambda t: t[:count] if t.dim() else t, z) for z in (inputs, targets))
        clones = {id(b): b.clone() for b in model.buffers()}
        known = plan or None
        options = {"plan": known, "weights": mask, "buffers": clones, "replaced": STILL, "inspect": inspect}
        return record(model, loss_fn, x, y, count, **options)  # type: ignore[arg-type]

    rows = recorded(batch, None, look)
    sizes, whole, of_part = rows.sizes(weights), rows.weighted_sums(weights), rows.weighted_sums(weights * inside)
    del rows  # as large as a step: one at a time
    recorded(batch, inside, partial(_check_masked, part))
    _compare(ops, sizes, plain, whole, "the sum of its rows is not the ordinary gradient")
    alone = recorded(part, None, None).weighted_sums(weights[:part])
    _compare(ops, sizes, alone, of_part, "a sample's row depends on which other samples are in the batch")
    return plan


def _ops(tape: Tape) -> dict[str, str]:
    """For each parameter, the ops it was seen in."""
    found: dict[str, set[str]] = {}
    for t in tape.tracked:
        for name in t._leaves:
            found.setdefault(name, set()).update(tape.ops.get(id(t), ()))
    return {name: ", ".join(sorted(ops)) for name, ops in found.items()}


def _check_masked(part: int, tape: Tape) -> None:
    for t in tape.tracked:
        terms = [term.values if isinstance(term, factors.Dense) else term.g for term in tape.terms.get(id(t), ())]
        for values in (*terms, *tape.aligned.get(id(t), ())):
            if bool(((values[part:] != 0) & ~values[part:].isnan()).any()):
                raise _refusal(_ops(tape), t._leaves[0], "a sample's loss depends on other samples")


def _compare(
    ops: dict[str, str], sizes: dict[str, float], wanted: dict[str, Tensor], got: dict[str, Tensor], words: str
) -> None:
    total = sum(sizes.values())
    for name, want in wanted.items():
        coarse = want.element_size() < 4 or torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")
        error = float((want.double() - got[name].double()).norm())
        if error > (5e-2 if coarse else 1e-3) * sizes[name] + (1e-3 if coarse else 1e-6) * total:
            raise _refusal(ops, name, f"{words} (off by {error:.1e})")


def _refusal(ops: dict[str, str], name: str, words: str) -> RecordingError:
    where = f" in {ops[name]}" if ops.get(name) else ""
    return RecordingError(
        f"parameter {name}{where}: {words}. The model or loss_fn mixes samples, keeps them in another dimension than "
        "dim 0, or uses the parameter where it is not seen. Keep samples in dim 0 and apart"
    )


def _plain_gradients(
    model: nn.Module, loss_fn: LossFunction, inputs: Any, targets: Any, weights: Tensor
) -> dict[str, Tensor]:
    """The ordinary gradient of sum_i weights_i loss_i; the model is left as it was."""
    torch.manual_seed(0)
    parameters = trainable(model)
    leaves = {name: nn.Parameter(p.detach().clone()) for name, p in parameters.items()}
    swaps: dict[int, Tensor] = {id(p): leaves[name] for name, p in parameters.items()}
    swaps |= {id(b): b.clone() for b in model.buffers()}
    with running(model, swaps), _Still():
        losses = loss_fn(call(model, inputs), targets)
        check_losses(losses, len(weights))
        if losses.requires_grad:
            with no_autocast():
                backward(losses, weights.to(losses))
    return {name: torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for name, leaf in leaves.items()}


class _Still(torch.overrides.TorchFunctionMode):
    """Random ops held still."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.autograd.backward:  # of a reentrant checkpoint, which runs the model again
            with self:
                return backward(*args, **(kwargs or {}))
        return STILL.get(func, func)(*args, **(kwargs or {}))


def _same(x: Tensor, *_: Any, **__: Any) -> Tensor:
    return x


def _attention(*args: Any, **kwargs: Any) -> Tensor:
    if len(args) > 4:
        args = (*args[:4], 0.0, *args[5:])
    else:
        kwargs["dropout_p"] = 0.0
    return F.scaled_dot_product_attention(*args, **kwargs)


def _recurrent(layer: Callable[..., Any], *args: Any) -> Any:
    dropout = 5 if isinstance(args[3], bool) else 6  # one later for a packed sequence
    return layer(*args[:dropout], 0.0, *args[dropout + 1 :])


def _constant(value: float, like: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    kwargs.pop("generator", None)
    return like(*args, **kwargs).fill_(value)


# What stands in for random ops: dropout does nothing, a coin shows heads, noise is a constant.
STILL: Mapping[Any, Callable[..., Any]] = {
    **dict.fromkeys((F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, torch.dropout, torch.feature_dropout), _same),
    **dict.fromkeys((F.alpha_dropout, F.feature_alpha_dropout, torch.alpha_dropout), _same),
    F.scaled_dot_product_attention: _attention,
    F.multi_head_attention_forward: lambda *a, **k: F.multi_head_attention_forward(*a, **{**k, "training": False}),
    **{layer: partial(_recurrent, layer) for layer in (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)},
    Tensor.bernoulli_: lambda x, *_, **__: x.fill_(1),
    Tensor.bernoulli: lambda x, *_, **__: torch.ones_like(x),
    torch.bernoulli: lambda x, *_, **__: torch.ones_like(x),
    Tensor.normal_: lambda x, *_, **__: x.fill_(0.5),
    Tensor.uniform_: lambda x, *_, **__: x.fill_(0.5),
    torch.rand: partial(_constant, 0.5, torch.zeros),
    torch.randn: partial(_constant, 0.5, torch.zeros),
    torch.rand_like: partial(_constant, 0.5, torch.zeros_like),
    torch.randn_like: partial(_constant, 0.5, torch.zeros_like),
}


def _check_batch(inputs: Any) -> int:
    """A small prime that divides no other size of the inputs, so that the sample's dimension stands out."""
    sizes = {n for t in flat_tensors(inputs) for n in t.shape[1:]}
    return next((p for p in (3, 5, 7, 11, 13) if all(n % p for n in sizes)), 3)


def _made_up(batch: int, generator: torch.Generator, target: bool, t: Tensor) -> Tensor:
    if t.dim() == 0 or t.dtype == torch.bool:
        return _repeated(batch, t)
    shape = (batch, *t.shape[1:])
    if t.is_floating_point():
        values = (torch.rand if target else torch.randn)(shape, generator=generator)
    else:
        values = torch.randint(0, 2, shape, generator=generator)
    return values.to(dtype=t.dtype, device=t.device)


def _repeated(batch: int, t: Tensor) -> Tensor:
    return t[torch.arange(batch, device=t.device) % len(t)].detach() if t.dim() else t


def _signature(model: nn.Module, loss_fn: LossFunction, inputs: Any, targets: Any) -> Any:
    forms = map_tensors(lambda t: (tuple(t.shape[1:]), t.dtype, t.device), (inputs, targets))
    modes = tuple(m.training for m in model.modules())
    return repr(forms), _identity(loss_fn), modes, tuple(trainable(model)), torch.is_autocast_enabled("cpu")


def _identity(x: Any) -> Any:
    """What tells one loss function from another: a lambda made anew at each step is still the same one.

    Values it has taken in count as they are (numbers, strings), by form (tensors), or as objects.
    """
    if x is None or isinstance(x, bool | int | float | str):
        return x
    if isinstance(x, Tensor):
        return tuple(x.shape), x.dtype
    if isinstance(x, partial):
        return _identity(x.func), _identity(x.args), _identity(tuple(x.keywords.items()))
    if isinstance(x, tuple | list):
        return tuple(_identity(item) for item in x)
    if isinstance(x, types.MethodType):
        return _identity(x.__func__), id(x.__self__)
    if isinstance(x, types.FunctionType):
        cells = tuple(_content(cell) for cell in x.__closure__ or ())
        return x.__code__, _identity(x.__defaults__), tuple(_identity(c) for c in cells if c is not x)
    return id(x)


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not set yet
        return None
