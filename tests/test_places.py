import pytest
import torch
from torch import nn

import dpkernels as dpk
from dpkernels.algorithms import DPSGD
from dpkernels.places import check_places
from tests.models import ZOO
from tests.truth import cross_entropy


class Shifty(nn.Module):
    """Rounds a little differently from place to place, as some products of matrices do."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(5, 3)

    def forward(self, x):
        off = torch.arange(len(x), dtype=x.dtype).remainder(2)[:, None] * torch.finfo(x.dtype).eps
        return self.layer(x * (1 + off))


def rows_of(model):
    return lambda x, y: dpk.per_sample_gradients(model, cross_entropy, x, y)


def test_rows_that_depend_on_places_are_found_out_and_modes_stay():
    x, y = torch.randn(8, 5), torch.randint(0, 3, (8,))
    model = Shifty()
    with pytest.raises(ValueError, match="secure: got True, but the last bits of the rows of parameter layer"):
        check_places(model, rows_of(model), x, y)
    assert model.training
    check_places(model.double(), rows_of(model), x.double(), y)  # far below what is counted


def test_secure_training_refuses_them():
    model = Shifty()
    algorithm = DPSGD(
        model,
        cross_entropy,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        max_norm=1.0,
        noise_multiplier=1.0,
        expected_batch_size=8,
        micro_batch_size=8,
        secure=True,
    )
    with pytest.raises(ValueError, match="depend on the places of samples"):
        algorithm.step(torch.randn(6, 5), torch.randint(0, 3, (6,)))
    assert len(algorithm.ledger) == 0


def test_dropout_is_no_place():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(5, 3))
    check_places(model, rows_of(model), torch.randn(16, 5), torch.randint(0, 3, (16,)))


@pytest.mark.parametrize("name", ["cnn", "resnet20", "gpt"])
def test_models_of_the_zoo(name):
    torch.manual_seed(0)
    model, loss_fn, inputs, targets = ZOO[name]()
    check_places(model, lambda x, y: dpk.per_sample_gradients(model, loss_fn, x, y, max_bytes=0), inputs, targets)
