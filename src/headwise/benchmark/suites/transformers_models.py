"""A Llama of Hugging Face Transformers with our attention and `patch`, against the same model with PyTorch's attention.

A training step is the loss and the gradients of all weights. Decoding is one new token over a static cache, as it is in the
middle of a generation, replayed as a CUDA graph: the host has no part in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headwise.benchmark.case import Absent, BenchCase, Contender
from headwise.benchmark.correctness import WholeCheck
from headwise.benchmark.requirements import AtLeast, MemoryShare
from headwise.testing import Arguments, Maker, Outputs

SDPA, COMPILED = "Transformers, SDPA", "Transformers, torch.compile"
LIGER, LIGER_FA4 = "Transformers, Liger + SDPA", "Transformers, Liger + FA4"
FA4 = "flash_attention_4"  # as Transformers has it


class Shape(NamedTuple):
    vocabulary: int
    dim: int
    layers: int
    heads: int
    key_heads: int
    hidden: int
    positions: int


LLAMA = Shape(128256, 2048, 16, 32, 16, 8192, 4096)
TINY = Shape(256, 64, 2, 4, 2, 128, 64)


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise Absent("Transformers is not installed: pip install 'headwise[transformers]'") from error
    return transformers


def _config(shape: Shape) -> Any:
    return _transformers().LlamaConfig(
        vocab_size=shape.vocabulary, hidden_size=shape.dim, num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads, num_key_value_heads=shape.key_heads, intermediate_size=shape.hidden,
        max_position_embeddings=shape.positions, tie_word_embeddings=True, pad_token_id=None,
    )  # fmt: skip


def _model(shape: Shape, attention: str, device: Any) -> Any:
    """The model without weights, but for the angles of its rotary embedding."""
    from headwise.integrations import transformers as adapter

    config = _config(shape)
    adapter.register()
    config._attn_implementation = attention
    with torch.device("meta"):
        model = _transformers().LlamaForCausalLM(config)
    with torch.device(device):
        model.model.rotary_emb = type(model.model.rotary_emb)(config)
    return model


def _filled(model: Any, weights: Arguments) -> Any:
    """The model with these tensors for its weights; they need not be parameters, and may want gradients."""
    for name, weight in {**weights, "lm_head.weight": weights["model.embed_tokens.weight"]}.items():
        path, _, leaf = name.rpartition(".")
        model.get_submodule(path)._parameters[leaf] = weight
    return model


def _weights(shape: Shape) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        model = _transformers().LlamaForCausalLM(_config(shape))
    return {name: tuple(x.shape) for name, x in model.named_parameters()}


def _made(shapes: dict[str, tuple[int, ...]], shape: Shape, tokens: tuple[int, int], maker: Maker) -> Arguments:
    weights = {
        name: 1 + maker.normal(*size, scale=0.1) if len(size) == 1 else maker.normal(*size, scale=size[1] ** -0.5)
        for name, size in shapes.items()
    }
    return weights | {part: maker.integers(0, shape.vocabulary, *tokens) for part in ("ids", "labels")}


def _split(arguments: Arguments) -> tuple[Arguments, Tensor, Tensor]:
    weights = {name: x for name, x in arguments.items() if name not in ("ids", "labels")}
    return weights, arguments["ids"], arguments["labels"]


def _ready(shape: Shape, attention: str, weights: Arguments, device: Any, training: bool) -> Any:
    from headwise.integrations import transformers as adapter

    model = _filled(_model(shape, attention, device), weights).train(training)
    if attention == adapter.NAME:
        adapter.patch(model)
    return model


def _trains(shape: Shape, attention: str, arguments: Arguments) -> Callable[[], Tensor]:
    weights, ids, labels = _split(arguments)
    model = _ready(shape, attention, weights, ids.device, training=True)
    return lambda: model(input_ids=ids, labels=labels, use_cache=False).loss


@contextmanager
def _restored_names() -> Iterator[None]:
    """Liger replaces functions in the module of the model; afterwards Transformers' own are there again."""
    names = vars(_transformers().models.llama.modeling_llama)
    before = dict(names)
    try:
        yield
    finally:
        names.update(before)


def _trains_compiled(shape: Shape, arguments: Arguments) -> Callable[[], Tensor]:
    """The whole step, loss included, as torch.compile has it."""
    torch.compiler.reset()  # otherwise later cases reach the limit on recompilations
    return torch.compile(_trains(shape, "sdpa", arguments), dynamic=False)


