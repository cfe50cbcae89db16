"""The drop-in on models as people have them: Hugging Face, LoRA, autocast, compiled, checkpointed, tied weights."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import dpkernels as dpk
from dpkernels.opacus import PrivacyEngine
from tests import models

BATCH = 6


def private(model, *tensors, **arguments):
    """Model, optimizer and loader, without noise; one batch that has everybody."""
    loader = DataLoader(TensorDataset(*tensors), batch_size=len(tensors[0]))
    trained = [p for p in model.parameters() if p.requires_grad]
    settings = {"noise_multiplier": 0.0, "max_grad_norm": 0.5, "sample_rate": 1.0, **arguments}
    optimizer = torch.optim.SGD(trained, lr=0.1)
    return PrivacyEngine().make_private(module=model, optimizer=optimizer, data_loader=loader, **settings)


def check(made, plain, run, loss, rtol=1e-4):
    """One step of the loop, against rows of the model as it was."""
    model, optimizer, loader = made
    batch = next(iter(loader))
    run(model, batch).backward()
    wanted = dpk.per_sample_gradients(plain, loss, *split(batch)).clip_sum(0.5).sum
    optimizer.step()
    size = torch.stack([g.norm() for g in wanted.values()]).norm()
    for name, p in model.to_standard_module().named_parameters():
        if p.requires_grad:
            off = p.grad.double() - wanted[name.replace("_orig_mod.", "")].double() / len(batch[0])
            assert float(off.norm()) <= rtol * float(size) / len(batch[0]), name


def split(batch):
    *inputs, targets = batch
    return (tuple(inputs) if len(inputs) > 1 else inputs[0]), targets


def class_loss(outputs, targets):
    return F.cross_entropy(getattr(outputs, "logits", outputs), targets, reduction="none")


def test_gpt2_with_tied_weights():
    """A loss over tokens, of which all samples have as many. That which the model makes itself mixes samples."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    options = {"n_positions": 16, "n_embd": 8, "n_layer": 2, "n_head": 2, "bos_token_id": 0, "eos_token_id": 0}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=13, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, **options))
    assert model.lm_head.weight is model.transformer.wte.weight
    plain = copy.deepcopy(model)
    ids = torch.randint(0, 13, (BATCH, 9))

    def own_loss(outputs, targets):
        logits = outputs.logits[:, :-1].transpose(1, 2)
        return F.cross_entropy(logits, targets[:, 1:], reduction="none").mean(1)

    def run(m, batch):
        outputs = m(batch[0], labels=batch[1])
        assert outputs.loss is outputs["loss"]
        with pytest.raises(ValueError, match="through an output of the model whose dim 0 is not the sample"):
            outputs.loss.backward()
        return own_loss(outputs, batch[1]).mean()

    check(private(model, ids, ids.clone()), plain, run, own_loss)


def test_bert_that_trains_in_part():
    model, loss, inputs, targets = models.hugging_face_bert()
    model.bert.embeddings.requires_grad_(False)
    plain = copy.deepcopy(model)
    names = list(inputs)

    def run(m, batch):
        return F.cross_entropy(m(**dict(zip(names, batch, strict=False))).logits, batch[-1])

    made = private(model, *inputs.values(), targets)
    check(made, plain, run, loss)
    assert model.bert.embeddings.word_embeddings.weight.grad is None


