"""What a mask function of Transformers says, found out by calling it with symbols.

Transformers describes a mask by a function ``f(b, h, q, k) -> may q see k?``, built from a few parts with ``and_masks``.
Called with symbols in place of index tensors, the parts that attention has flags for answer with a `Rule`: a band of
distances between key and query, and sequences that may not see each other. Any other function runs into an operation that
the symbols do not have, and is `Unreadable`: its mask has to be built. Nothing here depends on how a release of
Transformers names or nests its functions, and torch.compile traces it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Never

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class Unreadable(Exception):
    """The function is not made of bands and packed sequences."""


@dataclass(frozen=True, eq=False)
class Rule:
    """Query q sees key k iff ``low <= k - q <= high`` (None: no bound) and both have one number in ``sequences``."""

    low: int | None = None
    high: int | None = None
    sequences: Tensor | None = None  # (B, S) ints: the packed sequence that a token belongs to

    device = "any"  # and_masks moves every part to the device of the first

    def to(self, device: Any) -> Rule:
        return self

    def __and__(self, other: Any) -> Rule:
        if not isinstance(other, Rule) or (self.sequences is not None and other.sequences is not None):
            raise Unreadable
        sequences = self.sequences if other.sequences is None else other.sequences
        return Rule(_tighter(self.low, other.low, max), _tighter(self.high, other.high, min), sequences)

    def __bool__(self) -> Never:
        raise Unreadable


class _Index:
    """``q · query + k · key + constant``, for a query and a key at absolute positions."""

    def __init__(self, q: int, k: int, constant: int = 0) -> None:
        self.q, self.k, self.constant = q, k, constant

    def new_ones(self, *shape: Any, **options: Any) -> Rule:
        return Rule()  # what and_masks starts from

    def new_zeros(self, *shape: Any, **options: Any) -> Never:
        raise Unreadable  # what or_masks starts from

    def __sub__(self, other: Any) -> _Index:
        if isinstance(other, _Index):
            return _Index(self.q - other.q, self.k - other.k, self.constant - other.constant)
        return _Index(self.q, self.k, self.constant - _whole(other))

    def __add__(self, other: Any) -> _Index:
        return _Index(self.q, self.k, self.constant + _whole(other))

    def __abs__(self) -> _Distance:
        if (self.q, self.k, self.constant) not in ((1, -1, 0), (-1, 1, 0)):
            raise Unreadable
        return _Distance()

    def __le__(self, other: Any) -> Rule:
        return Rule(high=-self._minus_query_plus_key(other))

    def __lt__(self, other: Any) -> Rule:
        return Rule(high=-self._minus_query_plus_key(other) - 1)

    def __gt__(self, other: Any) -> Rule:
        return Rule(low=1 - self._minus_query_plus_key(other))

    def __ge__(self, other: Any) -> Rule:
        if not isinstance(other, _Index) and (self.q, self.k, self.constant, other) == (1, 0, 0, 0):
            return Rule()  # positions are never negative: how Transformers writes "everything"
        return Rule(low=-self._minus_query_plus_key(other))

    def _minus_query_plus_key(self, other: Any) -> int:
        """The c of ``self - other == key - query + c``."""
        difference = self - other
        if (difference.q, difference.k) != (-1, 1):
            raise Unreadable
        return difference.constant


class _Distance:
    """``|query - key|``"""

    def __le__(self, other: Any) -> Rule:
        return Rule(low=-_whole(other), high=_whole(other))


class _Entry:
    """``table[batch, query]`` or ``table[batch, key]``"""

    def __init__(self, table: Tensor, index: Any) -> None:
        self.table, self.index = table, index

    def __eq__(self, other: object) -> Any:
        # table[b, q] == table[b, k]: the two are of one sequence. table[b, q] == table[b, q] would say nothing.
        if not isinstance(other, _Entry) or self.table is not other.table:
            raise Unreadable
        indices = (self.index, other.index)
        if indices not in ((("batch", _QUERY), ("batch", _KEY)), (("batch", _KEY), ("batch", _QUERY))):
            raise Unreadable
        return Rule(sequences=self.table)

    __hash__ = None  # type: ignore[assignment]

    def __bool__(self) -> Never:
        raise Unreadable


class _Reading(TorchFunctionMode):
    """Indexing a tensor with symbols gives an `_Entry`; nothing else can be done with them."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> _Entry:
        if func is not torch.Tensor.__getitem__:
            raise Unreadable
        return _Entry(*args)


_QUERY, _KEY = _Index(1, 0), _Index(0, 1)


def read(mask_function: Callable[..., Any]) -> Rule | None:
    """The rule that a mask function stands for, or None if it is another kind of function."""
    try:
        with _Reading():
            rule = mask_function("batch", "head", _QUERY, _KEY)
    except (Unreadable, AttributeError, TypeError, ValueError, IndexError, KeyError):  # symbols are not what it expects
        return None
    return rule if isinstance(rule, Rule) else None


def _whole(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
        raise Unreadable
    return value  # type: ignore[return-value]  # a SymInt while torch.compile traces


def _tighter(a: int | None, b: int | None, tighter: Callable[[int, int], int]) -> int | None:
    if a is None or b is None:
        return b if a is None else a
    return tighter(a, b)
