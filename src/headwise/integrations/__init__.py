"""Other people's conventions, bridged to ours: one module per foreign API, imported when it is used.

An adapter translates a call and nothing else. What it cannot translate it refuses by name.
"""
