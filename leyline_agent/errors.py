"""Every error that Leyline raises for what a caller can get wrong, as one tree.

LeylineError
├── DirectiveError (ValueError)          a directive, or a set of them, that cannot be
├── HistoryError (ValueError)            messages that no chat template or provider would take
├── PolicyError (ValueError)             a policy whose edits were refused
├── ConfigError (ValueError)             a setting that is unknown, out of range or contradictory
├── WireError (ValueError)               JSON from the other side that does not follow the protocol
├── RenderError (RuntimeError)           messages could not be turned into token ids
├── ServerError (RuntimeError)           a server that cannot be reached, started or used
├── UnsupportedError (RuntimeError)      a configuration Leyline refuses by name
│   └── UnsupportedRopeError             a position encoding that is not a rotation
└── MissingDependencyError (ImportError) an optional package is absent; names the extra to install
"""

from __future__ import annotations


class LeylineError(Exception):
    """Base of all errors of this package. The message says what was wrong, the value, and what to do."""


class DirectiveError(LeylineError, ValueError):
    """A directive, or a set of directives, that does not describe an edit of its base."""


class HistoryError(LeylineError, ValueError):
    """A message history that is not valid for a chat model (an orphaned tool result, say)."""


class PolicyError(LeylineError, ValueError):
    """A policy returned edits that break an invariant; the last good view stays in force."""


class ConfigError(LeylineError, ValueError):
    """A setting that is unknown, out of range, or contradicts another."""


class WireError(LeylineError, ValueError):
    """A request or report that does not follow the wire protocol."""


class RenderError(LeylineError, RuntimeError):
    """Messages could not be turned into token ids."""


class ServerError(LeylineError, RuntimeError):
    """A server that cannot be reached, started, or used as asked."""


class UnsupportedError(LeylineError, RuntimeError):
    """A configuration in which Leyline would not be correct, refused by name."""


class UnsupportedRopeError(UnsupportedError):
    """A position encoding that is not a rotation by position, so that cached keys cannot be moved."""


class MissingDependencyError(LeylineError, ImportError):
    """An optional package is not installed; the message names the extra that brings it."""
