"""The attention family: dense, packed, decoding, the probabilities themselves, and merging of partial results.

The rules that all of them share (grouped heads, positions, windows, masks, empty rows) are checked in `_arguments` and
described in docs/contract.md.
"""

from headwise.ops.attention.decode import attention_decode, attention_decode_call
from headwise.ops.attention.dense import attention, attention_backward, attention_backward_call, attention_call
from headwise.ops.attention.merge import (
    merge_attention,
    merge_attention_backward,
    merge_attention_backward_call,
    merge_attention_call,
)
from headwise.ops.attention.probs import (
    attention_probs,
    attention_probs_backward,
    attention_probs_backward_call,
    attention_probs_call,
)
from headwise.ops.attention.varlen import (
    attention_varlen,
    attention_varlen_backward,
    attention_varlen_backward_call,
    attention_varlen_call,
)

__all__ = [
    "attention",
    "attention_backward",
    "attention_backward_call",
    "attention_call",
    "attention_decode",
    "attention_decode_call",
    "attention_probs",
    "attention_probs_backward",
    "attention_probs_backward_call",
    "attention_probs_call",
    "attention_varlen",
    "attention_varlen_backward",
    "attention_varlen_backward_call",
    "attention_varlen_call",
    "merge_attention",
    "merge_attention_backward",
    "merge_attention_backward_call",
    "merge_attention_call",
]
