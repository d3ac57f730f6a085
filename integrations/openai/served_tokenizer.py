"""The tokenizer of the server behind a base URL: fetched once, so that histories are rendered on this side."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

from leyline_agent.edits import Message
from leyline_agent.errors import MissingDependencyError, RenderError
from leyline_agent.integrations.openai.capability import Get
from leyline_agent.renderers import Rendered, Renderer, TemplateRenderer
from leyline_agent.renderers.verified import Verdicts

logger = logging.getLogger("leyline_agent")


class ServedTokenizers:
    """A renderer for each server; None where the server has no tokenizer to give, or this environment lacks jinja2.

    `verdicts` is what came of comparing local renderings with those of servers, for everybody who shares this object.
    """

    def __init__(self) -> None:
        self._known: dict[str, tuple[str, TemplateRenderer | None]] = {}
        self._verdicts: dict[tuple[str, str | None], tuple[str, Renderer, Verdicts]] = {}
        self._lock = threading.Lock()

    def verdicts(self, local: Renderer, base_url: str, model: str | None, rendering: str) -> Verdicts:
        """The verdicts on a local renderer against one server. Those on another renderer or rendering are dropped."""
        with self._lock:
            known = self._verdicts.get((base_url, model))
            if known is None or known[0] != rendering or known[1] is not local:
                known = self._verdicts[base_url, model] = rendering, local, Verdicts()
            return known[2]

    def of(self, root: str, get: Get, rendering: str) -> TemplateRenderer | None:
        """The renderer for the server at `root`, fetched with `get` when it is not known. Later callers wait for it.

        `rendering` is the server's word for how it renders; a server that came back with another is asked again.
        """
        with self._lock:
            known = self._known.get(root)
            if known is None or known[0] != rendering:
                known = self._known[root] = rendering, _fetch(root, get, rendering)
            return known[1]


def _fetch(root: str, get: Get, rendering: str) -> TemplateRenderer | None:
    try:
        return TemplateRenderer.from_served(get(f"{root}/leyline/tokenizer"), rendering)
    except MissingDependencyError as err:
        why = str(err)
    except RenderError as err:
        why = f"what it gives cannot be used: {err}"
    except Exception as err:  # noqa: BLE001 - any SDK, any transport: without a tokenizer the server renders
        why = f"GET /leyline/tokenizer failed: {err}"
    logger.warning("%s renders histories for this client, which takes longer than rendering here: %s", root, why)
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
