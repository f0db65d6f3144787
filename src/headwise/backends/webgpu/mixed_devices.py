"""An operator that was given tensors here and elsewhere: which of them is where."""

from __future__ import annotations

from typing import Any

from torch import Tensor


class MixedDevices(RuntimeError):
    """Tensors of one call are on several devices."""


def explained(func: Any, args: Any, kwargs: Any) -> MixedDevices | None:
    """The error for a call whose tensors are on several devices; None for others."""
    places: list[tuple[str, Tensor]] = []
    for place, argument in enumerate(func._schema.arguments):
        x = args[place] if place < len(args) else kwargs.get(argument.name)
        if isinstance(x, Tensor):
            places.append((argument.name, x))
        elif isinstance(x, (list, tuple)):
            places += [(f"{argument.name}[{i}]", y) for i, y in enumerate(x) if isinstance(y, Tensor)]
    devices = {x.device for _, x in places}
    if len(devices) < 2:
        return None
    listed = ", ".join(f"{name} on {x.device}" for name, x in places)
    elsewhere = next(name for name, x in places if x.device.type != "webgpu")
    return MixedDevices(
        f"headwise: {func} was given {listed}. Expected all tensors to be on the same device: bring {elsewhere} there with "
        ".to('webgpu'), or the others to it"
    )
