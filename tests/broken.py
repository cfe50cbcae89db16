"""Deliberately broken builds: each breaks one promise and keeps its claim. An audit must notice."""

import contextlib
import itertools
from unittest import mock

import torch

import dpkernels as dpk
from dpkernels import dense, per_sample


@contextlib.contextmanager
def clip_off_by_two():
    """Rows are let through twice as long as the rule says."""
    rule, call = per_sample.norm_rule, dense._sum

    def loose(clip, count):
        found, limits, stability = rule(clip, count)
        return found, limits * 2, stability

    def longer(name, lists, bounds, *arguments):
        lengths = 2 if name == "clip_momentum_sum" else len(bounds)  # its third bound is a weight
        return call(name, lists, torch.cat([bounds[:lengths] * 2, bounds[lengths:]]), *arguments)

    clamped_sums = dpk.PerSample.clamped_sums

    def wider(self, bound, *arguments, **options):
        return clamped_sums(self, 2 * bound, *arguments, **options)

    with (
        mock.patch.object(dense, "_sum", longer),
        mock.patch.object(per_sample, "norm_rule", loose),
        mock.patch.object(dpk.PerSample, "clamped_sums", wider),
    ):
        yield


@contextlib.contextmanager
def noise_halved():
    release = dpk.Gaussian.release

    def quiet(self, *arguments):
        stream, std = release(self, *arguments)
        return stream, std / 2

    with mock.patch.object(dpk.Gaussian, "release", quiet):
        yield


@contextlib.contextmanager
def ledger_skips_a_step():
    """Every second release is not entered."""
    record, count = dpk.accounting.Ledger.record, itertools.count()

    def forgetful(self, **entry):
        if next(count) % 2 == 0:
            record(self, **entry)

    with mock.patch.object(dpk.accounting.Ledger, "record", forgetful):
        yield


BUILDS = {
    "clip off by 2x": clip_off_by_two,
    "noise halved": noise_halved,
    "ledger skips a step": ledger_skips_a_step,
}
