"""Several processes that train together: `torchrun` starts them, torch.distributed connects them.

    ranks = dpk.ranks.start()                      # alone, where torchrun did not start this process
    algorithm = DPSGD(model, loss_fn, ..., ranks=ranks)

Without `ranks=` the algorithms and `dpk.sampling` ask `current()`: the ranks that torchrun started, if any. Everything
here is a plain call of torch.distributed (gloo on CPUs, NCCL on GPUs) that ends in bounded time: a rank that is killed,
stalls or fails ends the others with a `RankError` that names it. Ranks trust each other and the network between them.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dpkernels import checks
from dpkernels.rank_store import BEAT, SignsOfLife, Store

BUCKET = 1 << 20  # numbers that travel together
Message = tuple[int, Tensor]  # to or from a rank


class RankError(RuntimeError):
    """Another rank was killed, stalls, failed, or trains something else; its number is in the message."""


class Ranks:
    """The processes that train together, `size` of them; this one is number `rank`.

    `chosen`: it was handed over by the caller, who therefore knows that each rank must have records of its own.
    """

    def __init__(self, timeout: float, *, chosen: bool) -> None:
        self.rank, self.size, self.chosen = dist.get_rank(), dist.get_world_size(), chosen
        self.timeout = checks.positive("timeout", timeout)
        self.bytes_sent = 0  # by this rank, in messages to neighbours
        self._what = "the start"
        self._told = False  # the others, of an error of this rank before it sent or awaited anything
        self._awaited = list(range(self.size))  # who may be the one that does not come
        self._begun = False  # to send or await, in what is being done
        store: Any = dist.distributed_c10d._get_default_store()
        name = f"dpkernels/{len(_made)}"  # the same on all, as they are made together
        from torch.distributed import PrefixStore  # type: ignore[attr-defined]

        self._store = Store(PrefixStore(name, store))
        self._life = SignsOfLife(PrefixStore(name, store.clone()), self.rank)
        with self._watched():
            self._group = dist.new_group(timeout=timedelta(seconds=timeout))
            self._wait(dist.barrier(self._group, async_op=True))
        _made.append(self)

    def share(self, count: int) -> range:
        """Which of `count` things, in order, are this rank's: as many as any other's, or one more."""
        return self.share_of(self.rank, count)

    def share_of(self, rank: int, count: int) -> range:
        """The same for any rank."""
        return range(rank * count // self.size, (rank + 1) * count // self.size)

    def owner(self, thing: int, count: int) -> int:
        """Whose share a thing is in."""
        return next(rank for rank in range(self.size) if thing in self.share_of(rank, count))

    @contextlib.contextmanager
    def doing(self, what: str) -> Iterator[None]:
        """Whatever fails inside is told to the others, who else would wait for this rank.

        An error before anything was sent or awaited may be caught and the call repeated, if all ranks do. After any
        other the ranks are out of step, and are not used again.
        """
        if self.size == 1:
            yield
            return
        self._what, self._begun = what, False
        try:
            yield
        except RankError:
            raise
        except BaseException as error:
            words = f"{type(error).__name__}: {error}"[:2000]
            self._told = True
            self._tell({"own": words}, at_once=self._begun)
            if self._begun:
                self._life.verdict = f"rank {self.rank} failed: {words} (at {what})"
            raise

    def agree(self, facts: Mapping[str, Any]) -> None:
        """Refuse to go on unless all ranks have the same facts; the error names the ranks and what they differ in."""
        mine = {name: json.dumps(value, sort_keys=True, default=str) for name, value in facts.items()}
        found = self.gather(mine)
        for name in dict.fromkeys(name for other in found for name in other):
            values = [other.get(name) for other in found]
            usual = max(values, key=values.count)  # rank 0's, where it is open
            odd = [rank for rank, value in enumerate(values) if value != usual]
            if odd:
                raise RankError(
                    f"rank {odd[0]}: has {name} = {_short(values[odd[0]])}, must have {_short(usual)} as rank "
                    f"{values.index(usual)} has" + (f" (also ranks {odd[1:]})" if odd[1:] else "")
                )

    def gather(self, thing: Any) -> list[Any]:
        """What every rank gave, in their order."""
        if self.size == 1:
            return [thing]
        found: list[Any] = [None] * self.size
        with self._watched():  # a barrier first: it can be waited for in slices
            self._wait(dist.barrier(self._group, async_op=True))
            dist.all_gather_object(found, thing, group=self._group)
        return found

    def from_rank(self, thing: Any, rank: int = 0) -> Any:
        """What that rank gave; others' is ignored."""
        return self.gather(thing if rank == self.rank else None)[rank]

    def sum_(self, tensors: Sequence[Tensor], *, to: int | None = None) -> None:
        """Each tensor becomes the sum of all ranks', in place; with `to`, on that rank only (others' are spoilt)."""
        if to is None:
            self._in_buckets(tensors, lambda t: dist.all_reduce(t, group=self._group, async_op=True))
        else:
            self._in_buckets(tensors, lambda t: dist.reduce(t, to, group=self._group, async_op=True))

    def spread_(self, tensors: Sequence[Tensor], rank: int = 0) -> None:
        """Each tensor becomes that rank's, in place."""
        self._in_buckets(tensors, lambda t: dist.broadcast(t, rank, group=self._group, async_op=True))

    def exchange(self, sent: Sequence[Message], awaited: Sequence[Message]) -> None:
        """Messages from rank to rank, without the others: those awaited are put into their tensors."""
        if self.size == 1:
            return
        calls = [(rank, dist.P2POp(dist.isend, t, rank, group=self._group)) for rank, t in sent if t.numel()]
        calls += [(rank, dist.P2POp(dist.irecv, t, rank, group=self._group)) for rank, t in awaited if t.numel()]
        self.bytes_sent += sum(t.numel() * t.element_size() for _, t in sent)
        with self._watched():
            works = dist.batch_isend_irecv([call for _, call in calls]) if calls else []
            for (rank, _), work in zip(calls, works, strict=True):
                self._awaited = [rank]
                work.wait()

    def _in_buckets(self, tensors: Sequence[Tensor], start: Callable[[Tensor], Any]) -> None:
        """Flat buckets of one type; the next one is packed while one travels, and unpacked while the next does."""
        if self.size == 1:
            return
        under_way = []
        with self._watched():
            for bucket in _buckets(tensors):
                flat = bucket[0].view(-1) if _is_flat(bucket) else torch.cat([t.reshape(-1) for t in bucket])
                under_way.append((bucket, flat, start(flat)))
            for bucket, flat, work in under_way:
                self._wait(work, on_cpu=flat.device.type == "cpu")
                if not _is_flat(bucket):
                    parts = flat.split([t.numel() for t in bucket])
                    torch._foreach_copy_(list(bucket), [p.view(t.shape) for p, t in zip(parts, bucket, strict=True)])

    def _wait(self, work: Any, on_cpu: bool = True) -> None:
        """In slices, so that trouble elsewhere ends it; NCCL has a watch of its own."""
        if not on_cpu or dist.get_backend(self._group) == "nccl":
            work.wait()
            return
        start = time.monotonic()
        end = start + self.timeout
        while True:
            try:
                work.wait(timedelta(seconds=min(BEAT, max(end - time.monotonic(), 1e-3))))
                return
            except RuntimeError as error:
                late = time.monotonic() >= end
                if "timed out" not in str(error).lower() or late or self._in_trouble(time.monotonic() - start):
                    raise

    def _in_trouble(self, waited: float) -> bool:
        """Whether somebody said so, or has ended: but what it sent before may still be on its way."""
        try:
            return self._store.count("trouble") > 0 or (waited > 3 * BEAT and self._store.count("ended") > 0)
        except TimeoutError:  # of the store; whoever waits goes on until the end of its own time
            return False

    @contextlib.contextmanager
    def _watched(self) -> Iterator[None]:
        if self._life.verdict is not None:
            raise RankError(f"{self._life.verdict}; the ranks are out of step since, start them anew")
        start, self._begun = time.monotonic(), True
        self._awaited = list(range(self.size))
        try:
            if self._told:  # this rank is back
                self._store.delete(f"report/{self.rank}")
                self._told = False
            yield
        except RankError:
            raise
        except (RuntimeError, TimeoutError) as error:
            raise self._trouble(error, time.monotonic() - start) from error

    def _tell(self, report: dict[str, Any], *, at_once: bool) -> None:
        """Leave a report; `at_once` ends those who wait, others find it when this rank ends or does not come."""
        with contextlib.suppress(RuntimeError, TimeoutError):
            self._store.set(f"report/{self.rank}", json.dumps(report))
            self._store.count("trouble", int(at_once))

    def _trouble(self, error: Exception, waited: float) -> RankError:
        """Who is to blame, in the same words on all ranks: those of the first that finds out."""
        if self._life.verdict is not None:
            return RankError(self._life.verdict)
        where = f"at {self._what}, seen by rank {self.rank} after {waited:.1f} s"
        self._tell({"late": self._awaited if waited >= self.timeout else []}, at_once=True)
        try:
            verdict = self._store.propose("verdict", f"{self._blamed(error)} ({where})")
            if _holds_store(self.rank):
                time.sleep(2.5 * BEAT)  # until all have read it: with this process the store goes
        except (RuntimeError, TimeoutError):
            holder = "what started the ranks" if _agent_holds_store() else "rank 0"
            gone = f"{holder} cannot be reached any more: it was killed or stopped, or its machine is gone ({where})"
            verdict = self._life.verdict or gone
        self._life.verdict = verdict
        self._life.end()
        return RankError(verdict)

    def _blamed(self, error: Exception) -> str:
        """A rank that failed and said so, one without signs of life, or one that did not come."""
        lives = [[self._store.count(f"life/{rank}") for rank in range(self.size)]]
        time.sleep(2.5 * BEAT)
        lives += [[self._store.count(f"life/{rank}") for rank in range(self.size)]]
        reports = {rank: json.loads(self._store.read(f"report/{rank}") or "null") or {} for rank in range(self.size)}
        late = {rank for report in reports.values() for rank in report.get("late", ())}
        causes = []
        for rank, (before, after) in enumerate(zip(*lives, strict=True)):
            if "own" in reports[rank]:
                causes.append(f"rank {rank} failed: {reports[rank]['own']}")
            elif reports[rank]:
                continue
            elif self._store.read(f"ended/{rank}") is not None:
                causes.append(f"rank {rank} has ended")
            elif before == after:
                causes.append(f"rank {rank} shows no sign of life: it was killed, or stopped")
            elif rank in late:
                causes.append(f"rank {rank} is alive, but did not come within {self.timeout:g} s")
        return "; ".join(causes) or f"the ranks lost touch: {str(error).splitlines()[0]}"


