"""A chat template in the environment `transformers` gives it, with message boundaries on demand.

Boundaries come from a second rendering of the same template in which every loop over messages begins its body with a
marker. The marked text counts only if it equals the plain one once the markers are out.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from datetime import datetime
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from leyline_agent.errors import MissingDependencyError, RenderError

if TYPE_CHECKING:
    import jinja2
    from jinja2 import nodes

_MARK = "_leyline_mark"


class ChatTemplate:
    """Renders prepared messages to text. Raises RenderError when the template refuses them."""

    def __init__(self, source: str, constants: Mapping[str, Any] | None = None) -> None:
        environment = _environment()
        self.source = source
        self._constants = dict(constants or {})
        self._plain = environment.from_string(source)
        self._marked = _marked_template(environment, source)
        self._fence = f"\x00leyline-{secrets.token_hex(8)}-"
        self._fence_pattern = re.compile(re.escape(self._fence) + r"(\d+|end)\x00")

    @property
    def loops_over_parts(self) -> bool:
        """Whether the template walks content parts itself, so that it gets them as a list."""
        return re.search(r"for\s+\w+\s+in\s+\w+(\.content|\[['\"]content['\"]\])\s*(%|-%|if)", self.source) is not None

    def render(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
        return self._run(self._plain, messages, variables)

    def boundaries(self, messages: Sequence[Mapping[str, Any]], text: str, **variables: Any) -> list[int] | None:
        """Character offsets in `text` where each message begins, and where the last one ends.

        None if the marked rendering does not agree with `text` or passes over the messages out of order.
        """
        indices = {id(message): k for k, message in enumerate(messages)}

        def mark(message: Any) -> str:
            index = indices.get(id(message))
            return "" if index is None else f"{self._fence}{index}\x00"

        variables = {**variables, _MARK: mark, _MARK + "_end": f"{self._fence}end\x00"}
        marked = self._run(self._marked, messages, variables)
        pieces: list[str] = []
        found: dict[int, int] = {}
        position = length = 0
        end: int | None = None
        for match in self._fence_pattern.finditer(marked):
            pieces.append(marked[position : match.start()])
            length += match.start() - position
            position = match.end()
            if match[1] == "end":
                end = length
            else:
                found[int(match[1])] = length
        pieces.append(marked[position:])
        if "".join(pieces) != text:
            return None
        return _monotonic(found, len(messages), len(text) if end is None else end)

    def _run(self, template: jinja2.Template, messages: Sequence[Mapping[str, Any]], variables: dict[str, Any]) -> str:
        try:
            return template.render(messages=list(messages), **self._constants, **variables)
        except Exception as err:  # templates raise whatever they like: jinja2, TypeError, UndefinedError
            raise RenderError(f"the chat template refused the messages: {err}") from err


def _monotonic(found: Mapping[int, int], count: int, end: int) -> list[int] | None:
    """Starts of all messages and the end; a message without a marker begins where the next one does."""
    if count == 0:
        return [end]
    starts = [end] * (count + 1)
    for k in range(count - 1, -1, -1):
        starts[k] = found.get(k, starts[k + 1])
    starts[0] = 0
    return starts if all(a <= b for a, b in pairwise(starts)) and found else None


def _environment() -> jinja2.Environment:
    try:
        from jinja2.ext import Extension, loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError as err:
        raise MissingDependencyError("local rendering needs jinja2; pip install 'leyline-agent[tokens]'") from err

    class Generation(Extension):
        """`{% generation %}...{% endgeneration %}`, which marks the model's own text, as plain text."""

        tags = {"generation"}  # noqa: RUF012 - jinja2 wants a plain set

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)  # noqa: DTZ005 - as transformers
    return environment


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise_exception(message: str) -> None:
    raise RenderError(message)


def _marked_template(environment: jinja2.Environment, source: str) -> jinja2.Template:
    """The template with a marker at the start of every loop body whose items may be messages."""
    from jinja2 import nodes

    tree = environment.parse(source)
    lists = _message_lists(tree)
    for body in _statement_lists(tree):
        for position in range(len(body) - 1, -1, -1):
            loop = body[position]
            if not isinstance(loop, nodes.For) or not isinstance(loop.target, nodes.Name):
                continue
            call = nodes.Call(nodes.Name(_MARK, "load"), [nodes.Name(loop.target.name, "load")], [], None, None)
            loop.body.insert(0, nodes.Output([call]))
            if _names(loop.iter) & lists:
                body.insert(position + 1, nodes.Output([nodes.Name(_MARK + "_end", "load")]))
    code = environment.compile(tree)
    return environment.template_class.from_code(environment, code, environment.make_globals(None))


def _message_lists(tree: nodes.Template) -> set[str]:
    """Names that hold the messages or something made of them."""
    from jinja2 import nodes

    names = {"messages"}
    while True:
        more = {
            assign.target.name
            for assign in tree.find_all(nodes.Assign)
            if isinstance(assign.target, nodes.Name) and _names(assign.node) & names
        }
        if more <= names:
            return names
        names |= more


def _names(expression: nodes.Node) -> set[str]:
    """The variables an expression uses."""
    from jinja2 import nodes

    own = {expression.name} if isinstance(expression, nodes.Name) else set()
    return own | {name.name for name in expression.find_all(nodes.Name)}


def _statement_lists(node: nodes.Node) -> list[list[nodes.Node]]:
    """Every list of statements below `node`, the node's own included."""
    from jinja2 import nodes

    lists = []
    for field in ("body", "else_"):
        statements = getattr(node, field, None)
        if isinstance(statements, list):
            lists.append(statements)
    for child in node.iter_child_nodes():
        if isinstance(child, nodes.Stmt):
            lists.extend(_statement_lists(child))
    return lists
