"""``flash_attn.ops``: the rotation of ``flash_attn.ops.triton.rotary`` is what there is."""
