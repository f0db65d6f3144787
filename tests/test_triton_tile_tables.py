"""The tile tables: every shape class has a row, users may bring a table of their own, and a wide bias gets fewer stages."""

from __future__ import annotations

import json

import pytest
import torch
from ahead_of_time import Recorded

from headwise.backends.triton import hopper, tile_sizes
from headwise.backends.triton.attention_forward import attention_forward
from headwise.backends.triton.gpu import KNOWN, Gpu
from headwise.backends.triton.parameters import beside_bias
from headwise.backends.triton.tile_sizes import AttentionTile
from headwise.ops.attention._arguments import Attention, Flags

KERNELS = ("attention_forward", "attention_backward_queries", "attention_backward_keys")
# Gradients of such heads do not fit: `explain` says so.
MISSING = {("sm_86", "attention_backward_queries", 32, 512), ("sm_86", "attention_backward_keys", 32, 512)}


@pytest.mark.parametrize("arch", KNOWN)
def test_tables_are_complete(arch):
    content = json.loads((tile_sizes.TABLES / f"{arch}.json").read_text())
    assert content["architecture"] == arch
    for kernel in KERNELS:
        for bits in (16, 32):
            for dim in (16, 32, 64, 128, 256, 512):
                there = tile_sizes.covers(kernel, bits, dim, arch)
                assert there == ((arch, kernel, bits, dim) not in MISSING)


def test_a_table_of_the_users_own(tmp_path, monkeypatch):
    own = {"queries": 32, "keys": 16, "warps": 4, "stages": 1}
    path = tmp_path / "tiles.json"
    path.write_text(json.dumps({"tiles": {"attention_forward": {"16-bit, head dim 64": own}}}))
    monkeypatch.setattr(tile_sizes.settings, "tiles", str(path))
    tile_sizes.forget()
    try:
        assert tile_sizes.tile("attention_forward", 16, 50, False, "sm_80") == AttentionTile(**own)
        assert tile_sizes.tile("attention_forward", 16, 128, False, "sm_80").queries > 32  # not in it: ours
        path.write_text("{")
        tile_sizes.forget()
        with pytest.raises(ValueError, match="cannot be read"):
            tile_sizes.tile("attention_forward", 16, 64, False, "sm_80")
    finally:
        monkeypatch.setattr(tile_sizes.settings, "tiles", None)
        tile_sizes.forget()


def test_a_float32_bias_takes_stages_where_it_would_not_fit():
    """dq of heads of 256 on sm_90: its tiles and three of the bias need 262144 bytes, of which there are 232448."""
    tile, row = AttentionTile(queries=128, keys=32, warps=8, stages=3), 2 * 256 * 2

    def stages(arch, dtype, shape=(1, 8, 128, 32)):
        bias = None if dtype is None else torch.empty(shape, dtype=dtype, device="meta")
        return beside_bias(Gpu(KNOWN[arch], tf32=False), tile, bias, tile.keys * row, tile.queries * row).stages

    assert stages("sm_90", torch.float32) == 2
    assert [stages("sm_90", None), stages("sm_90", torch.bfloat16), stages("gfx942", torch.float32)] == [3, 3, 3]
    assert stages("sm_86", torch.float32) == 1


def test_strides_beyond_reach_are_refused(monkeypatch):
    """Inside a tile rows are found with 32-bit offsets: what they do not reach must not be launched."""
    monkeypatch.setattr(hopper, "missing", lambda gpu: "not here")
    q, k = (torch.empty(1, 1, 130, 16, dtype=torch.bfloat16, device="meta") for _ in range(2))
    far = torch.empty_strided(q.shape, (2**40, 2**40, 35_000_000, 1), dtype=q.dtype, device="meta")
    flags = Flags(left=-1, right=0, scale=0.1, softcap=0.0, deterministic=True)
    for tensors in ((far, q, k), (q, far, k), (q, k, far)):
        with pytest.raises(ValueError, match="35000000 elements from token to token"):
            Recorded(attention_forward, Attention(*tensors, *[None] * 7, flags, True))