def test_peft_lora():
    """Adapters train, the base is frozen; wrapped before make_private."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    lora = get_peft_model(model, LoraConfig(r=2, target_modules=["0", "2"], lora_dropout=0.0))
    for name, p in lora.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(p)  # at zero, A would have no gradient
    frozen = {n: p.clone() for n, p in lora.named_parameters() if not p.requires_grad}
    plain = copy.deepcopy(lora)
    made = private(lora, torch.randn(BATCH, 6), torch.randint(0, 3, (BATCH,)))
    check(made, plain, lambda m, batch: F.cross_entropy(m(batch[0]), batch[1]), class_loss)
    assert frozen
    assert all(torch.equal(p, frozen[n]) for n, p in lora.named_parameters() if n in frozen)


def test_lora_after_make_private_raises():
    from peft import LoraConfig, get_peft_model

    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    wrapped, _, loader = private(model, torch.randn(BATCH, 6), torch.randint(0, 3, (BATCH,)))
    get_peft_model(model, LoraConfig(r=2, target_modules=["0"]))
    batch = next(iter(loader))
    with pytest.raises(ValueError, match="since make_private"):
        wrapped(batch[0])


@pytest.mark.parametrize("when", ["before", "after"])
def test_compiled(when):
    """Recorded as it was written; a compiled wrapper breaks the graph there."""
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    plain = copy.deepcopy(model)
    data = torch.randn(BATCH, 6), torch.randint(0, 3, (BATCH,))
    run = lambda m, batch: F.cross_entropy(m(batch[0]), batch[1])  # noqa: E731
    if when == "before":
        check(private(torch.compile(model, backend="eager"), *data), plain, run, class_loss)
    else:
        wrapped, optimizer, loader = private(model, *data)
        compiled = torch.compile(wrapped, backend="eager")
        check((wrapped, optimizer, loader), plain, lambda m, batch: run(compiled, batch), class_loss)


def test_autocast():
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    plain = copy.deepcopy(model)

    def run(m, batch):
        with torch.autocast("cpu", torch.bfloat16):
            return F.cross_entropy(m(batch[0]), batch[1])

    def loss(outputs, targets):
        return F.cross_entropy(outputs, targets, reduction="none")

    made = private(model, torch.randn(BATCH, 6), torch.randint(0, 3, (BATCH,)))
    check(made, plain, run, loss, rtol=3e-2)  # the truth here is in float32
    assert all(p.grad.dtype == torch.float32 for p in model.parameters())


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(reentrant):
    """Segments run again in backward, recorded there."""

    class Deep(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second, self.head = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)
            self.calls = 0

        def segment(self, x):
            return torch.tanh(self.second(torch.tanh(x)))

        def forward(self, x):
            return self.head(checkpoint(self.segment, self.first(x), use_reentrant=reentrant))

    model = Deep()
    plain = copy.deepcopy(model)
    made = private(model, torch.randn(BATCH, 6), torch.randint(0, 3, (BATCH,)))
    check(made, plain, lambda m, batch: F.cross_entropy(m(batch[0]), batch[1]), class_loss)


def test_hugging_face_gradient_checkpointing():
    model, loss, inputs, targets = models.hugging_face_bert()
    plain = copy.deepcopy(model)
    model.gradient_checkpointing_enable()
    names = list(inputs)

    def run(m, batch):
        return F.cross_entropy(m(**dict(zip(names, batch, strict=False))).logits, batch[-1])

    check(private(model, *inputs.values(), targets), plain, run, loss)


def test_token_losses():
    """A mean over samples and tokens, of which every sample has as many."""

    class Tagger(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.mix, self.head = nn.Embedding(11, 8), nn.LSTM(8, 8, batch_first=True), nn.Linear(8, 4)

        def forward(self, ids):
            return self.head(self.mix(self.words(ids))[0])

    model = Tagger()
    plain = copy.deepcopy(model)
    made = private(model, torch.randint(0, 11, (BATCH, 5)), torch.randint(0, 4, (BATCH, 5)))

    def loss(outputs, targets):
        return F.cross_entropy(outputs.transpose(1, 2), targets, reduction="none").mean(1)

    check(made, plain, lambda m, b: F.cross_entropy(m(b[0]).flatten(0, 1), b[1].flatten()), loss)


def test_an_embedding_of_a_million_rows():
    """Rows stay sparse until they are summed: never samples times the table."""
    looked_up = nn.Sequential(nn.Embedding(10**6, 4), nn.Flatten(), nn.Linear(12, 2))
    made = private(looked_up, torch.randint(0, 10**6, (BATCH, 3)), torch.randint(0, 2, (BATCH,)), noise_multiplier=1.0)
    model, optimizer, loader = made
    batch = next(iter(loader))
    F.cross_entropy(model(batch[0]), batch[1]).backward()
    (rows,) = (part.rows for part in model._rows)
    (embedding, *_) = rows.parts.values()
    assert all(part.matrix.dense is None for part in embedding)
    optimizer.step()
    spread = looked_up[0].weight.grad.std()
    assert float(spread) == pytest.approx(0.5 / BATCH, rel=0.01)  # noise everywhere, also where nobody looked


def test_outputs_keep_their_containers():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(3, 2), nn.Linear(3, 4)

        def forward(self, x):
            return {"a": self.a(x), "more": (self.b(x), x.detach(), None)}

    model, optimizer, loader = private(Two(), torch.randn(BATCH, 3), torch.zeros(BATCH))
    batch = next(iter(loader))
    out = model(batch[0])
    assert set(out) == {"a", "more"}
    assert isinstance(out["more"], tuple)
    assert not out["more"][1].requires_grad
    (out["a"].sum() / BATCH).backward()  # one of the outputs is not used
    optimizer.step()
    assert not model.b.weight.grad.any()


def test_inputs_that_have_gradients():
    """What comes before the private model gets its gradient; the mean is that of the loss."""
    model, _, loader = private(nn.Linear(3, 2), torch.randn(BATCH, 3), torch.zeros(BATCH))
    batch = next(iter(loader))
    x = batch[0].clone().requires_grad_()
    model(x).square().mean().backward()
    again = batch[0].clone().requires_grad_()
    model.to_standard_module()(again).square().mean().backward()
    torch.testing.assert_close(x.grad, again.grad)
