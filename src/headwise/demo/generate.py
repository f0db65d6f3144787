"""Generation, one byte at a time, with `attention_decode` over a cache of keys and values that grows; and the check that
decoding computes what a full forward pass computes."""

from __future__ import annotations

import sys

import torch
from torch import Tensor

import headwise as hw
from headwise.demo.model import HEAD_DIM, Transformer, contract_window, plain_ops
from headwise.demo.packing import Packing
from headwise.demo.record import DecodeCheck
from headwise.testing import rounding_band


class Decoder:
    """A model with its cache: `feed` takes the next byte and gives the logits of the one after it."""

    def __init__(self, model: Transformer, backend: str, capacity: int) -> None:
        shape = model.shape
        self.model, self.backend, self.length = model, backend, 0
        device = model.table.device
        # NaN, not zero: what lies beyond the length must not reach any result.
        full = (shape.layers, 1, shape.key_heads, capacity, HEAD_DIM)
        self.keys = torch.full(full, torch.nan, device=device)
        self.values = torch.full(full, torch.nan, device=device)

    @torch.no_grad()
    def feed(self, byte: int) -> Tensor:
        """Logits (256,)."""
        device = self.model.table.device
        position = self.length
        self.length += 1
        lengths = torch.tensor([self.length], dtype=torch.int32, device=device)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            """q (1, Hq, D), k and v (1, Hk, D): a batch of one sequence as well as one packed token."""
            self.keys[layer, :, :, position] = k
            self.values[layer, :, :, position] = v
            window = contract_window(self.model.shape.window_of(layer))
            out = hw.attention_decode(
                q, self.keys[layer], self.values[layer], lengths, window=window, backend=self.backend
            )
            assert isinstance(out, Tensor)
            return out

        ids, positions = torch.tensor([[byte], [position]], device=device)
        return self.model.run(ids, positions, attend)[0]


def generate(
    model: Transformer, backend: str, prompt: bytes, count: int, *, seed: int, temperature: float = 0.7
) -> bytes:
    """``count`` bytes that follow the prompt, each drawn from the model's distribution."""
    generator = torch.Generator().manual_seed(seed)
    decoder = Decoder(model, backend, len(prompt) + count)
    for byte in prompt:
        logits = decoder.feed(byte)
    made = bytearray()
    while True:
        # Drawn on the CPU in float64, so that the same logits give the same text on every device.
        chances = torch.softmax(logits.cpu().double() / temperature, -1)
        made.append(int(torch.multinomial(chances, 1, generator=generator)))
        if len(made) == count:
            return bytes(made)
        logits = decoder.feed(made[-1])


@torch.no_grad()
def check_decoding(model: Transformer, backend: str, text: bytes) -> DecodeCheck:
    """Logits of decoding ``text`` byte by byte against those of one forward pass over all of it.

    How far apart they may be is not picked by hand. The error budget of Headwise (see `headwise.testing`) lets a float32
    result be off by twice the error of plain PyTorch in float32 plus a rounding band, the truth being plain PyTorch in
    float64 on the same weights. Decoding and the forward pass may each use up that budget, in opposite directions: so
    their difference may be twice as large, for every logit.
    """
    ids = torch.tensor(list(text), device=model.table.device)
    packing = Packing.of([len(text)], ids.device)
    decoder = Decoder(model, backend, len(text))
    decoded = torch.stack([decoder.feed(byte) for byte in text])
    whole = model(ids, packing)
    plain = _on_plain_ops(model, torch.float32)(ids, packing).double()
    truth = _on_plain_ops(model, torch.float64)(ids, packing)
    budget = 2 * (plain - truth).abs().max() + rounding_band(torch.float32) * truth.abs().max()
    difference = (decoded.double() - whole.double()).abs().max()
    # JSON has no NaN: it is as far away as can be.
    return DecodeCheck(len(text), difference.nan_to_num(nan=sys.float_info.max).item(), 2 * budget.item())


def _on_plain_ops(model: Transformer, dtype: torch.dtype) -> Transformer:
    copy = Transformer(model.shape, plain_ops(), seed=None).to(model.table.device, dtype)
    copy.load_state_dict(model.state_dict())
    return copy
