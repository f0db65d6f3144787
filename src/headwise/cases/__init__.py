"""The case tables, one module per op, shared by the tests, `headwise check` and the benchmarks."""

from __future__ import annotations

from headwise.cases import (
    attention,
    attention_decode,
    attention_probs,
    attention_varlen,
    cross_entropy,
    embedding,
    merge_attention,
    rms_norm,
    softmax,
    transpose,
)
from headwise.testing import Suite

SUITES: dict[str, Suite] = {
    suite.op: suite
    for suite in (
        attention.SUITE,
        attention_varlen.SUITE,
        attention_decode.SUITE,
        attention_probs.SUITE,
        merge_attention.SUITE,
        softmax.SUITE,
        cross_entropy.SUITE,
        embedding.SUITE,
        rms_norm.SUITE,
        transpose.SUITE,
    )
}
