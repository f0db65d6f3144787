from __future__ import annotations

import os

import hypothesis
import pytest
import torch

from headwise.config import settings

# The same random calls on every run and every machine; `--hypothesis-profile=deep` draws new ones, and many more.
hypothesis.settings.register_profile(
    "quick",
    max_examples=150,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=list(hypothesis.HealthCheck),
)
hypothesis.settings.register_profile(
    "deep", hypothesis.settings.get_profile("quick"), max_examples=3000, derandomize=False, print_blob=True
)
# A GPU in software computes as slowly as an interpreter.
hypothesis.settings.register_profile("software", hypothesis.settings.get_profile("quick"), max_examples=20)
hypothesis.settings.load_profile("quick")


def round_in_the_interpreter():
    """Triton's interpreter cuts digits off where it turns float32 into bfloat16; every GPU rounds to nearest even."""
    import triton.language as tl
    from triton.runtime import interpreter

    cast = interpreter.InterpreterBuilder.cast_impl

    def rounding_cast(self, source, target):
        if (source.dtype.scalar, target.scalar) != (tl.float32, tl.bfloat16):
            return cast(self, source, target)
        rounded = torch.from_numpy(source.data.copy()).to(torch.bfloat16).view(torch.int16).numpy()
        return interpreter.TensorHandle(rounded.view("uint16"), target.scalar)

    interpreter.InterpreterBuilder.cast_impl = rounding_cast


def patch_the_language_once():
    """Triton's interpreter patches its language at every call of a device function: a third of its time. Once is enough."""
    import triton.language as tl
    from triton.runtime import interpreter

    patch, restore = interpreter._patch_lang, interpreter._LangPatchScope.restore
    patched = set()  # by the launch that runs: which of `tl` and `tl.core` the modules of its functions name

    def patch_once(fn):
        languages = frozenset(id(value) for value in fn.__globals__.values() if value is tl or value is tl.core)
        if languages in patched:
            return interpreter._LangPatchScope()  # of a device function, which nobody restores
        patched.add(languages)
        return patch(fn)

    def restore_and_forget(scope):
        patched.clear()
        restore(scope)

    interpreter._patch_lang, interpreter._LangPatchScope.restore = patch_once, restore_and_forget


def pytest_configure(config):
    os.environ.pop("COLUMNS", None)  # a worker of xdist has one; tests that are about widths set their own
    config.addinivalue_line("markers", "slow: more of what other tests find faults with; `make test-all` runs them")
    if settings.triton_interpret:
        round_in_the_interpreter()
        patch_the_language_once()
    if hasattr(config, "workerinput"):
        # Several processes with as many threads each as there are cores wait for each other most of the time.
        torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def poisoned_memory():
    """Every torch.empty comes back full of NaN, so that an output nobody wrote is seen."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(before)


@pytest.fixture
def adapter_calls(monkeypatch):
    """What the Transformers adapter gave to our ops, in order: (op, arguments by position, keywords)."""
    import headwise.integrations.transformers as adapter

    class Calls(list):
        def __init__(self):
            super().__init__()
            self.dtypes = set()  # of the results

    calls = Calls()

    def watched(name, op):
        def spy(*args, **kwargs):
            calls.append((name, args, kwargs))
            out = op(*args, **kwargs)
            calls.dtypes.add(out.dtype)
            return out

        return spy

    for name in ("attention", "attention_varlen", "attention_decode"):
        monkeypatch.setattr(adapter, name, watched(name, getattr(adapter, name)))
    return calls
