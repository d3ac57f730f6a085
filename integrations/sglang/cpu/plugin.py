"""SGLang plugin `leyline_cpu`: attention on the CPU, for MLA and behind a cached prefix. Does nothing with a GPU."""

from __future__ import annotations

from leyline_agent.integrations.sglang.cpu.support import is_enabled


def register() -> None:
    """Give the `torch_native` attention backend the absorbed form of MLA, and prefills at the cost of their new tokens.

    Without a rule of its own the backend follows Triton's and prefills with full heads, whose shapes do not fit a
    latent KV pool. Absorbed MLA is multi-query attention over the pool, which torch can do.
    """
    if not is_enabled():
        return
    from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import AttnForwardMethod

    from leyline_agent.integrations.sglang.cpu import attention

    attention.install()
    AttentionBackendRegistry.register("torch_native", lambda attention, forward_batch: AttnForwardMethod.MLA)
