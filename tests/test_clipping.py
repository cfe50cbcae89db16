import math

import pytest

from dpkernels import clipping


@pytest.mark.parametrize(
    ("rule", "norm"),
    [
        (clipping.Flat(1.5), 1.5),
        (clipping.Difference(0.2), 0.2),
        (clipping.Automatic(2.0), 2.0),
        (clipping.PerLayer([3.0, 4.0]), 5.0),
        (clipping.RecursiveMomentum(2.0, 0.5, 0.25), 0.25 * 2.0 + 0.75 * 0.5),
    ],
)
def test_sensitivity(rule, norm):
    assert rule.sensitivity() == pytest.approx(norm)
    assert rule.sensitivity("add-remove") == pytest.approx(norm)
    assert rule.sensitivity("replace-one") == pytest.approx(2 * norm)
    with pytest.raises(ValueError, match="adjacency: got 'zero-out'"):
        rule.sensitivity("zero-out")


def test_a_number_is_a_flat_rule():
    assert clipping.as_rule(3) == clipping.Flat(3.0)
    assert clipping.as_rule(math.inf).sensitivity() == math.inf
    rule = clipping.Automatic(1.0)
    assert clipping.as_rule(rule) is rule


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: clipping.Flat(-1.0), "max_norm: got -1.0, must be a number >= 0"),
        (lambda: clipping.Flat(math.nan), "max_norm: got nan"),
        (lambda: clipping.Flat(None), "max_norm: got None"),
        (lambda: clipping.Flat(True), "max_norm: got True"),
        (lambda: clipping.Automatic(math.inf), "max_norm: got inf, must be a finite number >= 0"),
        (lambda: clipping.Automatic(1.0, 0.0), "stability: got 0, must be > 0"),
        (lambda: clipping.Automatic(1e300, 1e-10), "stability: got 1e-10, must be large enough"),
        (lambda: clipping.PerLayer([]), r"max_norms: got \[\]"),
        (lambda: clipping.PerLayer([1.0, -2.0]), r"max_norms\[1\]: got -2.0"),
        (
            lambda: clipping.RecursiveMomentum(1.0, 1.0, 1.5),
            "momentum: got 1.5, must be a finite number between 0 and 1",
        ),
        (lambda: clipping.RecursiveMomentum(-1.0, 1.0, 0.5), "gradient_norm: got -1.0"),
        (lambda: clipping.RecursiveMomentum(1.0, math.nan, 0.5), "difference_norm: got nan"),
        (lambda: clipping.as_rule("1"), "clip: got '1'"),
    ],
)
def test_bad_rules(make, message):
    with pytest.raises(ValueError, match=message):
        make()
