"""The attention maps of a demo, for the page to compute again from the queries and keys that the run saved.

The golden results are the probabilities in the run's folder. They are float32 results of some backend, so the
difference may be twice the error budget.

The page has a slider for the temperature. To find the parameters that depend on it, the program is recorded with a
second scale: parameters that differ between the two must be proportional to the scale.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

import torch

import headwise as hw
from headwise import testing
from headwise.cases import SUITES
from headwise.demo.record import LayerAttention
from headwise.nn.transformer import sliding_window
from headwise.testing import Arguments
from headwise.web.checks import Golden, in_memory_order, placed
from headwise.web.recording import Program, recording
from headwise.web.tiers import Tier


class Scaled(NamedTuple):
    """A parameter that is the scale of the scores times a constant."""

    dispatch: int
    byte: int
    value: float


class Map(NamedTuple):
    program: Program
    golden: Golden
    scaled: list[Scaled]


def maps(layer: LayerAttention, tiers: Sequence[Tier]) -> tuple[Map, ...]:
    """One layer's map for every tier."""
    arguments: Arguments = {
        "q": layer.q[None].contiguous(), "k": layer.k[None].contiguous(), "causal": True, "scale": layer.scale,
        "softcap": layer.softcap, "window": sliding_window(layer.window),
    }  # fmt: skip
    allowed = 2 * _budget(arguments)
    made = []
    for tier in tiers:
        program, doubled = (_record(arguments | {"scale": scale}, tier) for scale in (layer.scale, 2 * layer.scale))
        output = program.outputs["probs"]
        golden = Golden(in_memory_order(layer.probs[None], output), allowed, allowed)
        made.append(Map(program, golden, _scaled(program, doubled)))
    return tuple(made)


def _record(arguments: Arguments, tier: Tier) -> Program:
    with recording(tier.capabilities) as tape:
        probs = hw.attention_probs(**{name: placed(value) for name, value in arguments.items()})
        return tape.program({"probs": probs})


def _budget(arguments: Arguments) -> float:
    """The largest allowed error of a weight."""
    suite = SUITES["attention_probs"]
    truth = suite.reference(testing.upcast(arguments, torch.float64))["probs"]
    budget = testing.budget(truth, suite.reference(arguments)["probs"], torch.float32)
    return budget.max * budget.peak


def _scaled(program: Program, doubled: Program) -> list[Scaled]:
    found = []
    for i, (one, other) in enumerate(zip(program.dispatches, doubled.dispatches, strict=True)):
        if one.shader != other.shader or one.groups != other.groups:
            raise RuntimeError(f"{one.shader.name}: what is run depends on the scale")
        for byte in range(0, len(one.parameters), 4):
            value, twice = (struct.unpack_from("<f", d.parameters, byte)[0] for d in (one, other))
            if one.parameters[byte : byte + 4] != other.parameters[byte : byte + 4]:
                if twice != 2 * value:
                    raise RuntimeError(f"{one.shader.name}: {value} and {twice} at byte {byte} are not in proportion")
                found.append(Scaled(i, byte, value))
    return found
