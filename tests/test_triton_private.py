"""Launching a compiled kernel past Triton's own Python: only in releases that are known to look as they should."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from headwise.backends.triton import private


def _old_launch(launcher: Any) -> Any:
    """As Triton 3.6 wraps its C function where a kernel has descriptors."""

    def wrapped(*args):
        return launcher(*args)

    return wrapped


class CudaLauncher:
    global_scratch_size = profile_scratch_size = 0
    launch_cooperative_grid, launch_pdl = False, True
    arg_annotations, kernel_signature = "annotations", "signature"

    def __init__(self, launch: Any) -> None:
        self.launch = launch


def _compiled(launcher: Any, described: Any = None) -> Any:
    metadata = SimpleNamespace(tensordesc_meta=described)
    return SimpleNamespace(run=launcher, function="function", packed_metadata="packed", metadata=metadata)


def test_how_a_known_release_is_launched_directly(monkeypatch):
    monkeypatch.setattr(private, "_RELEASE", (3, 6))
    found = private.direct(_compiled(CudaLauncher(_old_launch(print)), ["meta"]))
    assert found == private.Direct(
        print, ("function", False, True, None, None, "packed", None, None, None), False, ["meta"]
    )
    assert private.direct(_compiled(CudaLauncher(print))).call is print
    for release in ((3, 7), (3, 9)):
        monkeypatch.setattr(private, "_RELEASE", release)
        found = private.direct(_compiled(CudaLauncher(print)))
        before = ("function", False, True, "packed", None, None, None, None, None, "annotations", "signature")
        assert found == private.Direct(print, before, True, None)


class HIPLauncher(CudaLauncher):
    pass


class ScratchLauncher(CudaLauncher):
    global_scratch_size = 8


ScratchLauncher.__name__ = "CudaLauncher"


@pytest.mark.parametrize(
    ("release", "compiled"),
    [
        ((3, 6), _compiled(HIPLauncher(print))),
        ((3, 6), _compiled(ScratchLauncher(print))),
        ((3, 6), _compiled(CudaLauncher(lambda *args: None))),
        ((3, 6), SimpleNamespace(run=print)),
        ((3, 8), _compiled(CudaLauncher(print), ["meta"])),
        ((3, 8), _compiled(CudaLauncher(_old_launch(print)))),
        ((4, 0), _compiled(CudaLauncher(print))),
    ],
    ids=["HIP", "scratch", "no C function", "no launcher", "3.8 with descriptors", "3.8 in Python", "a new release"],
)
def test_what_is_not_known_is_not_launched_directly(monkeypatch, release, compiled):
    monkeypatch.setattr(private, "_RELEASE", release)
    assert private.direct(compiled) is None


def test_the_installed_release_is_known():
    assert (3, 6) <= private._RELEASE <= (3, 9), "look at private.direct: does it know how this release launches?"
