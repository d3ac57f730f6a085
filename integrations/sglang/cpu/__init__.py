"""SGLang on a machine without a GPU.

SGLang runs on plain CPU torch once three things are in place: names of `sgl_kernel` that can be imported
(`kernel_stub`), operator schemas that torchvision's CUDA build cannot register itself (`torchvision_ops`), and the
absorbed form of MLA attention (`plugin`). `enable()` puts the first two in place, and SGLang loads the third by its
plugin entry point.
"""

from leyline_agent.integrations.sglang.cpu.support import CPU_ENVIRONMENT, enable, is_enabled

__all__ = ["CPU_ENVIRONMENT", "enable", "is_enabled"]
