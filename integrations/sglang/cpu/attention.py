"""Attention for prefills behind a cached prefix, on the CPU, at the cost of the new tokens.

SGLang's `torch_native` backend pads the queries of such a prefill to the length of the whole sequence: 20 tokens behind
3,600 cached ones cost it as much as 3,620 fresh ones, 80 times what they need. A prefix cache saves little time then,
and neither does a splice. Here the queries stay as they are, and a mask says what each may see.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


def install() -> None:
    """Put `extend` in the place of the backend's own method. Calling it again changes nothing."""
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    original = TorchNativeAttnBackend._run_sdpa_forward_extend
    if not hasattr(original, "leyline_original"):
        TorchNativeAttnBackend._run_sdpa_forward_extend = around(original)


def around(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The backend's method with plain causal attention done by `extend`; anything else goes on to the original."""

    def run(
        backend: Any,
        query: Tensor,
        output: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        req_to_token: Tensor,
        req_pool_indices: Tensor,
        seq_lens: Tensor,
        extend_prefix_lens: Tensor,
        extend_seq_lens: Tensor,
        encoder_lens: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        window = options.get("sliding_window_size")
        plain = options.get("causal") and not options.get("is_cross_attn") and (window is None or window < 0)
        arguments = (
            query, output, k_cache, v_cache, req_to_token, req_pool_indices, seq_lens, extend_prefix_lens,
            extend_seq_lens,
        )  # fmt: skip
        if encoder_lens is not None or not plain:
            return original(backend, *arguments, encoder_lens, **options)
        return extend(*arguments, scaling=options.get("scaling"), enable_gqa=options.get("enable_gqa", False))

    run.leyline_original = original  # type: ignore[attr-defined]
    return run


def extend(
    query: Tensor,
    output: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    extend_prefix_lens: Tensor,
    extend_seq_lens: Tensor,
    *,
    scaling: float | None,
    enable_gqa: bool,
) -> Tensor:
    """Causal attention of every sequence's new tokens over all its tokens; `output` is overwritten and returned.

    query, output: [T, H, D], the new tokens of all sequences one after the other. k_cache, v_cache: [slots, HK, D].
    req_to_token: [requests, length], the slot of each position. The rest: one number a sequence, with
    seq_len = prefix_len + extend_len.
    """
    start = 0
    lengths = (req_pool_indices.tolist(), seq_lens.tolist(), extend_prefix_lens.tolist(), extend_seq_lens.tolist())
    for request, seq_len, prefix_len, new_len in zip(*lengths, strict=True):
        slots = req_to_token[request, :seq_len]
        q = query[start : start + new_len].transpose(0, 1)
        k = k_cache[slots].transpose(0, 1).to(q.dtype)
        v = v_cache[slots].transpose(0, 1).to(q.dtype)
        # Row i is the token at prefix_len + i, which sees itself and everything before it.
        seen = q.new_ones((new_len, seq_len), dtype=torch.bool).tril(prefix_len) if prefix_len else None
        attended = scaled_dot_product_attention(
            q[None], k[None], v[None], attn_mask=seen, is_causal=seen is None, scale=scaling, enable_gqa=enable_gqa
        )
        output[start : start + new_len] = attended[0].transpose(0, 1)
        start += new_len
    return output
