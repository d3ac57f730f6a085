"""Tiny random models that the real SGLang and transformers both load: GQA (Llama) and MLA (DeepSeek-V2 and V3).

    path = tiny_model("deepseek_v2")                 # a model folder, made once and kept
    python tests/support/tiny_models.py deepseek_v2  # prints that folder

The weights are random but always the same. The tokenizer knows single bytes and four special tokens, so a text has as
many tokens as bytes, and the chat template renders tools, tool calls and tool results.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import torch

Config = dict[str, Any]
Dtype = Literal["float32", "bfloat16"]

_ROOT = Path(__file__).resolve().parents[2]
_CACHE = _ROOT / ".cache" / "tiny-models"
_CHAT_TEMPLATE = _ROOT / "integrations" / "sglang" / "launch" / "chatml_tools.jinja"
_SPECIAL_TOKENS = ("<bos>", "<eos>", "<|im_start|>", "<|im_end|>")
_VOCAB_SIZE = 320  # 256 bytes, the special tokens, and some ids that no text produces
_CONTEXT_LEN = 16384


def tiny_model(name: str, dtype: Dtype = "float32") -> Path:
    """Return the folder of the model `name`, writing it first if it is not there yet."""
    if name not in CONFIGS:
        raise ValueError(f"no tiny model {name!r}; there are {', '.join(CONFIGS)}")
    version = hashlib.sha256(Path(__file__).read_bytes() + _CHAT_TEMPLATE.read_bytes()).hexdigest()[:8]
    folder = _CACHE / f"{name}-{dtype}-{version}"
    if not folder.is_dir():
        _CACHE.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=_CACHE))
        try:
            _write_model(draft, CONFIGS[name](), dtype)
            draft.rename(folder)
        except OSError:
            if not folder.is_dir():  # otherwise another process was faster, and its files are the same
                raise
        finally:
            shutil.rmtree(draft, ignore_errors=True)
    return folder


# --- what the models look like ---------------------------------------------------------------------------------------


def _shared_config() -> Config:
    return {
        "vocab_size": _VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": _CONTEXT_LEN,
        "rope_theta": 10000.0,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": 256,
        "eos_token_id": 257,
    }


def _llama(**changes: Any) -> Config:
    gqa = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_key_value_heads": 2, "head_dim": 16}
    return _shared_config() | gqa | changes


def _llama3_rope() -> Config:
    scaling = {
        "rope_type": "llama3",
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": _CONTEXT_LEN // 4,
    }
    return _llama(rope_scaling=scaling)


def _yarn(factor: float, mscale: float, mscale_all_dim: float) -> Config:
    """Give YaRN scaling. SGLang's CPU path asks for it in every DeepSeek model; with factor 1 it is plain RoPE."""
    return {
        "type": "yarn",
        "factor": factor,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": mscale,
        "mscale_all_dim": mscale_all_dim,
        "original_max_position_embeddings": int(_CONTEXT_LEN / factor),
    }


def _deepseek_v2(**changes: Any) -> Config:
    """MLA with a dense MLP: no layer reaches `first_k_dense_replace`."""
    mla = {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "num_key_value_heads": 4,
        "q_lora_rank": None,
        "kv_lora_rank": 64,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "v_head_dim": 32,
        "moe_intermediate_size": 64,
        "moe_layer_freq": 1,
        "n_shared_experts": 1,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "greedy",
        "scoring_func": "softmax",
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
        "first_k_dense_replace": 2,
        "rope_scaling": _yarn(factor=4.0, mscale=0.707, mscale_all_dim=0.707),
    }
    return _shared_config() | mla | changes


def _deepseek_v3() -> Config:
    """MLA with a low-rank query, and a mixture of experts after the first layer."""
    return _deepseek_v2(
        architectures=["DeepseekV3ForCausalLM"],
        model_type="deepseek_v3",
        num_hidden_layers=3,
        q_lora_rank=48,
        n_routed_experts=8,
        n_group=2,
        topk_method="noaux_tc",
        scoring_func="sigmoid",
        norm_topk_prob=True,
        routed_scaling_factor=2.5,
        first_k_dense_replace=1,
        num_nextn_predict_layers=0,
        rope_scaling=_yarn(factor=1.0, mscale=1.0, mscale_all_dim=1.0),
    )