def _trains_with_liger(shape: Shape, attention: str, arguments: Arguments) -> Callable[[], Tensor]:
    from liger_kernel.transformers import apply_liger_kernel_to_llama  # type: ignore[import-not-found,unused-ignore]

    if attention == FA4:
        import flash_attn.cute  # type: ignore[import-not-found,unused-ignore]  # noqa: F401  # or Transformers would fetch it

        if FA4 not in _transformers().modeling_utils.ALL_ATTENTION_FUNCTIONS.valid_keys():
            raise Absent(f"Transformers {_transformers().__version__} does not have {FA4}")
    weights, ids, labels = _split(arguments)
    model = _ready(shape, attention, weights, ids.device, training=True)
    apply_liger_kernel_to_llama(model=model)
    module = _transformers().models.llama.modeling_llama
    rope = module.apply_rotary_pos_emb  # looked up at every call

    def run() -> Tensor:
        module.apply_rotary_pos_emb = rope
        loss: Tensor = model(input_ids=ids, labels=labels, use_cache=False).loss
        return loss

    return run


def _loss(shape: Shape, arguments: Arguments) -> Outputs:
    """With PyTorch's attention. A layer is computed again in its backward: in float64 all of them would not fit."""
    weights, ids, labels = _split(arguments)
    model = _filled(_model(shape, "sdpa", ids.device), weights).train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return {"out": model(input_ids=ids, labels=labels, use_cache=False).loss}


def _contest(
    run: Callable[[Shape, str, Arguments], Callable[[], Tensor]], check: Callable[[Shape, Arguments], Outputs],
    shape: Shape, size: tuple[int, int], differentiable: tuple[str, ...], others: tuple[Contender, ...] = (),
) -> dict[str, Any]:  # fmt: skip
    """One model, with our attention and with PyTorch's."""
    return {
        "make": partial(_made, _weights(shape), shape, size),
        "ours": partial(run, shape, "headwise"),
        "check": WholeCheck(partial(check, shape), differentiable),
        "peers": (Contender(SDPA, partial(run, shape, "sdpa")), *others),
    }


def training_step(name: str, shape: Shape, batch: int, length: int) -> BenchCase:
    shapes = _weights(shape)
    matrices = sum(size[0] * size[1] for size in shapes.values() if len(size) == 2)
    attention = shape.layers * shape.dim * batch * length * length * 2  # causal: half of 4
    others = (
        Contender(COMPILED, partial(_trains_compiled, shape)),
        Contender(LIGER, partial(_trains_with_liger, shape, "sdpa"), scope=_restored_names),
        Contender(LIGER_FA4, partial(_trains_with_liger, shape, FA4), scope=_restored_names),
    )
    return BenchCase(
        deterministic=None,
        name=name,
        group="Transformers training step",
        direction="forward+backward",
        differentiable=tuple(shapes),
        **_contest(_trains, _loss, shape, (batch, length), tuple(shapes), others),
        flops=float(6 * batch * length * matrices + 3.5 * attention),
        requirements=(AtLeast(1.25, SDPA), MemoryShare(0.6, SDPA), AtLeast(1.0, LIGER_FA4)),
    )


def _decodes(shape: Shape, attention: str, arguments: Arguments) -> Callable[[], Tensor]:
    """The logits (B, V) of the last token, over a static cache that holds those before it."""
    weights, ids, _ = _split(arguments)
    model = _ready(shape, attention, weights, ids.device, training=False)
    cache = _transformers().StaticCache(config=model.config, max_cache_len=shape.positions)
    filled = ids.shape[1] - 1
    with torch.no_grad():
        model(input_ids=ids[:, :-1], past_key_values=cache, use_cache=True)

    def run() -> Tensor:
        with torch.no_grad():
            for layer in cache.layers:
                layer.cumulative_length.fill_(filled)  # the same token every time
            out = model(input_ids=ids[:, -1:], past_key_values=cache, use_cache=True)
        logits: Tensor = out.logits[:, -1]
        return logits

    return run


def _last_logits(shape: Shape, arguments: Arguments) -> Outputs:
    weights, ids, _ = _split(arguments)
    model = _filled(_model(shape, "sdpa", ids.device), weights).eval()
    with torch.no_grad():
        return {"out": model(input_ids=ids, logits_to_keep=1, use_cache=False).logits[:, -1]}


def decoding(name: str, shape: Shape, batch: int, length: int) -> BenchCase:
    shapes = _weights(shape)
    elements = sum(size[0] * size[1] for size in shapes.values() if len(size) == 2)
    cached = 2 * shape.layers * batch * length * shape.dim * shape.key_heads // shape.heads
    return BenchCase(
        deterministic=None,
        name=name,
        group="Transformers generation",
        direction="forward",
        **_contest(_decodes, _last_logits, shape, (batch, length), ()),
        bytes=float(2 * (elements + cached)),
        requirements=(AtLeast(1.0, SDPA),),
        timed="graph",
    )
