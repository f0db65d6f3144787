"""A mask as a description instead of a table: what `headwise` attention needs to know, in O(S) memory.

To the code of a model it is a bool tensor of shape ``(B, 1, Sq, Sk)``, so Transformers hands it from layer to layer like
any prepared mask. Our attention function reads the description. Whoever slices it or combines it with other masks gets the
real mask, built on the spot.

Models that never look up their attention by name have masks made under our name all the same, and use them as the numbers
that eager attention has: they add them to their scores, or fill where they are not zero. A mask that says where one may
attend would do the wrong thing there and nobody would notice, so it is refused.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Self

import torch
from torch import Tensor


class Packed(NamedTuple):
    """Where the sequences of a packed batch begin, with the batch laid end to end."""

    cu_seqlens: Tensor  # (sequences + 1,) int32
    max_seqlen: int  # the longest sequence, or more
    whole_rows: bool  # nothing is packed: each row of the batch is one sequence


class BuiltMask(Tensor):
    """A bool mask ``(B, 1, Sq, Sk)``, True = may attend. Its views are of its kind, and none of them is a number."""

    def built(self) -> Tensor:
        """The mask itself, a plain bool tensor ``(B, 1, Sq, Sk)``."""
        return self.as_subclass(Tensor)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _ABOUT:
            return super().__torch_function__(func, types, args, kwargs)
        name = getattr(func, "__name__", "")
        filled = name.strip("_") == "masked_fill" and isinstance(
            kwargs.get("mask", args[1] if args[1:] else None), BuiltMask
        )
        if filled or (name.strip("_") in _AS_NUMBERS and _numbers_beside(name, args, kwargs)):
            raise NotImplementedError(
                f"headwise attention: the model uses its attention mask as numbers ({name}): it has attention code of its "
                "own and would not call ours; load it with attn_implementation='eager'"
            )
        result = func(*(_built(x) for x in args), **{name: _built(x) for name, x in kwargs.items()})
        return result.as_subclass(BuiltMask) if name in _VIEWS and isinstance(result, Tensor) else result


class CompactMask(BuiltMask):
    """Query i of the call is at position ``p = i + (kv_lengths[b] if given, else keys) - Sq`` and sees key j iff

    * ``p - left <= j <= p + right`` for ``window = (left, right)``, None on a side being no bound,
    * ``j < kv_lengths[b]`` where there are kv_lengths, and ``j < keys``,
    * ``padding[b, 0, 0, j]`` where there is padding,
    * ``sequences[b, i] == sequences[b, j]`` where there are packed sequences.
    """

    sizes: tuple[int, int, int, int]  # its shape; asking a tensor of a class of our own for it takes 3 µs
    window: tuple[int | None, int | None]
    keys: int  # keys from there on are not there yet: the free end of a static cache
    kv_lengths: Tensor | None  # (B,) ints: the same, where only the device knows
    padding: Tensor | None  # (B, 1, 1, Sk) bool
    sequences: Tensor | None  # (B, S) ints, Sq == Sk
    packed: Packed | None  # `packing` of the sequences, once it was asked for

    @staticmethod
    def of(
        shape: tuple[int, int, int, int], device: Any, window: tuple[int | None, int | None], keys: int,
        kv_lengths: Tensor | None = None, padding: Tensor | None = None, sequences: Tensor | None = None,
    ) -> CompactMask:  # fmt: skip
        """One element of memory, seen as all of ``shape``."""
        mask = torch.ones((), dtype=torch.bool, device=device).expand(shape).as_subclass(CompactMask)
        mask.sizes, mask.window, mask.keys, mask.kv_lengths = shape, window, keys, kv_lengths
        mask.padding, mask.sequences, mask.packed = padding, sequences, None
        return mask

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _UNCHANGED:
            return args[0]
        if func is torch.Tensor.to and not _numbers_beside("to", args, kwargs):
            return args[0].moved(*args[1:], **kwargs)
        return super().__torch_function__(func, types, args, kwargs)

    def moved(self, *to: Any, **options: Any) -> Self:
        """On another device, for models that are spread over several."""
        target = torch.empty(0, dtype=torch.bool, device=self.device).to(*to, **options).device
        if target == self.device:
            return self
        tensors = (None if x is None else x.to(target) for x in (self.kv_lengths, self.padding, self.sequences))
        mask = CompactMask.of(self.sizes, target, self.window, self.keys, *tensors)
        if self.packed is not None:
            mask.packed = self.packed._replace(cu_seqlens=self.packed.cu_seqlens.to(target))
        return mask  # type: ignore[return-value]

    def built(self) -> Tensor:
        batch, _, queries, keys = self.sizes
        key = torch.arange(keys, device=self.device)
        if self.kv_lengths is None:
            end = torch.full((1, 1, 1, 1), self.keys, device=self.device)
        else:
            end = self.kv_lengths.view(-1, 1, 1, 1)
        position = torch.arange(queries, device=self.device).view(-1, 1) + end - queries  # (B or 1, 1, Sq, 1)
        left, right = self.window
        seen = key < end
        if left is not None:
            seen = seen & (key >= position - left)
        if right is not None:
            seen = seen & (key <= position + right)
        if self.padding is not None:
            seen = seen & self.padding
        if self.sequences is not None:
            seen = seen & (self.sequences[:, None, :, None] == self.sequences[:, None, None, :])
        return seen.expand(batch, 1, queries, keys)

    def packing(self) -> Packed | None:
        """The packed sequences as offsets; None where a sequence is in several pieces, which offsets cannot say.

        How many there are is only known on the device. It is read once for all layers; Transformers itself reads the same
        position_ids a moment before. While torch.compile traces nothing is read: there are offsets for as many sequences as
        tokens, of which those past the last are empty.
        """
        assert self.sequences is not None
        if self.packed is not None:
            return self.packed
        if torch.compiler.is_compiling():
            return offsets_of(self.sequences, None)
        pieces = (self.sequences.diff(dim=-1) < 0).sum()
        count, in_pieces = torch.stack([_starts(self.sequences).sum(), pieces]).tolist()
        if in_pieces:
            return None
        self.packed = offsets_of(self.sequences, count)
        return self.packed


def offsets_of(sequences: Tensor, count: int | None) -> Packed:
    """The offsets of packed sequences ``(B, S)``, laid end to end. count: how many; None: only the device knows."""
    batch, length = sequences.shape
    tokens = batch * length
    starts = _starts(sequences).flatten()
    room = tokens if count is None else count
    # Every start goes to its place in the list, every other token to the last entry, which is overwritten.
    place = torch.where(starts, starts.cumsum(0) - 1, room)
    offsets = torch.full((room + 1,), tokens, dtype=torch.int64, device=sequences.device)
    offsets = offsets.scatter(0, place, torch.arange(tokens, device=sequences.device))
    last = torch.full((1,), tokens, dtype=torch.int64, device=sequences.device)
    if count is None:
        # A sequence in two pieces cannot be packed: offsets that make no sense give NaN instead of a wrong answer.
        last = torch.where((sequences.diff(dim=-1) < 0).any(), -1, last)
    return Packed(torch.cat([offsets[:-1], last]).to(torch.int32), length, whole_rows=count == batch)


def _starts(sequences: Tensor) -> Tensor:
    """(B, S) bool: the first token of each sequence. None goes on from one row of the batch to the next."""
    first = torch.ones_like(sequences[:, :1], dtype=torch.bool)
    return torch.cat([first, sequences[:, 1:] != sequences[:, :-1]], dim=-1)


def _built(x: Any) -> Any:
    if isinstance(x, BuiltMask):
        return x.built()
    return type(x)(_built(y) for y in x) if type(x) in (list, tuple) else x


def _numbers_beside(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a mask meets numbers: an operand that is not bool, or a dtype to become."""
    if name in ("float", "half", "bfloat16", "double", "int", "long"):
        return True
    values = (*args, *kwargs.values())
    if name in ("to", "type", "type_as"):
        kinds = [x.dtype if isinstance(x, Tensor) else x for x in values]
        return any(isinstance(x, torch.dtype) and x != torch.bool for x in kinds)
    return any(x.dtype != torch.bool if isinstance(x, Tensor) else type(x) in (int, float) for x in values)


