"""What was worked out about matrices: a graph carries their numbers only."""

import threading
from collections import OrderedDict
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from taut.activations.codes import read
from taut.maps import as_map
from taut.prepare import Prepared, Unprepared

_ALIKE = 8  # so many of one shape


@final
class _Entry(NamedTuple):
    place: int  # where C was
    numbers: Tensor | None
    prepared: Prepared

    def holds(self, numbers: Tensor | None, C: Tensor) -> bool:
        return _same(self.numbers, numbers) and torch.equal(self.prepared.map.data, C)


@final
class Memo:
    """The latest matrices, so many of them and of their numbers at most; safe among threads.

    Numbers are compared before each use, first with those of a matrix that was at the same address.

    >>> from taut.activations import codes, exp
    >>> memo, C, text = Memo(entries=2, numbers=100), torch.ones(1, 3), codes.spelled(exp)
    >>> memo.prepared(*text, C, None) is memo.prepared(*text, C.clone(), None)
    True
    """

    entries: int
    numbers: int

    def __init__(self, entries: int, numbers: int) -> None:
        self.entries, self.numbers = entries, numbers
        self._lock, self._known = (
            threading.Lock(),
            OrderedDict[tuple[Any, ...], tuple[_Entry, ...]](),
        )

    def __len__(self) -> int:
        return sum(map(len, self._known.values()))

    def prepared(
        self, text: str, numbers: Tensor | None, C: Tensor, equations: int | None
    ) -> Prepared:
        """For C and the activation that is written so; `equations` of its rows are A's, or all."""
        key, place = (text, equations, C.shape, C.dtype, C.device), C.data_ptr()
        with self._lock:
            alike = self._known.get(key, ())
        for entry in sorted(alike, key=lambda entry: entry.place != place):
            if entry.holds(numbers, C):
                return entry.prepared
        own = as_map(C.detach().clone(memory_format=torch.contiguous_format))
        numbers = None if numbers is None else numbers.clone()
        prepared = Unprepared(read(text, numbers), own, equations).prepared(own)
        entry = _Entry(place, numbers, prepared)
        with self._lock:
            self._known[key] = entry, *self._known.get(key, ())[: _ALIKE - 1]
            self._known.move_to_end(key)
            while self._full():
                self._leave_out()
        return prepared

    def _full(self) -> bool:
        held = sum(x.prepared.map.data.numel() for alike in self._known.values() for x in alike)
        return len(self) > 1 and (len(self) > self.entries or held > self.numbers)

    def _leave_out(self) -> None:
        """The oldest of those whose shape was met longest ago."""
        key, alike = self._known.popitem(last=False)
        if len(alike) > 1:
            self._known[key] = alike[:-1]
            self._known.move_to_end(key, last=False)


def _same(known: Tensor | None, x: Tensor | None) -> bool:
    return known is x if known is None or x is None else torch.equal(known, x)
