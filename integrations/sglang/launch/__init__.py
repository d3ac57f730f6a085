"""Start SGLang with Leyline: what to start (`command`), whether it can work (`checks`), and the process (`process`)."""

from leyline_agent.integrations.sglang.launch.checks import check_launch
from leyline_agent.integrations.sglang.launch.command import ServerArgs, ServerSpec
from leyline_agent.integrations.sglang.launch.process import ServerProcess

__all__ = ["ServerArgs", "ServerProcess", "ServerSpec", "check_launch"]
