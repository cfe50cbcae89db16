"""Models that the engine is tested on. `ZOO` maps a name to a function that makes (model, loss_fn, inputs, targets)."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.truth import cross_entropy, token_loss

B, CLASSES = 6, 3


def labels(batch=B):
    return torch.randint(0, CLASSES, (batch,))


def images(channels=3, size=8):
    return torch.randn(B, channels, size, size)


class Function(nn.Module):
    """Parameters by keyword, and a function of them and the input."""

    def __init__(self, function, **parameters):
        super().__init__()
        self.function = function
        for name, value in parameters.items():
            setattr(self, name, value if isinstance(value, nn.Module) else nn.Parameter(value))

    def forward(self, *args):
        return self.function(self, *args)


def cnn():
    model = nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 4, 3, stride=2),
        nn.ReLU(inplace=True),
        nn.Flatten(),
        nn.Linear(4, CLASSES),
    )
    return model, cross_entropy, images(), labels()


class Residual(nn.Module):
    def __init__(self, inside, outside, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
        self.norm1 = nn.GroupNorm(2, outside)
        self.conv2 = nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
        self.norm2 = nn.GroupNorm(2, outside)
        self.short = nn.Identity() if stride == 1 else nn.Conv2d(inside, outside, 1, stride, bias=False)

    def forward(self, x):
        y = F.relu(self.norm1(self.conv1(x)), inplace=True)
        y = self.norm2(self.conv2(y))
        y += self.short(x)
        return F.relu(y, inplace=True)


def resnet20():
    widths = [4] * 3 + [8] * 3 + [16] * 3
    blocks, inside = [], 4
    for i, width in enumerate(widths):
        blocks.append(Residual(inside, width, 2 if i in (3, 6) else 1))
        inside = width
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3, 1, 1, bias=False),
        nn.GroupNorm(2, 4),
        nn.ReLU(),
        *blocks,
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
    )
    model.append(nn.Linear(16, CLASSES))
    return model, cross_entropy, images(), labels()


def recurrent(kind, **options):
    layer = kind(5, 4, batch_first=True, **options)
    width = (options.get("proj_size") or 4) * (2 if options.get("bidirectional") else 1)
    model = Function(lambda m, x: m.head(m.layer(x)[0][:, -1]), layer=layer, head=nn.Linear(width, CLASSES))
    return model, cross_entropy, torch.randn(B, 7, 5), labels()


def learned_state():
    def forward(m, x):
        state = m.h.repeat(1, x.shape[0], 1), m.c.expand(-1, x.shape[0], -1).contiguous()
        return m.head(m.layer(x, state)[1][0][-1])

    layer = nn.LSTM(5, 4, 2, batch_first=True)
    model = Function(forward, layer=layer, head=nn.Linear(4, CLASSES), h=torch.randn(2, 1, 4), c=torch.randn(2, 1, 4))
    return model, cross_entropy, torch.randn(B, 7, 5), labels()


def cells():
    def forward(m, x):
        h, (a, c) = m.gru(x[:, 0]), m.lstm(x[:, 0])
        for t in range(1, x.shape[1]):
            h = m.gru(x[:, t], h)
            a, c = m.lstm(x[:, t], (a, c))
        return m.head(m.rnn(h + a))

    parts = {"gru": nn.GRUCell(5, 4), "lstm": nn.LSTMCell(5, 4), "rnn": nn.RNNCell(4, 4), "head": nn.Linear(4, CLASSES)}
    return Function(forward, **parts), cross_entropy, torch.randn(B, 4, 5), labels()


class GPT(nn.Module):
    """A causal transformer with tied embeddings."""

    def __init__(self, vocabulary=11, length=16, width=8, layers=2, heads=2):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        layer = lambda: nn.TransformerEncoderLayer(width, heads, 2 * width, 0.0, batch_first=True, norm_first=True)  # noqa: E731
        self.blocks = nn.ModuleList(layer() for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids):
        length = ids.shape[1]
        x = self.tokens(ids) + self.positions(torch.arange(length))
        mask = nn.Transformer.generate_square_subsequent_mask(length, dtype=x.dtype)
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        return self.head(self.norm(x))


def gpt():
    ids = torch.randint(0, 11, (B, 7))
    return GPT(), token_loss, ids, ids.roll(-1, 1)


class ViT(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, 4)
        self.token = nn.Parameter(torch.randn(1, 1, width))
        self.positions = nn.Parameter(torch.randn(1, 5, width))
        self.block = nn.TransformerEncoderLayer(width, 2, 2 * width, 0.0, activation="gelu", batch_first=True)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x):
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], dim=1)
        x += self.positions
        return self.head(self.block(x)[:, 0])


def vit():
    return ViT(), cross_entropy, images(), labels()


def hugging_face_gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    options = {"n_positions": 16, "n_embd": 8, "n_layer": 2, "n_head": 2, "bos_token_id": 0, "eos_token_id": 0}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=13, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, **options))
    ids = torch.randint(0, 13, (B, 9))
    return model, token_loss, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, ids.roll(-1, 1)


def hugging_face_bert():
    from transformers import BertConfig, BertForSequenceClassification

    options = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 12}
    config = BertConfig(
        vocab_size=13,
        max_position_embeddings=16,
        hidden_dropout_prob=0,
        attention_probs_dropout_prob=0,
        num_labels=CLASSES,
        **options,
    )
    ids = torch.randint(1, 13, (B, 9))
    mask = torch.ones_like(ids)
    mask[0, 5:] = 0
    loss = lambda outputs, targets: cross_entropy(outputs.logits, targets)  # noqa: E731
    return BertForSequenceClassification(config), loss, {"input_ids": ids, "attention_mask": mask}, labels()


def lora_merged():
    def forward(m, x):
        return m.head(torch.tanh(F.linear(x, m.base.weight + 0.5 * m.up @ m.down, m.base.bias)))

    base = nn.Linear(5, 4).requires_grad_(False)
    model = Function(forward, base=base, up=torch.randn(4, 2), down=torch.randn(2, 5), head=nn.Linear(4, CLASSES))
    return model, cross_entropy, torch.randn(B, 5), labels()


def lora_beside():
    def forward(m, x):
        return m.base(x) + 0.5 * m.up(m.down(x))

    parts = {
        "base": nn.Linear(5, CLASSES).requires_grad_(False),
        "down": nn.Linear(5, 2, False),
        "up": nn.Linear(2, CLASSES),
    }
    return Function(forward, **parts), cross_entropy, torch.randn(B, 4, 5).mean(1), labels()


def weight_norm():
    norm = nn.utils.parametrizations.weight_norm
    model = nn.Sequential(norm(nn.Linear(5, 4)), nn.Tanh(), norm(nn.Linear(4, CLASSES)))
    return model, cross_entropy, torch.randn(B, 5), labels()


def three_uses():
    """One weight as it is, transposed, and through einsum."""

    def forward(m, x):
        x = torch.tanh(F.linear(x, m.w))
        x = torch.tanh(x @ m.w)
        return m.head(torch.einsum("oi,bti->bto", m.w, x).mean(1))

    model = Function(forward, w=torch.randn(4, 5), head=nn.Linear(4, CLASSES))
    return model, cross_entropy, torch.randn(B, 3, 5), labels()


def overlapping_views():
    """Parts of a weight that share elements."""

    def forward(m, x):
        return F.linear(x[:, :4], m.w[:, 1:]) + F.linear(x, m.w) + x[:, :CLASSES] * m.w[0, :CLASSES]

    return Function(forward, w=torch.randn(CLASSES, 5)), cross_entropy, torch.randn(B, 5), labels()


def routed():
    """Each sample to one expert, by index: most parameters see no gradient from most samples."""

    def forward(m, x):
        gate, choice = m.gate(x).softmax(-1).max(-1)
        out = x.new_zeros(x.shape[0], CLASSES)
        for i, expert in enumerate(m.experts):
            mine = (choice == i).nonzero().squeeze(1)
            out[mine] = gate[mine, None] * expert(x[mine])
        return out

    expert = lambda: nn.Sequential(nn.Linear(5, 4), nn.PReLU(), nn.LayerNorm(4), nn.Linear(4, CLASSES))  # noqa: E731
    model = Function(forward, gate=nn.Linear(5, 4), experts=nn.ModuleList(expert() for _ in range(4)))
    return model, cross_entropy, torch.randn(B, 5), labels()


def routed_tokens():
    """The same for the tokens of a sequence, by mask, gathered back by position."""

    def forward(m, x):
        tokens = x.reshape(-1, 5)
        choice = m.gate(tokens).argmax(-1)
        order = choice.argsort(stable=True)
        parts = [expert(tokens[choice == i]) for i, expert in enumerate(m.experts)]
        return torch.cat(parts)[order.argsort()].reshape(x.shape[0], -1, CLASSES).mean(1)

    model = Function(forward, gate=nn.Linear(5, 3), experts=nn.ModuleList(nn.Linear(5, CLASSES) for _ in range(3)))
    model.gate.requires_grad_(False)
    return model, cross_entropy, torch.randn(B, 4, 5), labels()


def sorted_samples():
    """Samples put in another order and back."""

    def forward(m, x):
        order = x[:, 0].argsort()
        return m.head(torch.tanh(m.body(x[order])))[order.argsort()]

    return (
        Function(forward, body=nn.Linear(5, 4), head=nn.Linear(4, CLASSES)),
        cross_entropy,
        torch.randn(B, 5),
        labels(),
    )


def time_major(length=7):
    def forward(m, x):
        h = torch.tanh(m.body(x.transpose(0, 1)) + m.shift)
        return m.head(m.layer(h)[0][-1])

    parts = {"body": nn.Linear(5, 4), "shift": torch.randn(4), "layer": nn.GRU(4, 4), "head": nn.Linear(4, CLASSES)}
    return Function(forward, **parts), cross_entropy, torch.randn(B, length, 5), labels()


def flattened(length=7):
    """Samples and steps in one dimension, as Hugging Face's Conv1D has them."""

    def forward(m, x):
        h = torch.addmm(m.bias, x.reshape(-1, 5), m.weight)
        return m.head(h.reshape(x.shape[0], -1, 4).tanh().mean(1))

    parts = {"weight": torch.randn(5, 4), "bias": torch.randn(4), "head": nn.Linear(4, CLASSES)}
    return Function(forward, **parts), cross_entropy, torch.randn(B, length, 5), labels()


