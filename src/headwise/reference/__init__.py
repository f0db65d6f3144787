"""The oracle: every op written as its formula, in plain PyTorch, slow and obviously right.

Each function computes in the dtype of its inputs. In float64 it is the truth that backends are measured against; in the
dtype under test it is the plain PyTorch whose own error sets the budget (see `headwise.testing`). Gradients come from
autograd. Within Headwise only tests and `headwise check` call it.

>>> out, lse = hw.reference.attention(q, k, v, causal=True)
"""

import importlib
import inspect
import pkgutil
from typing import Any

# Every function of every module, so that `reference.softmax` is the function and not the module it is in.
for _found in pkgutil.iter_modules(__path__):
    _module = importlib.import_module(f"{__name__}.{_found.name}")
    for _name, _value in inspect.getmembers(_module, inspect.isfunction):
        if _value.__module__ == _module.__name__ and not _name.startswith("_"):
            globals()[_name] = _value


def __getattr__(name: str) -> Any:  # for type checkers, which do not see the loop
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
