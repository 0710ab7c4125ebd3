"""Tiny models of every kind of attention and cache, and a few whose cache cannot be used, all made here.

Weights are large enough for far from uniform distributions, so that differences show.
"""

import functools
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from tiny import tiny_llama, tiny_tokenizer
from torch import nn
from transformers import PreTrainedModel, ProcessorMixin

_COMMON = {
    "vocab_size": 259,
    "initializer_range": 0.3,
    "max_position_embeddings": 512,
    "bos_token_id": 258,
    "eos_token_id": 256,
    "pad_token_id": 257,
}
_SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
}


def _maker(name: str, causal_lm: str | None = None, /, **settings: Any) -> Callable[[], PreTrainedModel]:
    def make() -> PreTrainedModel:
        torch.manual_seed(0)
        config = getattr(transformers, f"{name}Config")(**{**_COMMON, **settings})
        return getattr(transformers, causal_lm or f"{name}ForCausalLM")(config).eval()

    return make


def _mixed(kind: str) -> dict[str, Any]:
    """Settings of four layers, of which every other one is of another kind than full attention."""
    return {**_SIZES, "num_hidden_layers": 4, "layer_types": [kind, "full_attention"] * 2}


def _qwen2_5_vl() -> PreTrainedModel:
    torch.manual_seed(0)
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}
    config = transformers.Qwen2_5_VLConfig(
        text_config={**_COMMON, **_SIZES, "rope_parameters": rope},
        vision_config={**vision, "patch_size": 4, "fullatt_block_indexes": [0]},
        **{f"{name}_token_id": 10 + i for i, name in enumerate(("image", "video", "vision_start", "vision_end"))},
        eos_token_id=256,
        pad_token_id=257,
    )
    return transformers.Qwen2_5_VLForConditionalGeneration(config).eval()


ZOO: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": tiny_llama,
    "qwen3": _maker("Qwen3", **_SIZES, head_dim=8),
    # Absolute positions.
    "gpt2": _maker(
        "GPT2", "GPT2LMHeadModel", n_embd=32, n_layer=2, n_head=4, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
    ),
    # A window shorter than any prompt.
    "mistral": _maker("Mistral", **{**_SIZES, "num_hidden_layers": 4}, sliding_window=8),
    "gemma3": _maker("Gemma3Text", "Gemma3ForCausalLM", **_mixed("sliding_attention"), head_dim=8, sliding_window=5),
    "mixtral": _maker("Mixtral", **_SIZES, num_local_experts=4, num_experts_per_tok=2),
    # Recurrent states beside keys and values.
    "qwen3_next": _maker(
        "Qwen3Next",
        **_mixed("linear_attention"),
        head_dim=8,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
    ),
    "lfm2": _maker("Lfm2", **_mixed("conv")),
    "falcon_h1": _maker(
        "FalconH1", **_SIZES, mamba_d_ssm=32, mamba_n_heads=4, mamba_d_head=8, mamba_d_state=8, mamba_n_groups=1
    ),
    # Sees images, and positions in three dimensions, whose offset it keeps from one call to the next.
    "qwen2_5_vl": _qwen2_5_vl,
    "llava": lambda: llava()[0],
}
"""Makers of models that can share prefixes, by the name of their family."""


def llava() -> tuple[PreTrainedModel, ProcessorMixin]:
    """A Llama that sees images of 8 by 8, and what turns chats with images into its inputs."""
    torch.manual_seed(0)
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<image>"]})
    image_token = tokenizer.convert_tokens_to_ids("<image>")
    config = transformers.LlavaConfig(
        text_config=transformers.LlamaConfig(**{**_COMMON, "vocab_size": image_token + 1}, **_SIZES),
        vision_config={
            "model_type": "clip_vision_model", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2,
            "num_attention_heads": 2, "image_size": 8, "patch_size": 4,
        },
        image_token_index=image_token,
        eos_token_id=256,
        pad_token_id=257,
    )  # fmt: skip
    # The one that needs no torchvision, where there are two.
    images = getattr(transformers, "CLIPImageProcessorPil", transformers.CLIPImageProcessor)
    processor = transformers.LlavaProcessor(
        image_processor=images(size={"height": 8, "width": 8}, crop_size={"height": 8, "width": 8}),
        tokenizer=tokenizer,
        patch_size=4,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=(
            "{% for message in messages %}{% for part in message['content'] %}"
            "{{ '<image>' if part['type'] == 'image' else part['text'] }}{% endfor %}<|im_end|>{% endfor %}"
        ),
    )
    return transformers.LlavaForConditionalGeneration(config).eval(), processor


