"""The ops as PyTorch's dispatcher knows them: the one boundary to native code.

Schemas are defined here, the reference is registered for every device, then the native module is loaded, which adds the
CPU kernels, and where there is a GPU `dpkernels.gpu` adds its own. Ops are pure (but for `add_gaussian_`): the noise
stream, an int64 tensor (key, release number), and its float64 std are drawn outside, by `dpkernels.noise.Gaussian`, and
come in as tensors so that a compiled step is compiled once. Arguments were checked by `dpkernels.dense`.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from dpkernels import gpu, reference, reference_layers

SCHEMAS = {
    "clip_sum": "(Tensor[] vectors, Tensor max_norms, float? stability, Tensor? stream, Tensor? std)"
    " -> (Tensor[], Tensor)",
    "clip_difference_sum": "(Tensor[] now, Tensor[] before, Tensor max_norms, float? stability, Tensor? stream,"
    " Tensor? std) -> (Tensor[], Tensor)",
    "clip_momentum_sum": "(Tensor[] now, Tensor[] before, Tensor bounds, Tensor? stream, Tensor? std)"
    " -> (Tensor[], Tensor)",
    "clamp_sum": "(Tensor[] vectors, Tensor bound, Tensor? stream, Tensor? std) -> (Tensor[], Tensor)",
    "outer_rows": "(Tensor a, Tensor g) -> (Tensor, Tensor)",
    "outer_squares": "(Tensor a, Tensor g) -> Tensor",
    "outer_gram": "(Tensor a, Tensor g) -> (Tensor, Tensor)",
    "outer_sum": "(Tensor a, Tensor g, Tensor weights) -> Tensor",
    "conv_rows": "(Tensor x, Tensor g, int[] kernel, int[] stride, int[] padding, int[] dilation, int groups)"
    " -> (Tensor, Tensor)",
    "outer_rows_": "(Tensor(a!) rows, Tensor a, Tensor g, float scale) -> ()",
    "conv_rows_": "(Tensor(a!) rows, Tensor x, Tensor g, float scale, int[] stride, int[] padding, int[] dilation,"
    " int groups) -> ()",
    "outer_clamp_sum_": "(Tensor(a!) sums, Tensor a, Tensor g, Tensor? live, float bound) -> ()",
    "conv_clamp_sum_": "(Tensor(a!) sums, Tensor x, Tensor g, float bound, int[] stride, int[] padding, int[] dilation,"
    " int groups) -> ()",
    "conv_each": "(Tensor x, Tensor w, int[] size, int[] stride, int[] padding, int[] dilation, int groups) -> Tensor",
    "conv_each_input": "(Tensor g, Tensor w, int[] size, int[] stride, int[] padding, int[] dilation, int groups)"
    " -> Tensor",
    "linear_runs": "(Tensor x, Tensor w) -> (Tensor, Tensor)",
    "low_rank_": "(Tensor(a!) y, Tensor x, Tensor a, Tensor g) -> ()",
    "unfilled": "(Tensor like, int[] size) -> Tensor",
    "copies": "(Tensor shared, int batch) -> Tensor",
    "layer_norm_rows": "(Tensor x, Tensor g, Tensor? w, float epsilon, bool input_gradient)"
    " -> (Tensor, Tensor, Tensor)",
    "group_norm_rows": "(Tensor x, Tensor g, Tensor? w, int groups, float epsilon, bool input_gradient)"
    " -> (Tensor, Tensor, Tensor)",
    "max_pool": "(Tensor x, int[] kernel, int[] stride, int[] padding, int[] size) -> (Tensor, Tensor)",
    "max_pool_input": "(Tensor g, Tensor where, int[] kernel, int[] stride, int[] padding, int[] size) -> Tensor",
    "row_squares": "(Tensor[] tensors) -> Tensor",
    "lookup_squares": "(Tensor ids, Tensor g) -> Tensor",
    "dense_difference": "(Tensor x, Tensor y, Tensor? x_weights, Tensor? y_weights) -> (Tensor, Tensor)",
    "weighted_sum_": "(Tensor(a!)[] sums, bool[] filled, Tensor[] rows, int[] owner, Tensor weights, Tensor? stream,"
    " Tensor? std, float scale) -> ()",
    "add_gaussian_": "(Tensor(a!)[] tensors, Tensor stream, Tensor std) -> ()",
    "add_gaussian_each_": "(Tensor(a!) values, Tensor counts, Tensor streams, Tensor stds) -> ()",
    "sparsify": "(Tensor vector, float keep_probability, Tensor seed, Tensor? stream, Tensor? std) -> (Tensor, Tensor)",
    "masks": "(Tensor seeds, int size, float keep_probability, bool with_indices) -> (Tensor, Tensor)",
    "gather_runs_": "(Tensor(a!) out, Tensor[] sources, Tensor indices, Tensor counts) -> ()",
}
# How many leading arguments are differentiable tensor lists, in the four ops that sum over samples.
SUMS = {"clip_sum": 1, "clip_difference_sum": 2, "clip_momentum_sum": 2, "clamp_sum": 1}

_library = torch.library.Library("dpkernels", "DEF")
# A captured graph of CUDA would release the same noise at every replay: streams are read on the host.
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.cudagraph_unsafe)
for _name, _schema in SCHEMAS.items():
    _library.define(_name + _schema, tags=_TAGS)
    _source = reference if hasattr(reference, _name) else reference_layers
    _library.impl(_name, getattr(_source, _name), "CompositeExplicitAutograd")


def _load_native() -> tuple[Any, str]:
    """The native module and a word on why it is there or not."""
    if os.environ.get("DPKERNELS_NATIVE", "1") == "0":
        return None, "switched off by DPKERNELS_NATIVE=0"
    try:
        _native = importlib.import_module("dpkernels._native")
    except ImportError as error:
        return None, f"not built or not loadable ({error})"
    return _native, "loaded"


native, native_status = _load_native()
gpu_status = gpu.load(_library)


def _fake_sums(now: Sequence[Tensor], *_: object) -> tuple[list[Tensor], Tensor]:
    sums = [t.new_empty(t.shape[1:], dtype=reference.wide_type(t.dtype)) for t in now]
    return sums, now[0].new_empty(now[0].shape[:1], dtype=reference.norms_type(now))


def _fake_sparsify(vector: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    kept = torch.library.get_ctx().new_dynamic_size()
    values = vector.new_empty(kept, dtype=reference.wide_type(vector.dtype))
    return values, vector.new_empty(kept, dtype=torch.int64)


def _sum_autograd(name: str, lists: int) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Derivatives of a clipped sum by differentiating its reference; noise is a constant."""
    forward = getattr(reference, name)

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.count = len(inputs[0])
        ctx.save_for_backward(*(t for tensors in inputs[:lists] for t in tensors), inputs[lists])
        ctx.constants = inputs[lists + 1 : -2]

    def backward(ctx: Any, grad_sums: list[Tensor | None], grad_norms: Tensor | None) -> tuple[Any, ...]:
        *tensors, bounds = ctx.saved_tensors
        again = torch.is_grad_enabled()  # a second derivative is asked for
        with torch.enable_grad():
            leaves = [t if again and t.requires_grad else t.detach().requires_grad_() for t in tensors]
            inputs = [leaves[i * ctx.count : (i + 1) * ctx.count] for i in range(lists)]
            sums, norms = forward(*inputs, bounds, *ctx.constants, None, None)
            pairs = [(y, g) for y, g in zip([*sums, norms], [*grad_sums, grad_norms], strict=True) if g is not None]
            outputs, cotangents = zip(*pairs, strict=True)
            grads = torch.autograd.grad(outputs, leaves, cotangents, create_graph=again, allow_unused=True)
        by_list = [list(grads[i * ctx.count : (i + 1) * ctx.count]) for i in range(lists)]
        return (*by_list, *(None for _ in range(3 + len(ctx.constants))))

    return setup_context, backward


def _sparsify_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.shape, ctx.dtype, ctx.keep_probability = inputs[0].shape, inputs[0].dtype, inputs[1]
    ctx.save_for_backward(output[1])


def _sparsify_backward(ctx: Any, grad_values: Tensor, _: None) -> tuple[Any, ...]:
    (indices,) = ctx.saved_tensors
    grad = grad_values.new_zeros(ctx.shape).index_put((indices,), grad_values / ctx.keep_probability)
    return grad.to(ctx.dtype), None, None, None, None


def _register(name: str, fake: Callable[..., Any], setup: Callable[..., Any], backward: Callable[..., Any]) -> None:
    torch.library.register_fake(f"dpkernels::{name}", fake, lib=_library)
    torch.library.register_autograd(f"dpkernels::{name}", backward, setup_context=setup, lib=_library)


for _name, _lists in SUMS.items():
    _register(_name, _fake_sums, *_sum_autograd(_name, _lists))
_register("sparsify", _fake_sparsify, _sparsify_setup, _sparsify_backward)
torch.library.register_fake("dpkernels::add_gaussian_", lambda tensors, stream, std: None, lib=_library)
