"""Small models of Hugging Face Transformers with random weights, in pairs: eager attention and ours."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch.overrides import TorchFunctionMode

import headwise.integrations.transformers as adapter

VOCAB = 96
SHORT, LONG = 12, 40  # a window, and sequences that reach past it
COMMON = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": None, "tie_word_embeddings": False,  # tied ones make a random model repeat itself
}  # fmt: skip
NEW = tuple(int(x) for x in transformers.__version__.split(".")[:2]) >= (5, 0)
SHARPER = ("q_proj", "k_proj", "query", "key", "Wqkv", ".q.", ".k.")  # weights that decide whom a token attends to
OLD_OWN_CODE = ("bert", "modernbert", "t5")  # before release 5 these do not look up their attention by name


@dataclass(frozen=True)
class Model:
    name: str
    config: str
    head: str
    options: dict[str, Any]
    features: frozenset[str] = frozenset()  # what calls of the op are to be given: window, softcap, sink, bias

    @property
    def causal(self) -> bool:
        return self.head.endswith("CausalLM")


def _with(**options: Any) -> dict[str, Any]:
    return COMMON | options


_LAYERS = ["sliding_attention", "full_attention"]
_ENCODER = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 128, "pad_token_id": 0,
}  # fmt: skip
_MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
MODELS = [
    Model("llama", "LlamaConfig", "LlamaForCausalLM", _with()),
    Model("qwen3", "Qwen3Config", "Qwen3ForCausalLM", _with()),
    Model("mistral", "MistralConfig", "MistralForCausalLM", _with(sliding_window=SHORT), frozenset({"window"})),
    Model(
        "gemma2", "Gemma2Config", "Gemma2ForCausalLM",
        _with(sliding_window=SHORT, attn_logit_softcapping=5.0, layer_types=_LAYERS), frozenset({"window", "softcap"}),
    ),
    Model(
        "gemma3", "Gemma3TextConfig", "Gemma3ForCausalLM", _with(sliding_window=SHORT, layer_types=_LAYERS),
        frozenset({"window"}),
    ),
    Model(
        "gpt_oss", "GptOssConfig", "GptOssForCausalLM",
        _with(sliding_window=SHORT, layer_types=_LAYERS, num_local_experts=4, num_experts_per_tok=2, rope_scaling=None),
        frozenset({"window", "sink"}),
    ),
    Model(
        "deepseek_v3", "DeepseekV3Config", "DeepseekV3ForCausalLM",
        {k: v for k, v in COMMON.items() if k != "head_dim"} | _MOE | {
            "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16,
            "v_head_dim": 16, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
        },
    ),
    Model("bert", "BertConfig", "BertForMaskedLM", _ENCODER),
    Model(
        "modernbert", "ModernBertConfig", "ModernBertForMaskedLM",
        _ENCODER | {"local_attention": SHORT, "global_attn_every_n_layers": 2, "bos_token_id": 1, "eos_token_id": 2,
                    "cls_token_id": 1, "sep_token_id": 2},
        frozenset({"window"}),
    ),
    Model(
        "t5", "T5Config", "T5ForConditionalGeneration",
        {"vocab_size": VOCAB, "d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4, "pad_token_id": 0,
         "eos_token_id": None, "decoder_start_token_id": 0, "dropout_rate": 0.0},
        frozenset({"bias"}),
    ),
    Model(
        "vit", "ViTConfig", "ViTForImageClassification",
        {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 48,
         "patch_size": 8, "num_labels": 7},
    ),
    Model(
        "whisper", "WhisperConfig", "WhisperForConditionalGeneration",
        {"vocab_size": VOCAB, "d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
         "decoder_attention_heads": 4, "encoder_ffn_dim": 96, "decoder_ffn_dim": 96, "num_mel_bins": 8,
         "max_source_positions": 60, "max_target_positions": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None,
         "decoder_start_token_id": 1},
    ),
]  # fmt: skip
if not NEW:
    MODELS = [model for model in MODELS if model.name not in OLD_OWN_CODE]
else:
    MODELS.append(
        Model(
            "gemma4", "Gemma4TextConfig", "Gemma4ForCausalLM",
            _with(sliding_window=SHORT, layer_types=_LAYERS, global_head_dim=32, hidden_size_per_layer_input=0,
                  num_kv_shared_layers=0),
            frozenset({"window"}),
        )
    )  # fmt: skip
BY_NAME = {model.name: model for model in MODELS}
CAUSAL = [model for model in MODELS if model.causal]


def build(model: Model, implementation: str, seed: int = 0, **changes: Any) -> torch.nn.Module:
    """Float32, eval mode. Weights large enough that what a token attends to decides what comes next."""
    # Every model gets a config of its own: the implementation's name is written into it.
    options = copy.deepcopy(model.options | changes)
    config = getattr(transformers, model.config)(**options)
    config._attn_implementation = implementation
    config._experts_implementation = "eager"  # the others have no float64
    built = getattr(transformers, model.head)(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in built.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() >= 2:
                gain = 2.0 if any(part in name for part in SHARPER) else 1.0
                parameter.copy_(noise * gain * parameter.shape[-1] ** -0.5)
            elif name.endswith("sinks"):
                parameter.copy_(noise)
            else:
                parameter.copy_(noise * 0.1 + (1.0 if name.endswith("weight") else 0.0))
    built.tie_weights()
    assert built.config._attn_implementation == implementation
    return built


def pair(model: Model, **changes: Any) -> tuple[torch.nn.Module, torch.nn.Module]:
    """The same weights with eager attention and with ours."""
    adapter.register()
    eager, ours = build(model, "eager", **changes), build(model, "headwise", **changes)
    assert eager.config is not ours.config
    assert all(torch.equal(a, b) for a, b in zip(eager.parameters(), ours.parameters(), strict=True))
    return eager, ours


def in_float64(model: torch.nn.Module) -> torch.nn.Module:
    return copy.deepcopy(model).double()


class Float64Throughout(TorchFunctionMode):
    """Models turn to float32 for norms, softmax and angles, whatever their dtype is. For the truth they stay in float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        args = tuple(torch.float64 if x is torch.float32 else x for x in args)
        kwargs = {name: torch.float64 if x is torch.float32 else x for name, x in (kwargs or {}).items()}
        return func(*args, **kwargs)


def tokens(batch: int = 2, length: int = LONG, seed: int = 1) -> torch.Tensor:
    return torch.randint(3, VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))


def padding(side: str | None, batch: int = 2, length: int = LONG, missing: int = 9) -> torch.Tensor:
    """(B, S) ones, with zeros in the first row at one side. "hole": in its middle."""
    mask = torch.ones(batch, length, dtype=torch.int64)
    if side == "left":
        mask[0, :missing] = 0
    if side == "right":
        mask[0, -missing:] = 0
    if side == "hole":
        mask[0, 5 : 5 + missing] = 0
    return mask


def compiled_in_one_graph(model: torch.nn.Module) -> tuple[Any, list[str]]:
    """The model under torch.compile, and a list that the text of each graph will be put into."""
    graphs: list[str] = []

    def backend(graph, inputs):
        graphs.append(graph.print_readable(print_output=False))
        return graph.forward

    return torch.compile(model, fullgraph=True, backend=backend), graphs
