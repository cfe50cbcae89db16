"""What federated algorithms share: clients, how data is split among them, and the record of an experiment."""

from __future__ import annotations

import csv
import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

import dpkernels as dpk
from dpkernels import checks
from dpkernels.accounting import Event, Ledger, no_worse
from dpkernels.gradients import batch_of
from dpkernels.members import members_of
from dpkernels.nested import flat_tensors, map_tensors, nested_like
from dpkernels.noise import std_for
from dpkernels.ranks import Ranks

Client = tuple[Any, Any]  # inputs and targets


def check_clients(clients: object, name: str = "clients") -> list[Client]:
    """A list of (inputs, targets), none of them empty."""
    if not isinstance(clients, Sequence) or isinstance(clients, str) or not clients:
        raise ValueError(f"{name}: got {clients!r:.60}, must be a non-empty sequence of (inputs, targets)")
    for i, client in enumerate(clients):
        if not isinstance(client, tuple | list) or len(client) != 2:
            raise ValueError(f"{name}[{i}]: got a {type(client).__name__}, must be a pair (inputs, targets)")
        if batch_of(*client) == 0:
            raise ValueError(f"{name}[{i}]: has no record, must have at least one")
        if _form(tuple(client)) != _form(tuple(clients[0])):
            raise ValueError(
                f"{name}[{i}]: has inputs or targets of another form than {name}[0], must have the same structure with "
                f"keys in the same order, and tensors of the same type and shape but for the number of records"
            )
    return [(client[0], client[1]) for client in clients]


def shared_out(clients: Any, ranks: Ranks, name: str = "clients") -> tuple[list[Any], list[int]]:
    """The clients, with None for those of other ranks, and how many records each has.

    Every rank is given a list of all; it looks at its share alone, and there may be anything in other places.
    """
    if ranks.size == 1:
        checked = check_clients(clients, name)
        return checked, [batch_of(*client) for client in checked]
    count = len(clients) if isinstance(clients, Sequence) else 0
    ranks.agree({f"number of {name}": count})
    if count < ranks.size:
        raise ValueError(f"ranks: there are {ranks.size}, must be at most as many as {name}, {count}")
    share = ranks.share(count)
    own = check_clients([clients[i] for i in share], name)
    found = ranks.gather(([batch_of(*client) for client in own], str(_form(own[0]))))
    if len({form for _, form in found}) > 1:
        raise ValueError(f"{name}: have inputs or targets of different forms on different ranks, must have the same")
    places: list[Any] = [None] * count
    places[share.start : share.stop] = own
    return places, [size for sizes, _ in found for size in sizes]


def _form(x: Any) -> object:
    """All but the records: what is the same for clients whose records can be put together."""
    if isinstance(x, Tensor):
        return (x.dtype, x.device, x.shape[1:]) if x.dim() else x.item()
    if isinstance(x, Mapping):
        return type(x), [(key, _form(value)) for key, value in x.items()]
    return (type(x), [_form(item) for item in x]) if isinstance(x, list | tuple) else x


def chosen(x: Any, indices: Tensor) -> Any:
    """These records of inputs or targets."""
    return map_tensors(lambda t: t[indices] if t.dim() else t, x)


def joined(parts: Sequence[Any]) -> Any:
    """The records of several clients' inputs or targets, which have the same structure, one after the other."""
    if len(parts) == 1:
        return parts[0]
    tensors = [flat_tensors(part) for part in parts]
    return nested_like(parts[0], [torch.cat(c) if c[0].dim() else c[0] for c in zip(*tensors, strict=True)])


