"""The constants of a compiled kernel, by name."""

from __future__ import annotations

from typing import Any

from headwise.backends.triton.hopper.gluon_names import Members, constexpr_function, gl


class Constants:
    """A variant inside a kernel, where every ``X.name`` has to be a ``constexpr``."""

    def __init__(self, **values: Any) -> None:
        for name, value in values.items():
            setattr(self, name, gl.constexpr(value))


@constexpr_function
def constants(variant: Any) -> Any:
    return Constants(**Members(variant))