def prompts():
    """Learned tokens looked up by constant ids, one copy for each sample, before those of the sample."""

    def forward(m, ids):
        places = torch.arange(3).unsqueeze(0).expand(ids.shape[0], -1)
        segments = torch.zeros(ids.shape[0], 3 + ids.shape[1], dtype=torch.long)
        x = torch.cat([m.prompt(places), m.tokens(ids)], dim=1) + m.segments(segments)
        return m.head(torch.tanh(x).mean(1))

    parts = {"prompt": nn.Embedding(3, 4), "tokens": nn.Embedding(9, 4), "segments": nn.Embedding(2, 4)}
    return Function(forward, **parts, head=nn.Linear(4, CLASSES)), cross_entropy, torch.randint(0, 9, (B, 5)), labels()


def checkpointed(reentrant):
    def forward(m, x):
        h = checkpoint(m.block, m.first(x), use_reentrant=reentrant)
        shifted = lambda h: h * m.scale.exp() + m.shift(torch.arange(4)).squeeze(1)  # noqa: E731
        return m.head(checkpoint(shifted, h, use_reentrant=reentrant))

    parts = {
        "first": nn.Linear(5, 4),
        "block": nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.LayerNorm(4)),
        "scale": torch.randn(4),
        "shift": nn.Embedding(4, 1),
        "head": nn.Linear(4, CLASSES),
    }
    return Function(forward, **parts), cross_entropy, torch.randn(B, 5), labels()


