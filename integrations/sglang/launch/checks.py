"""What can be known to be wrong before SGLang is started: each finding is one line that says what to do."""

from __future__ import annotations

import json
import socket
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from leyline_agent.errors import ConfigError, MissingDependencyError, ServerError, UnsupportedError
from leyline_agent.integrations.sglang.launch.command import ServerArgs, ServerSpec
from leyline_agent.integrations.sglang.plugin import check_version

PYTHON_VERSIONS = ((3, 11), (3, 12))
_TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json")


def check_launch(spec: ServerSpec) -> None:
    """Raise a LeylineError for the first thing that would keep this server from starting or from being of use."""
    check_python()
    check_sglang()
    if spec.model_path is not None:
        check_model(spec.model_path, spec.args)
    elif spec.needs_model and not spec.cpu:
        raise ConfigError("no model named; pass --model-path FOLDER_OR_HUB_NAME, or --cpu to serve SmolLM2-135M")
    check_port(spec.host, spec.port)


def check_python(found: tuple[int, int] = sys.version_info[:2]) -> None:
    """Refuse a Python for which SGLang has no compiled parts."""
    if found not in PYTHON_VERSIONS:
        raise UnsupportedError(f"Python {found[0]}.{found[1]} cannot run SGLang; use Python 3.11 or 3.12")


def check_sglang() -> None:
    """Refuse an SGLang that is absent, or of a version that the plugin was not checked with."""
    try:
        found = version("sglang")
    except PackageNotFoundError:
        raise MissingDependencyError(
            "SGLang is not installed; run `pip install 'leyline-agent[sglang]'` with a CUDA GPU, or `make env` without"
        ) from None
    check_version(found)


def check_model(model_path: str, args: ServerArgs) -> None:
    """Refuse a local folder that is missing or incomplete; a name on a model hub is left to SGLang."""
    folder = Path(model_path).expanduser()
    if not folder.exists():
        if _looks_like_a_folder(model_path):
            raise ConfigError(f"no model folder at {model_path}; check --model-path")
        return
    if not folder.is_dir():
        if folder.suffix != ".gguf":
            raise ConfigError(f"{model_path} is a file; --model-path takes the folder that holds config.json")
        return
    if not (folder / "config.json").is_file():
        raise ConfigError(f"{model_path} holds no config.json, so it is not a model folder; check --model-path")
    tokenizer = Path(args.get("--tokenizer-path") or folder).expanduser()
    if not args.get("--chat-template") and tokenizer.is_dir() and not _has_chat_template(tokenizer):
        raise ConfigError(
            f"the model in {tokenizer} has no chat template, so it cannot chat; pass --chat-template FILE.jinja"
        )


def check_port(host: str, port: int) -> None:
    """Refuse a port that another program listens on."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a server that just ended is no obstacle
        try:
            probe.bind((host, port))
        except OSError as err:
            raise ServerError(f"cannot listen on {host}:{port}: {err.strerror}; pass another --port") from err


def _looks_like_a_folder(model_path: str) -> bool:
    return model_path.startswith(("/", ".", "~")) or model_path.count("/") != 1


def _has_chat_template(folder: Path) -> bool:
    if any((folder / name).is_file() for name in _TEMPLATE_FILES):
        return True
    try:
        settings = json.loads((folder / "tokenizer_config.json").read_text())
    except (OSError, ValueError):
        return False
    return bool(isinstance(settings, dict) and settings.get("chat_template"))