CONFIGS: dict[str, Callable[[], Config]] = {
    "llama": _llama,
    "llama3_rope": _llama3_rope,
    "deepseek_v2": _deepseek_v2,
    # mscale != mscale_all_dim: the rotation itself carries a factor, which is then part of every cached key.
    "deepseek_v2_mscale": lambda: _deepseek_v2(rope_scaling=_yarn(factor=4.0, mscale=1.0, mscale_all_dim=0.5)),
    "deepseek_v3": _deepseek_v3,
}


# --- writing one -----------------------------------------------------------------------------------------------------


def _write_model(folder: Path, config: Config, dtype: Dtype) -> None:
    import torch
    from safetensors.torch import save_file

    _write_tokenizer(folder)
    (folder / "config.json").write_text(json.dumps(config | {"torch_dtype": dtype}, indent=1))
    generator = torch.Generator().manual_seed(0)
    weights = {
        name: _random_weight(shape, generator).to(getattr(torch, dtype)) for name, shape in _weight_shapes(config)
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _random_weight(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    import torch

    noise = torch.randn(shape, generator=generator)
    if len(shape) == 1:
        return 1.0 + 0.1 * noise  # norms, and the bias of an expert's score (where a common offset changes nothing)
    return 0.2 * noise


def _weight_shapes(config: Config) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    yield "model.embed_tokens.weight", (vocab, hidden)
    yield "lm_head.weight", (vocab, hidden)
    yield "model.norm.weight", (hidden,)
    attention = _mla_shapes if "kv_lora_rank" in config else _gqa_shapes
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        yield prefix + "input_layernorm.weight", (hidden,)
        yield prefix + "post_attention_layernorm.weight", (hidden,)
        for name, shape in attention(config):
            yield f"{prefix}self_attn.{name}.weight", shape
        for name, shape in _mlp_shapes(config, layer):
            yield f"{prefix}mlp.{name}", shape


def _gqa_shapes(config: Config) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, head = config["hidden_size"], config["head_dim"]
    query, key = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    yield "q_proj", (query, hidden)
    yield "k_proj", (key, hidden)
    yield "v_proj", (key, hidden)
    yield "o_proj", (hidden, query)


def _mla_shapes(config: Config) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    latent, rotated = config["kv_lora_rank"], config["qk_rope_head_dim"]
    plain, value = config["qk_nope_head_dim"], config["v_head_dim"]
    query = heads * (plain + rotated)
    if config["q_lora_rank"]:
        yield "q_a_proj", (config["q_lora_rank"], hidden)
        yield "q_a_layernorm", (config["q_lora_rank"],)
        yield "q_b_proj", (query, config["q_lora_rank"])
    else:
        yield "q_proj", (query, hidden)
    yield "kv_a_proj_with_mqa", (latent + rotated, hidden)
    yield "kv_a_layernorm", (latent,)
    yield "kv_b_proj", (heads * (plain + value), latent)
    yield "o_proj", (hidden, heads * value)


def _mlp_shapes(config: Config, layer: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden = config["hidden_size"]
    if layer < config.get("first_k_dense_replace", config["num_hidden_layers"]):
        yield from _gated_mlp_shapes("", hidden, config["intermediate_size"])
        return
    experts = config["n_routed_experts"]
    yield "gate.weight", (experts, hidden)
    if config["topk_method"] == "noaux_tc":
        yield "gate.e_score_correction_bias", (experts,)
    for name in [f"experts.{i_expert}." for i_expert in range(experts)] + ["shared_experts."]:
        yield from _gated_mlp_shapes(name, hidden, config["moe_intermediate_size"])


def _gated_mlp_shapes(prefix: str, hidden: int, inner: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield prefix + "gate_proj.weight", (inner, hidden)
    yield prefix + "up_proj.weight", (inner, hidden)
    yield prefix + "down_proj.weight", (hidden, inner)


def _write_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    byte_tokens = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i_token for i_token, token in enumerate([*byte_tokens, *_SPECIAL_TOKENS])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(_SPECIAL_TOKENS))
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<bos>",
        "eos_token": "<|im_end|>",
        "model_max_length": _CONTEXT_LEN,
        "add_bos_token": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))
    shutil.copy(_CHAT_TEMPLATE, folder / "chat_template.jinja")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    print(tiny_model(sys.argv[1] if len(sys.argv) > 1 else "llama"))
