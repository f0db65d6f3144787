"""What each op means: one module per op. Nothing here knows how a kernel is written."""
