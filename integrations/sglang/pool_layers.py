"""From the live model and its KV pool to the layers that the rotation kernels work on."""

from __future__ import annotations

from typing import Any

from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool

from leyline_agent.errors import UnsupportedError
from leyline_agent.kernels.pool import LayerKV
from leyline_agent.kernels.rope import RopeDescriptor


def pool_layers(model_runner: Any, pool: Any) -> list[LayerKV]:
    """One LayerKV a layer of `pool`, with the RoPE facts of the module that rotated its keys.

    Pools are told apart by their exact type: subclasses keep other layouts. Raises UnsupportedError for a pool whose
    layout Leyline does not know, UnsupportedRopeError for a position encoding that is not a rotation.
    """
    rope = rope_by_layer(model_runner.model)
    first, count = pool.start_layer, pool.layer_num
    if type(pool) is MLATokenToKVPool:
        return [
            LayerKV(keys=pool.kv_buffer[i], values=None, rope=rope.get(first + i), rope_offset=pool.kv_lora_rank)
            for i in range(count)
        ]
    if type(pool) is MHATokenToKVPool:
        if pool.k_buffer[0].ndim != 3:
            shape = tuple(pool.k_buffer[0].shape)
            raise UnsupportedError(f"the KV pool keeps keys as {shape}; only [slots, heads, dim] is known")
        return [LayerKV(keys=pool.k_buffer[i], values=pool.v_buffer[i], rope=rope.get(first + i)) for i in range(count)]
    raise UnsupportedError(f"KV pool {type(pool).__name__}: its layout is not known to Leyline")


def rope_by_layer(model: Any) -> dict[int, RopeDescriptor]:
    """The RoPE descriptor of each attention layer that has one, read from the module in use.

    An attention block owns a `rotary_emb` and, as a child, the RadixAttention that knows its layer. Blocks that share
    a rotary module share its descriptor.
    """
    made: dict[int, RopeDescriptor] = {}
    layers: dict[int, RopeDescriptor] = {}
    for block in model.modules():
        rotary = getattr(block, "rotary_emb", None)
        if rotary is None:
            continue
        for child in block.children():
            if isinstance(child, RadixAttention):
                if id(rotary) not in made:
                    made[id(rotary)] = RopeDescriptor.from_module(rotary)
                layers[child.layer_id] = made[id(rotary)]
    return layers
