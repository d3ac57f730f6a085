"""Turn a GGUF file of a Llama model into the folder that SGLang and transformers load: float32 safetensors.

SGLang's CPU engine cannot compute with GGUF's quantised blocks, so they are expanded, one tensor after the other.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from leyline_agent.errors import UnsupportedError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_TENSOR_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_CONTROL_TOKEN = 3  # of GGUF's token types


def convert_gguf(gguf_file: Path, folder: Path) -> Iterator[tuple[int, int]]:
    """Write config.json, the tokenizer and model.safetensors into `folder`; yields (bytes done, all bytes) as it goes.

    Raises UnsupportedError for another architecture, and OSError when the disk is full; then the folder is incomplete.
    """
    from gguf import GGUFReader
    from gguf.quants import dequantize
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    reader = GGUFReader(gguf_file)
    facts = {name: field.contents() for name, field in reader.fields.items()}
    if facts["general.architecture"] != "llama":
        raise UnsupportedError(
            f"{gguf_file.name} is a {facts['general.architecture']} model; only Llama can be converted"
        )
    heads = {"attn_q": facts["llama.attention.head_count"], "attn_k": facts["llama.attention.head_count_kv"]}

    total = sum(int(tensor.n_bytes) for tensor in reader.tensors)
    done = 0
    weights: dict[str, NDArray[np.float32]] = {}
    for tensor in reader.tensors:
        weight = dequantize(tensor.data, tensor.tensor_type)
        *_, kind, _ = tensor.name.split(".")
        if kind in heads:
            weight = _undo_head_interleaving(weight, heads[kind])
        weights[_safetensors_name(tensor.name)] = weight
        done += int(tensor.n_bytes)
        yield done, total

    tied = "lm_head.weight" not in weights
    (folder / "config.json").write_text(json.dumps(_config(facts, tied), indent=2))
    _write_tokenizer(folder, facts)
    try:
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    except SafetensorError as err:  # how safetensors reports whatever the disk says
        raise OSError(errno.ENOSPC if "os error 28" in str(err) else errno.EIO, str(err)) from err


def _safetensors_name(name: str) -> str:
    """`blk.3.attn_q.weight` is `model.layers.3.self_attn.q_proj.weight`."""
    *block, kind, suffix = name.split(".")
    prefix = f"model.layers.{block[1]}." if block else ""
    return f"{prefix}{_TENSOR_NAMES[kind]}.{suffix}"


def _undo_head_interleaving(weight: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """GGUF keeps the rows that RoPE pairs next to each other; here a head's second half is paired with its first."""
    import numpy as np

    rows, columns = weight.shape
    paired = weight.reshape(heads, rows // heads // 2, 2, columns)
    return np.ascontiguousarray(paired.swapaxes(1, 2).reshape(rows, columns))


def _config(facts: dict[str, Any], tied: bool) -> dict[str, Any]:
    hidden, heads = facts["llama.embedding_length"], facts["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": facts["llama.vocab_size"],
        "hidden_size": hidden,
        "intermediate_size": facts["llama.feed_forward_length"],
        "num_hidden_layers": facts["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": facts["llama.attention.head_count_kv"],
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "rms_norm_eps": facts["llama.attention.layer_norm_rms_epsilon"],
        "max_position_embeddings": facts["llama.context_length"],
        "rope_theta": facts["llama.rope.freq_base"],
        "tie_word_embeddings": tied,
        "bos_token_id": facts["tokenizer.ggml.bos_token_id"],
        "eos_token_id": facts["tokenizer.ggml.eos_token_id"],
        "torch_dtype": "float32",
    }


def _write_tokenizer(folder: Path, facts: dict[str, Any]) -> None:
    """Write SmolLM2's tokenizer: byte-level BPE in which every digit is a word of its own."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    if facts["tokenizer.ggml.pre"] != "smollm":
        raise UnsupportedError(f"the tokenizer {facts['tokenizer.ggml.pre']!r} cannot be converted; only SmolLM2's can")
    tokens: list[str] = facts["tokenizer.ggml.tokens"]
    kinds: list[int] = facts["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in facts["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i_token for i_token, token in enumerate(tokens)}, merges=merges))
    digits, byte_level = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[facts["tokenizer.ggml.bos_token_id"]],
        "eos_token": tokens[facts["tokenizer.ggml.eos_token_id"]],
        "unk_token": tokens[facts["tokenizer.ggml.unknown_token_id"]],
        "pad_token": tokens[facts["tokenizer.ggml.padding_token_id"]],
        "model_max_length": facts["llama.context_length"],
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))