def _getters(*names: str) -> set[Any]:
    return {getattr(torch.Tensor, name).__get__ for name in names}


# Questions about the tensor that the description leaves as they are.
_ABOUT = (
    torch.overrides.get_default_nowrap_functions()
    | _getters("shape", "dtype", "device", "ndim", "requires_grad", "layout")
    | {
        torch.Tensor.size, torch.Tensor.stride, torch.Tensor.dim, torch.Tensor.numel, torch.Tensor.storage_offset,
        torch.Tensor.is_contiguous, torch.Tensor.is_floating_point, torch.is_floating_point, torch.Tensor.is_complex,
        torch.is_complex, torch.Tensor.__len__, torch.Tensor.as_subclass,
    }
)  # fmt: skip
# Without the underscores of operators and of functions that work in place.
_AS_NUMBERS = {
    "add", "radd", "iadd", "sub", "rsub", "isub", "mul", "rmul", "imul", "div", "truediv", "baddbmm", "addmm", "addcmul",
    "eq", "ne", "lt", "le", "gt", "ge", "float", "half", "bfloat16", "double", "int", "long", "to", "type", "type_as",
}  # fmt: skip
_VIEWS = {
    "__getitem__", "expand", "view", "reshape", "unsqueeze", "squeeze", "repeat", "repeat_interleave", "narrow", "select",
    "contiguous", "clone", "detach", "to", "bool", "cuda", "cpu", "permute", "transpose", "flatten", "unflatten",
    "index_select",
}  # fmt: skip
_UNCHANGED = {torch.Tensor.detach, torch.Tensor.contiguous, torch.Tensor.clone, torch.Tensor.bool}
