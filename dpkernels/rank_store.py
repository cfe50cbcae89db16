"""What ranks tell each other when something is wrong, through the store of torch.distributed."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

BEAT = 1.0  # seconds between signs of life
ANSWER = 5.0  # seconds within which the store answers, unless its holder is stopped or gone


class Store:
    """Where ranks leave words for each other: torch's store, but that its calls end in bounded time.

    Its own would wait for ever while the process that holds it is stopped; these raise a TimeoutError then.
    """

    def __init__(self, store: Any) -> None:
        self._store = store
        self._silent = False  # did not answer the last time

    def count(self, key: str, by: int = 0) -> int:
        """A number, moved by so much."""
        return int(self._answered(self._store.add, key, by))

    def set(self, key: str, words: str) -> None:
        """Leave words."""
        self._answered(self._store.set, key, words)

    def delete(self, key: str) -> None:
        """Take them back."""
        self._answered(self._store.delete_key, key)

    def read(self, key: str) -> str | None:
        """What is there, if anything."""
        return self._answered(self._store.get, key).decode() if self._answered(self._store.check, [key]) else None

    def propose(self, key: str, words: str) -> str:
        """What the first to propose has said."""
        return str(self._answered(self._store.compare_set, key, "", words).decode())

    def _answered(self, call: Callable[..., Any], *arguments: Any) -> Any:
        answers: list[Any] = []
        errors: list[RuntimeError] = []

        def ask() -> None:
            try:
                answers.append(call(*arguments))
            except RuntimeError as error:
                errors.append(error)

        thread = threading.Thread(target=ask, daemon=True)
        thread.start()
        thread.join(ANSWER / 20 if self._silent else ANSWER)
        self._silent = not (answers or errors)
        if errors:
            raise errors[0]
        if not answers:
            raise TimeoutError(f"the store did not answer within {ANSWER:g} s")
        return answers[0]


class SignsOfLife:
    """A thread that counts up in the store (who does not is dead or stopped) and reads there who was found to blame."""

    def __init__(self, store: Any, rank: int) -> None:
        self._store, self._rank, self._ended = store, rank, threading.Event()
        self.verdict: str | None = None  # why these ranks are not used any more
        self._thread = threading.Thread(target=self._beat, daemon=True)
        self._thread.start()
        # before interpreter and store go, in an order that nobody knows
        threading._register_atexit(self.end)  # type: ignore[attr-defined]

    def _beat(self) -> None:
        with contextlib.suppress(RuntimeError):  # the store is gone: whoever needs it will say so
            going = True
            while going:
                self._store.add(f"life/{self._rank}", 1)
                if self.verdict is None and self._store.check(["verdict"]):
                    self.verdict = self._store.get("verdict").decode()
                going = not self._ended.wait(BEAT)
            self._store.set(f"ended/{self._rank}", "")
            self._store.add("ended", 1)

    def end(self) -> None:
        """No further sign."""
        self._ended.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(2 * BEAT)
