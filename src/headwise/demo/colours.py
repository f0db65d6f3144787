"""The colours of attention, the same in the report and in the pictures.

A weight p is coloured by its square root: most weights are small and would not show on a linear scale. Lightness is
monotonic along each scale, so that it can be read in grey too.
"""

from __future__ import annotations

# From weight 0 to weight 1, in even steps.
LIGHT = ("#f3efe6", "#d3e3cf", "#9fcdb4", "#5aae9d", "#2b8588", "#215b78", "#1e3160")
DARK = ("#1c242b", "#1c3f4a", "#1c6266", "#358a78", "#76b383", "#c0d693", "#fbf4c6")
NOT_A_WEIGHT = "#e0245e"  # NaN, outside of 0 to 1, or on a key that the query may not see

OURS, PLAIN = "#2a7f62", "#e0a63c"  # the two loss curves
