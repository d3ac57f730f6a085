"""What to start: the command line and the environment of one SGLang server."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.metadata import entry_points
from pathlib import Path

from leyline_agent.errors import ConfigError
from leyline_agent.integrations.sglang.cpu import CPU_ENVIRONMENT

_PLUGIN_GROUP = "sglang.srt.plugins"
_PLUGIN = "leyline"
_CPU_PLUGIN = "leyline_cpu"
_SERVER_MAIN = "leyline_agent.integrations.sglang.launch.server_main"

_DEFAULT_PORT = 30000
_MAX_PORT = 65535

_LEYLINE_DEFAULTS = {"--radix-cache-backend": "leyline", "--enable-cache-report": None}
_CPU_DEFAULTS = {
    "--device": "cpu",
    "--attention-backend": "torch_native",
    "--dtype": "float32",
    "--disable-cuda-graph": None,
    "--max-total-tokens": "16384",
    "--max-running-requests": "8",
    "--sleep-on-idle": None,  # otherwise an idle server keeps one core busy
}


@dataclass(frozen=True)
class ServerArgs:
    """SGLang's own command-line arguments, kept in the order and spelling in which the user gave them."""

    values: tuple[str, ...] = ()

    def get(self, *names: str) -> str | None:
        """Return the value of the last argument called one of `names`: `--port 30000` or `--port=30000`."""
        found = None
        for i_arg, arg in enumerate(self.values):
            name, equals, value = arg.partition("=")
            if name in names:
                found = value if equals else next(iter(self.values[i_arg + 1 : i_arg + 2]), "")
        return found

    def with_defaults(self, defaults: Mapping[str, str | None]) -> ServerArgs:
        """Return these arguments and those of `defaults` that they do not set; a value of None stands for a flag."""
        missing = [(name, value) for name, value in defaults.items() if self.get(name) is None]
        return ServerArgs(self.values + tuple(word for pair in missing for word in pair if word is not None))


@dataclass(frozen=True)
class ServerSpec:
    """One server to start.

    args: SGLang's arguments, among them `--model-path`; they win over every default set here.
    cpu: run without a GPU, with the settings that SGLang needs for that.
    leyline: load the plugin and its radix cache; without it the server is a stock one, for comparisons.
    """

    args: ServerArgs
    cpu: bool = False
    leyline: bool = True

    @property
    def model_path(self) -> str | None:
        """The model that the arguments name; None if they leave it to a config file."""
        return self.args.get("--model-path", "--model")

    @property
    def needs_model(self) -> bool:
        """Whether nothing says which model to serve."""
        return self.model_path is None and self.args.get("--config") is None

    def with_model(self, folder: Path) -> ServerSpec:
        """Return this spec with a model named."""
        return replace(self, args=self.args.with_defaults({"--model-path": str(folder)}))

    @property
    def host(self) -> str:
        """The address the server listens on."""
        return self.args.get("--host") or "127.0.0.1"

    @property
    def port(self) -> int:
        """The port the server listens on; SGLang's own default if none is named."""
        text = self.args.get("--port") or str(_DEFAULT_PORT)
        if not text.isdecimal() or int(text) > _MAX_PORT:
            raise ConfigError(f"{text!r} is not a port; --port takes a number up to {_MAX_PORT}")
        return int(text)

    @property
    def url(self) -> str:
        """Where a client on this machine reaches the server."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)  # noqa: S104 (compared, not bound)
        host = f"[{host}]" if ":" in host else host
        return f"http://{host}:{self.port}"

    def command(self) -> list[str]:
        """Build the command line.

        `-P` keeps the current folder out of the import path: at the root of this repository it would offer our
        `kernels/` to SGLang and transformers in the place of Hugging Face's package of that name.
        """
        args = self.args
        if self.leyline:
            args = args.with_defaults(_LEYLINE_DEFAULTS)
        if self.cpu:
            args = args.with_defaults(_CPU_DEFAULTS)
        return [sys.executable, "-P", "-m", _SERVER_MAIN, *args.values]

    def environment(self, base: Mapping[str, str] = os.environ) -> dict[str, str]:
        """Build the environment of the server process from `base`, the one of this process."""
        env = dict(base)
        if self.cpu:
            env = dict(CPU_ENVIRONMENT) | env
        env["SGLANG_PLUGINS"] = ",".join(self._plugins(base.get("SGLANG_PLUGINS", ""))) or "none"
        return env

    def _plugins(self, allowed: str) -> list[str]:
        """Name the plugins SGLang may load: those it would load anyway, with ours added or taken out."""
        names = [name.strip() for name in allowed.split(",") if name.strip()]
        if not names:  # an unset list means all that are installed, in both groups that SGLang knows
            groups = (_PLUGIN_GROUP, "sglang.srt.platforms")
            names = [entry.name for group in groups for entry in entry_points(group=group)]
        others = [name for name in dict.fromkeys(names) if name not in {_PLUGIN, _CPU_PLUGIN}]
        ours = [_PLUGIN] * self.leyline + [_CPU_PLUGIN] * self.cpu
        return others + ours
