"""Scales of flash_attn that are 0 or below, in all of its functions."""

from __future__ import annotations

import pytest
from test_integration_flash_attn import cumulated, normal, same, slopes, written_out

from headwise.integrations import flash_attn


@pytest.mark.parametrize("scale", [0.0, -0.6])
def test_scales_that_are_not_positive(scale):
    """In every function; 0 is the mean of what is seen."""
    q, k, v = (
        normal(2, 5, 4, 8, grad=True),
        normal(2, 9, 2, 8, seed=1, grad=True),
        normal(2, 9, 2, 8, seed=2, grad=True),
    )
    for alibi in (None, slopes(4)):
        wanted, lse, _ = written_out(q, k, v, scale=scale, causal=True, alibi=alibi)
        got = flash_attn.flash_attn_func(q, k, v, 0.0, scale, True, alibi_slopes=alibi, return_attn_probs=True)
        same(got[0], wanted, (q, k, v))
        same(got[1], lse)
        cu_q, cu_k = cumulated([5, 5]), cumulated([9, 9])
        packed = flash_attn.flash_attn_varlen_func(
            *(x.flatten(0, 1) for x in (q, k, v)), cu_q, cu_k, 5, 9, 0.0, scale, True, alibi_slopes=alibi
        )
        wanted, _, _ = written_out(q, k, v, scale=scale, causal=True, alibi=alibi)
        same(packed.view(wanted.shape), wanted, (q, k, v))
        cached = flash_attn.flash_attn_with_kvcache(
            q.detach(), k.detach(), v.detach(), softmax_scale=scale, causal=True, alibi_slopes=alibi
        )
        same(cached, wanted.detach())
    for wrong in (float("nan"), float("inf")):
        with pytest.raises(NotImplementedError, match="flash_attn_func: softmax_scale is"):
            flash_attn.flash_attn_func(q, k, v, softmax_scale=wrong)
    for wrong in (1.0, -0.5):
        with pytest.raises(NotImplementedError, match=r"dropout_p is .* below 1"):
            flash_attn.flash_attn_func(q, k, v, wrong)
