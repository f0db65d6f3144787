"""``flash_attn.ops.triton``. Nothing in here needs Triton: what runs is `headwise.rope`."""