_LONG = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
_DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
_ORIGINAL = 16

LENGTHENED: dict[str, Callable[[], PreTrainedModel]] = {
    "longrope": _maker(
        "Phi3", **_SIZES,
        rope_parameters={**_LONG, "rope_theta": 1e4, "original_max_position_embeddings": _ORIGINAL},
        original_max_position_embeddings=_ORIGINAL,
    ),
    "dynamic": functools.partial(tiny_llama, max_position_embeddings=_ORIGINAL, rope_parameters=_DYNAMIC),
    "dynamic in some layers": _maker(
        "Gemma3Text", "Gemma3ForCausalLM", **_mixed("sliding_attention"), head_dim=8, sliding_window=64,
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            "full_attention": _DYNAMIC,
        },
        max_position_embeddings=_ORIGINAL,
    ),
}  # fmt: skip
"""Makers of models whose positions look different in calls of more than 16 tokens."""


def mamba() -> PreTrainedModel:
    """A pure Mamba, whose own cache goes on from one token at a time."""
    return _maker("Mamba", hidden_size=32, num_hidden_layers=2, state_size=8)()


def _with_cache_that(spoil: Callable[[Any], None]) -> PreTrainedModel:
    """A Llama whose backbone does something to every cache that it is given."""
    model = tiny_llama()
    backbone = type(model.model)

    @functools.wraps(backbone.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        cache = kwargs.get("cache", kwargs.get("past_key_values"))  # the newer name, the older one
        if cache is not None:
            spoil(cache)
        return backbone.forward(self, *args, **kwargs)

    model.model.__class__ = type("SpoiledLlama", (backbone,), {"forward": forward})  # which copies of it keep
    return model


def llama_that_refuses_a_cache() -> PreTrainedModel:
    """Raises as soon as it is given a cache."""

    def refuse(cache: Any) -> None:
        raise NotImplementedError("this model has no cache")

    return _with_cache_that(refuse)


def llama_with_a_wrong_cache() -> PreTrainedModel:
    """Answers from its cache, but with other numbers."""

    def spoil(cache: Any) -> None:
        if cache.get_seq_length():
            for layer in cache.layers:
                layer.values = layer.values.roll(1, dims=-2)

    return _with_cache_that(spoil)


def llama_with_attention_without_cache() -> PreTrainedModel:
    """Its attention implementation looks at the keys of the call's own tokens alone."""
    model = tiny_llama()
    transformers.AttentionInterface.register("own_tokens_only", _attend_to_own_tokens)
    transformers.AttentionMaskInterface.register("own_tokens_only", transformers.masking_utils.sdpa_mask)
    model.set_attn_implementation("own_tokens_only")
    return model


def _attend_to_own_tokens(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **kwargs: Any
) -> tuple[torch.Tensor, None]:
    if query.size(2) != key.size(2):
        raise ValueError("no cache in this attention")
    return transformers.integrations.sdpa_attention.sdpa_attention_forward(module, query, key, value, mask, **kwargs)


@contextmanager
def tokens_counted(model: nn.Module):
    """Counts the tokens that a model runs, while gradients are kept and while not: `{True: n, False: n}`."""
    counts = {True: 0, False: 0}

    def count(_module: nn.Module, _args: Any, output: torch.Tensor) -> None:
        counts[torch.is_grad_enabled()] += output.shape[:-1].numel()

    handle = model.get_input_embeddings().register_forward_hook(count)
    try:
        yield counts
    finally:
        handle.remove()
