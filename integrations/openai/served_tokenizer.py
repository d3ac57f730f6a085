"""The tokenizer of the server behind a base URL: fetched once, so that histories are rendered on this side."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

from leyline_agent.edits import Message
from leyline_agent.errors import MissingDependencyError, RenderError
from leyline_agent.integrations.openai.capability import Get, server_root
from leyline_agent.renderers import Rendered, Renderer, TemplateRenderer
from leyline_agent.renderers.verified import Verdicts

logger = logging.getLogger("leyline_agent")


class ServedTokenizers:
    """A renderer for each server; None where the server has no tokenizer to give, or this environment lacks jinja2.

    `verdicts` is what came of comparing local renderings with those of servers, for everybody who shares this object.
    """

    def __init__(self) -> None:
        self._known: dict[str, TemplateRenderer | None] = {}
        self._verdicts: dict[tuple[int, str, str | None], tuple[Renderer, Verdicts]] = {}
        self._lock = threading.Lock()

    def verdicts(self, local: Renderer, base_url: str, model: str | None) -> Verdicts:
        """The verdicts on a local renderer against one server."""
        # Kept with the renderer itself: the id of one that is gone may become another's.
        return self._verdicts.setdefault((id(local), base_url, model), (local, Verdicts()))[1]

    def of(self, root: str, get: Get) -> TemplateRenderer | None:
        """The renderer for the server at `root`, fetched with `get` when it is not known. Later callers wait for it."""
        with self._lock:
            if root not in self._known:
                self._known[root] = _fetch(root, get)
            return self._known[root]

    def forget(self, root: str) -> None:
        """Fetch it anew the next time: the server may have come back with another model."""
        with self._lock:
            self._known.pop(root, None)
            self._verdicts = {key: one for key, one in self._verdicts.items() if server_root(key[1]) != root}


def _fetch(root: str, get: Get) -> TemplateRenderer | None:
    try:
        return TemplateRenderer.from_served(get(f"{root}/leyline/tokenizer"))
    except MissingDependencyError as err:
        why = str(err)
    except RenderError as err:
        why = f"what it gives cannot be used: {err}"
    except Exception as err:  # noqa: BLE001 - any SDK, any transport: without a tokenizer the server renders
        why = f"GET /leyline/tokenizer failed: {err}"
    logger.info("%s renders histories for this client, which takes longer than rendering here: %s", root, why)
    return None


class LazyRenderer:
    """The renderer that `choose` returns, chosen at its first use: turns that render nothing fetch nothing."""

    def __init__(self, choose: Callable[[], Renderer]) -> None:
        self._choose = choose

    @cached_property
    def chosen(self) -> Renderer:
        """The renderer behind this one."""
        return self._choose()

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> Rendered:
        return self.chosen.render(messages, tools=tools, template_kwargs=template_kwargs, options=options)

    def texts(self, sequences: Sequence[Sequence[int]], *, skip_special: bool = False) -> list[str] | None:
        return self.chosen.texts(sequences, skip_special=skip_special)

    def count(self, text: str) -> int:
        return self.chosen.count(text)
