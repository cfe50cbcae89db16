"""Random numbers in plain torch: the truth for the native generators, and what runs where there is none.

A release's stream is an int64 tensor: (key, release number) for Philox4x32-10, or (four words of key, release number)
for ChaCha20, whose noise is secure. csrc/common defines counters, layout and transforms.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

GROUP = 64  # consecutive elements that share sixteen Philox blocks, or eight of ChaCha20
NOISE, RADIUS_TAIL, MASK = 1, 2, 3  # purposes, in the top byte of a counter word
TAIL_THRESHOLD, SECURE_TAIL_BITS = 1 << 20, 52
LATTICE_BITS = 30  # the lattice is so many times finer than the noise, in powers of two
_LIMIT = 2.0**51  # in steps of the lattice
_LOW = 0xFFFFFFFF


def is_secure(stream: Tensor) -> bool:
    """Whether it is a stream of ChaCha20."""
    return stream.numel() == 5


def lattice(std: float) -> float:
    """The step that secure noise and what it is added to are rounded to."""
    return math.ldexp(1.0, math.frexp(std)[1] - 1 - LATTICE_BITS)


def add_noise(sums: list[Tensor], stream: Tensor | None, std: Tensor | None) -> list[Tensor]:
    """The sums, in float64, with noise; elements are counted over the whole list."""
    if stream is None or std is None:
        return sums
    sizes = [s.numel() for s in sums]
    count, device = sum(sizes), sums[0].device
    draw = secure_normals if is_secure(stream) else normals
    z = draw(stream, -(-count // GROUP), device)[:count].double() * std.to(device)
    add = (lambda x, n: _on_lattice(x, n, lattice(float(std)))) if is_secure(stream) else torch.add
    return [add(s, part.reshape(s.shape)) for s, part in zip(sums, z.split(sizes), strict=True)]


def _on_lattice(x: Tensor, noise: Tensor, step: float) -> Tensor:
    """Both rounded to integers, added as such. At the limit, two values of x come no further apart."""
    steps = torch.nan_to_num(x / step, nan=_LIMIT).clamp(-_LIMIT, _LIMIT).round().long()
    return (steps + (noise / step).round().long()).double() * step


def normals(stream: Tensor, groups: int, device: torch.device, first_group: int = 0) -> Tensor:
    """The standard normals of groups of 64 elements of a release, float32, as csrc/common/normal.h defines them."""
    block = _blocks(first_group, groups, device)
    words, extra = philox(stream, NOISE, block), philox(stream, RADIUS_TAIL, block)
    parts = []
    for pair in range(2):
        radius_word, angle_word = words[2 * pair].double(), words[2 * pair + 1].double()
        continued = (radius_word + (extra[pair].double() + 0.5) * 2.0**-32) * 2.0**-32
        plain = ((words[2 * pair] >> 1).double() + 0.5) * 2.0**-31
        uniform = torch.where(radius_word < TAIL_THRESHOLD, continued, plain)
        radius = (-2 * uniform.log()).sqrt()
        angle = angle_word * (2 * math.pi * 2.0**-32)
        parts += [radius * angle.cos(), radius * angle.sin()]
    return torch.stack(parts, dim=1).flatten().float()


def philox(stream: Tensor, purpose: int, block: Tensor) -> list[Tensor]:
    """The four words of Philox4x32-10 for each block: key from the stream, counter (block, purpose, release)."""
    key, release = stream.to(block.device)
    x0, x1 = block & _LOW, (block >> 32) | (purpose << 24)
    x2, x3 = (release & _LOW).expand_as(block), ((release >> 32) & _LOW).expand_as(block)
    k0, k1 = key & _LOW, (key >> 32) & _LOW
    for _ in range(10):
        p0, p1 = x0 * 0xD2511F53, x2 * 0xCD9E8D57  # wrap around: the low 64 bits are right
        x0, x1, x2, x3 = ((p1 >> 32) & _LOW) ^ x1 ^ k0, p1 & _LOW, ((p0 >> 32) & _LOW) ^ x3 ^ k1, p0 & _LOW
        k0, k1 = (k0 + 0x9E3779B9) & _LOW, (k1 + 0xBB67AE85) & _LOW
    return [x0, x1, x2, x3]


def element_words(stream: Tensor, purpose: int, count: int, device: torch.device) -> Tensor:
    """One Philox word for each of `count` elements."""
    words = philox(stream, purpose, _blocks(0, -(-count // GROUP), device))
    return torch.stack(words, dim=1).flatten()[:count]


def secure_normals(stream: Tensor, groups: int, device: torch.device, first_group: int = 0) -> Tensor:
    """The standard normals of groups of 64 elements of a secure release, float64 (csrc/common/normal64.h)."""
    block = torch.arange(first_group * 8, (first_group + groups) * 8, dtype=torch.int64, device=device)
    words, extra = (chacha20(stream, purpose, block).view(groups, 8, 4, 4) for purpose in (NOISE, RADIUS_TAIL))
    high, low = words[..., 1], words[..., 0]
    extra_uniform = (extra[..., 1].double() * 2.0**32 + (extra[..., 0].double() + 0.5)) * 2.0**-64
    plain = (high.double() * 2.0**32 + (low.double() + 0.5)) * 2.0**-64
    continued = (high.double() * 2.0**32 + low.double() + extra_uniform) * 2.0**-64
    rest = ((_LOW - high).double() * 2.0**32 + ((_LOW - low).double() + 0.5)) * 2.0**-64
    uniform = torch.where(high < 1 << (SECURE_TAIL_BITS - 32), continued, plain)
    radius = (-2 * torch.where(uniform < 0.5, uniform.log(), torch.log1p(-rest))).sqrt()
    quarter = ((words[..., 3] + (1 << 29)) & _LOW) >> 30
    # from the nearest quarter turn, exactly as far as a double goes
    signed = words[..., 3] - (quarter << 30)
    signed = torch.where(signed >= 1 << 31, signed - (1 << 32), signed)
    angle = (signed.double() * 2.0**32 + words[..., 2].double()) * (2 * math.pi * 2.0**-64)
    cosine, sine = angle.cos(), angle.sin()
    z0 = torch.where(quarter % 2 == 1, -sine, cosine) * torch.where(quarter >= 2, -1.0, 1.0)
    z1 = torch.where(quarter % 2 == 1, cosine, sine) * torch.where(quarter >= 2, -1.0, 1.0)
    return torch.stack([radius * z0, radius * z1], dim=3).permute(0, 2, 3, 1).flatten()


def chacha20(stream: Tensor, purpose: int, block: Tensor) -> Tensor:
    """The sixteen words of each block (RFC 8439), [blocks, 16]: nonce and counter are (block, purpose, release)."""
    key = stream.to(block.device)
    state = [torch.full_like(block, c) for c in (0x61707865, 0x3320646E, 0x79622D32, 0x6B206574)]
    state += [((key[w // 2] >> (32 * (w % 2))) & _LOW).expand_as(block) for w in range(8)]
    state += [block & _LOW, (block >> 32) | (purpose << 24)]
    state += [(key[4] & _LOW).expand_as(block), ((key[4] >> 32) & _LOW).expand_as(block)]
    x = list(state)

    def turned(word: Tensor, bits: int) -> Tensor:
        return ((word << bits) & _LOW) | (word >> (32 - bits))

    def quarter_round(a: int, b: int, c: int, d: int) -> None:
        for bits in ((16, 12), (8, 7)):
            x[a] = (x[a] + x[b]) & _LOW
            x[d] = turned(x[d] ^ x[a], bits[0])
            x[c] = (x[c] + x[d]) & _LOW
            x[b] = turned(x[b] ^ x[c], bits[1])

    for _ in range(10):
        for i in range(4):
            quarter_round(i, 4 + i, 8 + i, 12 + i)
        for i in range(4):
            quarter_round(i, 4 + (i + 1) % 4, 8 + (i + 2) % 4, 12 + (i + 3) % 4)
    return torch.stack([(a + b) & _LOW for a, b in zip(state, x, strict=True)], dim=1)


def _blocks(first_group: int, groups: int, device: torch.device) -> Tensor:
    """The blocks of consecutive groups, [groups, 16]; word w of them serves elements 16 w .. 16 w + 16."""
    first = first_group * 16
    return torch.arange(first, first + groups * 16, dtype=torch.int64, device=device).view(groups, 16)