def _agent_holds_store() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _holds_store(rank: int) -> bool:
    return rank == 0 and not _agent_holds_store()


class _Alone(Ranks):
    """One process: nothing to agree on, nothing to send."""

    def __init__(self) -> None:
        self.rank, self.size, self.chosen, self.timeout, self.bytes_sent = 0, 1, True, 60.0, 0


ALONE: Ranks = _Alone()
_current: tuple[Any, Ranks] | None = None
_made: list[Ranks] = []


def started() -> bool:
    """Whether this process is one of several that torchrun started."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ


def several() -> bool:
    """Whether there are other ranks; joins nobody."""
    return started() or (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1)


def start(timeout: float = 60.0) -> Ranks:
    """Join the processes that torchrun started, or those of a process group there is; ALONE if there is neither.

    `timeout`: seconds after which a rank that does not come ends the others. Must be longer than what one rank may need
    more than another for a step.
    """
    checks.positive("timeout", timeout)
    if not dist.is_available():
        return ALONE
    if not dist.is_initialized():
        if not started():
            return ALONE
        try:
            dist.init_process_group(timeout=timedelta(seconds=timeout))
        except RuntimeError as error:
            raise RankError(f"not all {os.environ['WORLD_SIZE']} ranks came: {str(error).splitlines()[0]}") from error
        atexit.register(_leave)
    return ALONE if dist.get_world_size() == 1 else Ranks(timeout, chosen=True)


def _leave() -> None:
    """At the end of a process that joined others: who holds the store leaves last, so that others can tell why."""
    if not dist.is_initialized():
        return
    if _made and _holds_store(dist.get_rank()):
        end = time.monotonic() + 8 * BEAT
        with contextlib.suppress(RuntimeError, TimeoutError):
            while _made[-1]._store.count("ended") < _made[-1].size and time.monotonic() < end:
                time.sleep(BEAT / 10)
    if not any(ranks._life.verdict for ranks in _made):  # else it would wait for what is under way
        dist.destroy_process_group()


def current(timeout: float = 60.0) -> Ranks:
    """The ranks of this process where none are handed over: those that torchrun started, joined at the first call.

    `timeout` is of that call, see `start`.
    """
    global _current
    if _current is None or (_current[1] is not ALONE and _current[0] is not dist.group.WORLD):
        found = start(timeout)
        if found is ALONE:
            return ALONE
        found.chosen = False
        _current = (dist.group.WORLD, found)
    return _current[1]


def given(ranks: Ranks | None) -> Ranks:
    """Those handed over, or the current ones."""
    if ranks is not None and not isinstance(ranks, Ranks):
        raise ValueError(f"ranks: got a {type(ranks).__name__}, must be what dpk.ranks.start() gives, or None")
    return current() if ranks is None else ranks


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    bucket: list[Tensor] = []
    for t in tensors:
        if bucket and (t.dtype != bucket[0].dtype or sum(b.numel() for b in bucket) + t.numel() > BUCKET):
            yield bucket
            bucket = []
        bucket.append(t)
    if bucket:
        yield bucket


def _is_flat(bucket: Sequence[Tensor]) -> bool:
    return len(bucket) == 1 and bucket[0].is_contiguous()


def _short(value: str | None) -> str:
    return "nothing" if value is None else value if len(value) <= 60 else value[:57] + "..."