def seed_of(seed: int | None, *place: int) -> int | None:
    """A seed of its own for each place (client, node, purpose) in a run with a seed."""
    if seed is None:
        return None
    checks.whole("seed", seed, low=0)
    digest = hashlib.sha256(json.dumps([seed, *place]).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def largest_epsilon(ledgers: Sequence[Ledger], delta: float) -> float:
    """The largest epsilon of clients or nodes whose records are different ones; of those no worse than others, none."""
    worst: list[Event] = []
    for event in {ledger.event() for ledger in ledgers}:
        if not any(no_worse(event, other) for other in worst):
            worst = [other for other in worst if not no_worse(other, event)] + [event]
    return max(dpk.accounting.epsilon(event, delta) for event in worst)


def secured(noise: float, largest: float, model: nn.Module, arguments: dict[str, Any]) -> float:
    """The noise that has the same effect once the roundings of secure noise are counted, if that is asked for.

    `largest`: the largest noise multiplier of the run, for which they weigh most.
    """
    return noise * std_for(largest, 1.0, members_of(model).width, secure=bool(arguments.get("secure", False))) / largest


class InProcess:
    """A transport within one process: messages arrive as they are. Counts what would be on the wire."""

    def __init__(self) -> None:
        self.bytes_sent = 0

    def send(self, message: Tensor, receivers: int) -> Tensor:
        """One message to so many neighbours; returns what arrives there."""
        self.bytes_sent += receivers * message.numel() * message.element_size()
        return message


def iid(records: int, parties: int, seed: int = 0) -> list[Tensor]:
    """Indices below `records` in random order, in `parties` parts as equal as can be."""
    if checks.whole("parties", parties, low=1) > checks.whole("records", records, low=1):
        raise ValueError(f"parties: got {parties}, must be at most records = {records}")
    order = np.random.default_rng(seed).permutation(records)
    return [torch.from_numpy(np.sort(part)) for part in np.array_split(order, parties)]


def dirichlet(labels: Tensor, parties: int, alpha: float, seed: int = 0) -> list[Tensor]:
    """Label skew: each label's records are shared out in proportions from a Dirichlet(alpha) of their own.

    The smaller `alpha`, the more a party has of few labels only. Every party has at least one record.
    """
    if checks.whole("parties", parties, low=1) > len(labels):
        raise ValueError(f"parties: got {parties}, must be at most the {len(labels)} records")
    checks.positive("alpha", alpha)
    rng = np.random.default_rng(seed)
    parts: list[list[int]] = [[] for _ in range(parties)]
    for label in labels.unique():
        own = rng.permutation((labels == label).nonzero().squeeze(1).numpy())
        cuts = (np.cumsum(rng.dirichlet([alpha] * parties))[:-1] * len(own)).astype(int)
        for part, share in zip(parts, np.split(own, cuts), strict=True):
            part.extend(share.tolist())
    for part in parts:
        if not part:
            part.append(max(parts, key=len).pop())
    return [torch.tensor(sorted(part)) for part in parts]


class Algorithm(Protocol):
    """What `run` needs."""

    bytes_sent: int

    def step(self) -> None:
        """One round."""

    def epsilon(self, delta: float) -> float:
        """Of all rounds so far."""
        ...


@dataclass
class History:
    """Plain records of an experiment, one for each round looked at.

    `round`, `epsilon`, `bytes` and `seconds` come from what is released or public. Anything else comes from functions
    that were asked for; what they see of training data is NOT private, and `not_private` names it.
    """

    records: list[dict[str, float]] = field(default_factory=list)
    not_private: tuple[str, ...] = ()

    def to_json(self, path: str | Path) -> None:
        """All of it."""
        Path(path).write_text(json.dumps({"not_private": self.not_private, "records": self.records}, indent=1))

    def to_csv(self, path: str | Path) -> None:
        """The records, with a star on the names of columns that are not private."""
        with Path(path).open("w", newline="") as file:
            names = list(self.records[0]) if self.records else []
            writer = csv.writer(file)
            writer.writerow([name + "*" * (name in self.not_private) for name in names])
            writer.writerows([record[name] for name in names] for record in self.records)


def run(
    algorithm: Algorithm,
    rounds: int,
    *,
    delta: float = 1e-5,
    every: int = 1,
    public: Mapping[str, Callable[[], float]] | None = None,
    not_private: Mapping[str, Callable[[], float]] | None = None,
    show: Callable[[dict[str, float]], object] | None = None,
) -> History:
    """Run `rounds` rounds and look at every `every`-th.

    `public` measures on public data; `not_private` on training data, which is not private and so only when asked for.
    `show` is called with each record.
    """
    public, hidden = public or {}, not_private or {}
    history = History(not_private=tuple(hidden))
    start = time.perf_counter()
    for number in range(1, checks.whole("rounds", rounds, low=0) + 1):
        algorithm.step()
        if number % every == 0 or number == rounds:
            seconds = time.perf_counter() - start
            measured = {name: float(measure()) for name, measure in {**public, **hidden}.items()}
            record = {"round": number, "epsilon": algorithm.epsilon(delta), "bytes": algorithm.bytes_sent}
            history.records.append({**record, "seconds": seconds, **measured})
            if show is not None:
                show(history.records[-1])
    return history