ZOO = {
    "cnn": cnn,
    "resnet20": resnet20,
    "lstm": lambda: recurrent(nn.LSTM, num_layers=2, bidirectional=True),
    "lstm_projected": lambda: recurrent(nn.LSTM, proj_size=3),
    "gru": lambda: recurrent(nn.GRU, num_layers=2),
    "rnn": lambda: recurrent(nn.RNN, nonlinearity="relu", bias=False),
    "learned_state": learned_state,
    "cells": cells,
    "gpt": gpt,
    "vit": vit,
    "hugging_face_gpt2": hugging_face_gpt2,
    "hugging_face_bert": hugging_face_bert,
    "lora_merged": lora_merged,
    "lora_beside": lora_beside,
    "weight_norm": weight_norm,
    "three_uses": three_uses,
    "overlapping_views": overlapping_views,
    "routed": routed,
    "routed_tokens": routed_tokens,
    "sorted_samples": sorted_samples,
    "time_major": time_major,
    "time_major_square": lambda: time_major(B),
    "time_major_multiple": lambda: time_major(2 * B),
    "flattened": flattened,
    "flattened_square": lambda: flattened(B),
    "prompts": prompts,
    "checkpoint": lambda: checkpointed(False),
    "checkpoint_reentrant": lambda: checkpointed(True),
}
