"""``flash_attn.layers``: rotary embedding is what there is."""
