"""Generation, one byte at a time, over a growing cache of keys and values; and the check that decoding computes what a
full forward pass computes."""

from __future__ import annotations

import copy
import sys

import torch
from torch import Tensor

from headwise.demo import plain
from headwise.demo.packing import Packing
from headwise.demo.record import DecodeCheck
from headwise.nn import TransformerLM
from headwise.testing import rounding_band


class Decoder:
    """A model with its cache: `feed` takes the next bytes and returns the logits of the one after them."""

    def __init__(self, model: TransformerLM, capacity: int) -> None:
        self.model, self.cache = model, model.cache(1, capacity)
        # Nothing beyond the length may reach a result.
        self.cache.keys.fill_(torch.nan)
        self.cache.values.fill_(torch.nan)

    @torch.no_grad()
    def feed(self, text: bytes) -> Tensor:
        """Logits (256,)."""
        ids = torch.tensor([list(text)], device=self.cache.keys.device)
        self.cache.extend(len(text))
        logits: Tensor = self.model(ids, cache=self.cache)[0, -1]
        return logits


def generate(model: TransformerLM, prompt: bytes, count: int, *, seed: int, temperature: float = 0.7) -> bytes:
    """``count`` bytes that follow the prompt, each drawn from the model's distribution."""
    generator = torch.Generator().manual_seed(seed)
    decoder = Decoder(model, len(prompt) + count)
    logits = decoder.feed(prompt)
    made = b""
    while True:
        # Drawn on the CPU in float64, so that the same logits give the same text on every device.
        chances = torch.softmax(logits.cpu().double() / temperature, -1)
        made += bytes([int(torch.multinomial(chances, 1, generator=generator))])
        if len(made) == count:
            return made
        logits = decoder.feed(made[-1:])


@torch.no_grad()
def check_decoding(model: TransformerLM, text: bytes) -> DecodeCheck:
    """Logits of decoding ``text`` byte by byte against those of one forward pass over all of it.

    The tolerance follows from the error budget of Headwise (see `headwise.testing`): a float32 result may be off by
    twice the error of plain PyTorch in float32 plus a rounding band, against plain PyTorch in float64 on the same
    weights. Decoding and the forward pass may be off in opposite directions, so their difference may be twice as large.
    """
    ids = torch.tensor(list(text), device=model.embedding.weight.device)
    packing = Packing.of([len(text)], ids.device)
    decoder = Decoder(model, len(text))
    decoded = torch.stack([decoder.feed(bytes([byte])) for byte in text])
    whole = model(ids, packing=packing)
    rounded = plain.logits(model, ids, packing).cpu().double()
    # On the CPU: not every GPU has float64.
    truth = plain.logits(copy.deepcopy(model).cpu().double(), ids.cpu(), Packing.of([len(text)]))
    budget = 2 * (rounded - truth).abs().max() + rounding_band(torch.float32) * truth.abs().max()
    difference = (decoded.cpu().double() - whole.cpu().double()).abs().max()
    # JSON has no NaN: the largest float stands for it.
    return DecodeCheck(len(text), difference.nan_to_num(nan=sys.float_info.max).item(), 2 * budget.item())
