"""Programs as JSON and blocks of bytes, as the page's ``program.js`` reads them."""

from __future__ import annotations

import base64
import hashlib
import json
from dataclasses import dataclass, field
from typing import Any

from headwise.ops._checks import short
from headwise.web.recording import Buffer, Output, Program, Shader


@dataclass
class Data:
    """Blocks of bytes one after the other, each aligned to four bytes; equal ones are stored once."""

    content: bytearray = field(default_factory=bytearray)
    known: dict[bytes, tuple[int, int]] = field(default_factory=dict)

    def add(self, block: bytes) -> tuple[int, int]:
        """The offset and size of the block."""
        if block not in self.known:
            self.known[block] = len(self.content), len(block)
            self.content += block + b"\0" * (-len(block) % 4)
        return self.known[block]


def describe(program: Program, data: Data, shaders: dict[str, Shader]) -> dict[str, Any]:
    """The program; what is in its buffers goes to ``data``, its kernels to ``shaders``."""
    places = {buffer: i for i, buffer in enumerate(program.buffers)}
    buffers = []
    for buffer in program.buffers:
        said: dict[str, Any] = {"size": buffer.size}
        if buffer.random is not None:
            said["random"] = short(buffer.random)
        elif buffer.content is not None:
            said["data"] = data.add(buffer.content)
        buffers.append(said)
    dispatches = [
        {
            "shader": _key(dispatch.shader, shaders),
            "groups": dispatch.groups,
            "parameters": base64.b64encode(dispatch.parameters).decode(),
            "bound": [
                places[b.buffer] if b.size == b.buffer.size else [places[b.buffer], b.first, b.size]
                for b in dispatch.bound
            ],
        }
        for dispatch in program.dispatches
    ]
    return {
        "buffers": buffers, "dispatches": dispatches, "prepared": program.prepared,
        "outputs": described_places(program.outputs, places),
    }  # fmt: skip


def described_places(found: dict[str, Output], places: dict[Buffer, int]) -> list[dict[str, Any]]:
    """Where tensors lie; places: the number of each buffer."""
    return [
        {
            "name": name, "buffer": places[one.buffer], "first": one.first, "dtype": short(one.dtype), "shape": one.shape,
        }
        for name, one in found.items()
    ]  # fmt: skip


def texts(shaders: dict[str, Shader]) -> dict[str, Any]:
    return {key: {"text": shader.text, "writes": shader.writes} for key, shader in sorted(shaders.items())}


def as_json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def _key(shader: Shader, shaders: dict[str, Shader]) -> str:
    key = f"{shader.name}-{hashlib.sha256(shader.text.encode()).hexdigest()[:12]}"
    shaders[key] = shader
    return key
