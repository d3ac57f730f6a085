"""What an edit costs and saves, and which mode that speaks for: how `Mode.AUTO` becomes AMORTIZE, FORGET or nothing.

All in seconds of one server, over the turns the session is expected to have left:

- an edit saves `net = tokens_removed - tokens_inserted` tokens on every turn left. A token that is only read from the
  cache costs `cached_read_cost` of a prefilled one (attention over it, memory that it holds; hosted prices say 0.1);
- AMORTIZE costs the prefill of what is inserted, a fixed overhead, and moving the tokens after the edit;
- FORGET costs the prefill of what is inserted and of the tokens after the edit;
- leaving it costs nothing now, and `net` cached reads on every turn left.

If the tokens after the edit will be prefilled in any case (the cache is cold, or another edit before this one forgets),
FORGET costs no more than leaving it, and it is exact: then it is chosen whenever the edit shortens the prompt.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

from leyline_agent.directives import Mode
from leyline_agent.edits import MessageEdit
from leyline_agent.errors import ConfigError

if TYPE_CHECKING:
    from leyline_agent.attribution import ModeQuestion


@dataclass(frozen=True, slots=True)
class FidelityReport:
    """How well AMORTIZE keeps to the model's own answers, measured once for a model by a canary.

    `agreement` is the share of probes (0 to 1) in which the next token after an AMORTIZE was the one after a fresh
    prefill of the unedited or of the edited prompt; `probes` is how many there were.
    """

    agreement: float
    probes: int

    def __post_init__(self) -> None:
        if not 0 <= self.agreement <= 1:
            raise ConfigError(f"agreement is {self.agreement}; it is a share between 0 and 1")
        if self.probes < 1:
            raise ConfigError(f"probes is {self.probes}; a report needs at least 1")


@dataclass(frozen=True, slots=True)
class CostFacts:
    """What is known about one edit and the server when the mode is chosen. Unknowns have stated defaults."""

    tokens_after: int
    """Cached tokens downstream of the edit."""

    tokens_removed: int
    tokens_inserted: int = 0

    prefill_tokens_per_s: float = 5_000.0
    """Measured from earlier reports: prefilled tokens over time to first token."""

    move_tokens_per_s: float = 2_000_000.0
    """Tokens copied and rotated a second by a splice."""

    splice_overhead_s: float = 0.01
    """Fixed cost of a splice: the round trip of prefilling the replacement, launches."""

    turns_left: float = 10.0
    """Model calls this session is expected to have left."""

    cached_read_cost: float = 0.1
    """Cost of a token read from the cache, of one prefilled."""

    suffix_is_cold: bool = False
    """The tokens after the edit are prefilled in any case: cold cache, or a FORGET earlier in the prompt."""

    amortize_available: bool = True
    """The server splices and has not disabled AMORTIZE for this model."""

    fidelity: FidelityReport | None = None
    min_agreement: float = 0.9
    """Below this agreement AMORTIZE is not considered. Without a report it is."""

    exactness_is_worth_s: float = 0.005
    """FORGET is preferred if it costs at most this much more than AMORTIZE: exact is better than cheap by a hair."""

    def __post_init__(self) -> None:
        for name in ("tokens_after", "tokens_removed", "tokens_inserted", "turns_left", "cached_read_cost"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be 0 or more")
        for name in ("prefill_tokens_per_s", "move_tokens_per_s"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be above 0")


@dataclass(frozen=True, slots=True)
class Choice:
    """The mode chosen (None: do not edit), the seconds behind it, and a sentence for people.

    `saved_s` is what the shorter prompt saves over the turns left; `amortize_s` and `forget_s` are what the edit costs
    now, None for a mode that was not available.
    """

    mode: Mode | None
    saved_s: float
    amortize_s: float | None
    forget_s: float
    why: str


def choose(edit: MessageEdit, facts: CostFacts) -> Mode | None:
    """The mode for an edit, None to leave it for now. An edit that does not say AUTO keeps its mode."""
    return explain(edit, facts).mode


def explain(edit: MessageEdit, facts: CostFacts) -> Choice:
    """`choose`, with the numbers and the reason."""
    token_s = 1 / facts.prefill_tokens_per_s
    net = facts.tokens_removed - facts.tokens_inserted
    saved = net * facts.cached_read_cost * token_s * facts.turns_left
    suffix = 0 if facts.suffix_is_cold else facts.tokens_after
    forget = (facts.tokens_inserted + suffix) * token_s
    refusal = _no_amortize(facts)
    amortize = None
    if refusal is None:
        move = facts.tokens_after / facts.move_tokens_per_s
        amortize = facts.tokens_inserted * token_s + facts.splice_overhead_s + move

    def choice(mode: Mode | None, why: str) -> Choice:
        return Choice(mode, saved, amortize, forget, why)

    if edit.mode is not Mode.AUTO:
        return choice(edit.mode, f"the policy asks for {edit.mode}")
    if net <= 0:
        return choice(None, f"it would not shorten the prompt ({-net} tokens longer)")
    if facts.suffix_is_cold:
        return choice(Mode.FORGET, "what follows is prefilled in any case, so an exact edit is free")
    exact = amortize is None or forget <= amortize + facts.exactness_is_worth_s
    best, cost = (Mode.FORGET, forget) if exact or amortize is None else (Mode.AMORTIZE, amortize)
    if cost > saved:
        rest = f"; {refusal}" if refusal else ""
        return choice(None, f"{best} costs {cost:.3f} s, more than the {saved:.3f} s it saves{rest}")
    return choice(best, refusal or f"{best} costs {cost:.3f} s and saves {saved:.3f} s")


def _no_amortize(facts: CostFacts) -> str | None:
    if not facts.amortize_available:
        return "the server does not amortize"
    if facts.fidelity is not None and facts.fidelity.agreement < facts.min_agreement:
        return (
            f"this model agrees with itself on {facts.fidelity.agreement:.0%} of {facts.fidelity.probes} probes "
            f"after an AMORTIZE, below {facts.min_agreement:.0%}"
        )
    return None


@dataclass(frozen=True, slots=True)
class CostModel:
    """What stays the same from edit to edit: the server, the model, the session. Makes the facts for each edit.

    `ContextManager(choose_mode=model.choose_mode)` lets it decide between AMORTIZE and FORGET; the wrapper `CostAware`
    lets it decide against an edit as well. The fields are those of `CostFacts`.
    """

    prefill_tokens_per_s: float = 5_000.0
    move_tokens_per_s: float = 2_000_000.0
    splice_overhead_s: float = 0.01
    turns_left: float = 10.0
    cached_read_cost: float = 0.1
    amortize_available: bool = True
    fidelity: FidelityReport | None = None
    min_agreement: float = 0.9

    def __post_init__(self) -> None:
        self.facts(0, 0)  # checks the values

    def facts(
        self, tokens_after: int, tokens_removed: int, tokens_inserted: int = 0, *, suffix_is_cold: bool = False
    ) -> CostFacts:
        """The facts of one edit on this server."""
        standing = {field.name: getattr(self, field.name) for field in fields(self)}
        return CostFacts(tokens_after, tokens_removed, tokens_inserted, suffix_is_cold=suffix_is_cold, **standing)

    def measured(self, prefilled_tokens: int, seconds: float, *, weight: float = 0.3) -> CostModel:
        """This model after one more turn: that many tokens prefilled in that time to first token.

        Turns with few tokens are left out, since their time is mostly overhead.
        """
        if prefilled_tokens < _MIN_MEASURED_TOKENS or seconds <= 0:
            return self
        speed = (1 - weight) * self.prefill_tokens_per_s + weight * prefilled_tokens / seconds
        return replace(self, prefill_tokens_per_s=speed)

    def choose_mode(self, question: ModeQuestion) -> Mode:
        """AMORTIZE or FORGET for an edit that will be made: a mode chooser of the context manager."""
        facts = self.facts(question.downstream, question.replaced, question.replaced)
        choice = explain(_AUTO_EDIT, facts)
        if choice.amortize_s is None or choice.forget_s <= choice.amortize_s + facts.exactness_is_worth_s:
            return Mode.FORGET
        return Mode.AMORTIZE


_MIN_MEASURED_TOKENS = 256
_AUTO_EDIT = MessageEdit(0, "", mode=Mode.AUTO)
