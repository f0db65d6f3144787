"""The attention family: dense, packed, decoding, the probabilities themselves, and merging of partial results.

The rules that all of them share (grouped heads, positions, windows, masks, empty rows) are checked in `_arguments` and
described in docs/contract.md.
"""

from headwise.ops.attention.decode import attention_decode
from headwise.ops.attention.dense import attention, attention_backward
from headwise.ops.attention.merge import merge_attention, merge_attention_backward
from headwise.ops.attention.probs import attention_probs, attention_probs_backward
from headwise.ops.attention.varlen import attention_varlen, attention_varlen_backward

__all__ = [
    "attention", "attention_backward", "attention_decode", "attention_probs", "attention_probs_backward",
    "attention_varlen", "attention_varlen_backward", "merge_attention", "merge_attention_backward",
]  # fmt: skip
