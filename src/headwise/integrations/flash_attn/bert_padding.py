"""Padding off and on: the helpers of ``flash_attn.bert_padding``, in plain PyTorch with its autograd."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def index_first_axis(input: Tensor, indices: Tensor) -> Tensor:
    """The rows ``input[indices]`` of an input of at least two dims."""
    return input.index_select(0, indices)


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """Zeros of ``first_axis_dim`` rows, with the values in the rows ``indices``."""
    return values.new_zeros((first_axis_dim, *values.shape[1:])).index_copy(0, indices, values)


def index_first_axis_residual(input: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """The rows, and the input itself."""
    return input.index_select(0, indices), input


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """The tokens of a padded batch ``(B, S, …)`` end to end.

    attention_mask  ``(B, S)``, bool or int: 1 for tokens
    unused_mask     ``(B, S)``: 1 for tokens that are kept in place but are not used

    Gives the tokens ``(T, …)``, where they were in the flattened batch ``(T,)``, cu_seqlens ``(B + 1,)`` int32, the longest
    sequence, and how many tokens of each sequence are used ``(B,)`` int32.
    """
    kept = attention_mask if unused_mask is None else attention_mask + unused_mask
    tokens, indices, cu_seqlens, longest = _pack(hidden_states, kept, kept.sum(-1, dtype=torch.int32))
    return tokens, indices, cu_seqlens, longest, attention_mask.sum(-1, dtype=torch.int32)


def unpad_input_for_concatenated_sequences(
    hidden_states: Tensor, attention_mask_in_length: Tensor
) -> tuple[Tensor, Tensor, Tensor, int]:
    """The same where each row of the batch is several sequences: ``attention_mask_in_length`` ``(B, S)`` begins with their
    lengths, and is 0 after those."""
    lengths = attention_mask_in_length
    kept = torch.arange(lengths.shape[1], device=lengths.device) < lengths.sum(-1, keepdim=True)
    return _pack(hidden_states, kept, lengths[lengths > 0])


def _pack(hidden_states: Tensor, kept: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor, Tensor, int]:
    indices = kept.flatten().nonzero().flatten()
    cu_seqlens = F.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    longest = int(lengths.max()) if lengths.numel() else 0
    return index_first_axis(hidden_states.flatten(0, 1), indices), indices, cu_seqlens, longest


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """Tokens ``(T, …)`` back where they were in a batch ``(B, S, …)``, zeros around them."""
    return index_put_first_axis(hidden_states, indices, batch * seqlen).unflatten(0, (batch, seqlen))
