"""Opacus's own layer tests, pointed at our engine: their shapes, their batch-of-one truth, our rows."""

import importlib
import pkgutil
import unittest

import hypothesis
import opacus.tests.grad_samples as theirs
import pytest
import torch
from opacus.tests.grad_samples import common
from opacus.utils.per_sample_gradients_utils import clone_module, compute_microbatch_grad_sample
from torch import nn
from torch.nn.utils.rnn import PackedSequence

import dpkernels as dpk

EXAMPLES = 10
pytestmark = pytest.mark.filterwarnings("ignore")  # they use subTest inside hypothesis


def their_cases():
    for found in pkgutil.iter_modules(theirs.__path__):
        if found.name.endswith("_test"):
            for name, case in vars(importlib.import_module(f"{theirs.__name__}.{found.name}")).items():
                if isinstance(case, type) and issubclass(case, unittest.TestCase) and name != "GradSampleHooks_test":
                    few_examples(case)
                    yield name, case


def few_examples(case):
    """A tenth of the hundred that hypothesis would try of each: minutes, otherwise."""
    for test in vars(case).values():
        if hasattr(test, "hypothesis"):
            settings = test._hypothesis_internal_use_settings
            test._hypothesis_internal_use_settings = hypothesis.settings(settings, max_examples=EXAMPLES)


globals().update(their_cases())


class SampleFirst(nn.Module):
    """A module that wants samples in dim 1, for inputs that have them in dim 0."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, x):
        return self.module(x.transpose(0, 1)).transpose(0, 1)


def our_rows(x, module, batch_first=True, loss_reduction="mean", **_):
    if isinstance(x, PackedSequence):
        hypothesis.reject()  # has no sample dimension; the padded examples run
    if type(module) is nn.EmbeddingBag:
        raise unittest.SkipTest(
            "bags given by offsets have no sample dimension; test_rules has those of two dimensions"
        )

    def loss(output, _):
        each = output.abs().flatten(1)
        return each.sum(1) if loss_reduction == "sum" else each.mean(1)

    torch.manual_seed(0)
    model = clone_module(module) if batch_first else SampleFirst(clone_module(module))
    inputs = x if batch_first else x.transpose(0, 1)
    rows = dpk.per_sample_gradients(model, loss, inputs, torch.zeros(len(inputs))).materialize()
    return {name.removeprefix("" if batch_first else "module."): row for name, row in rows.items()}


def both_rows(x, module, chunk_method=iter, grad_sample_mode="hooks", **options):
    ours = our_rows(x, module, **options)
    return compute_microbatch_grad_sample(x, module, chunk_method=chunk_method, **options), ours


def run_test(self, x, module, batch_first=True, atol=10e-6, rtol=10e-5, ew_compatible=True, chunk_method=iter):
    """Theirs, without repeating it for each of Opacus's own engines."""
    for reduction in ("sum", "mean"):
        with self.subTest(loss_reduction=reduction):
            self.run_test_with_reduction(x, module, batch_first, reduction, atol, rtol, chunk_method=chunk_method)


@pytest.fixture(autouse=True)
def _our_engine(monkeypatch):
    monkeypatch.setattr(common.GradSampleHooks_test, "run_test", run_test)
    monkeypatch.setattr(common, "compute_opacus_grad_sample", our_rows)
    monkeypatch.setattr(common, "compute_grad_samples_microbatch_and_opacus", both_rows)
