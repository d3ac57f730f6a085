"""What a splice should do to a KV cache, made by hand on transformers: the server's judge, sharing no code with it.

A `KvState` is a token sequence with its keys and values, as transformers (eager attention, fp32) computed them. It is
never changed: `extend` runs the model on more tokens, `head` cuts, `splice` cuts, rotates and joins. The frequencies
of the rotation are worked out here from config.json in float64.

How transformers 5.19 lays a cached key out, per layer:

    Llama        keys [1, HK, T, D], rotated whole in halves: pairs (i, i + D/2); values [1, HK, T, D]
    DeepSeek V2  keys = latent [1, 1, T, rank], no position; values = rotated part [1, 1, T, R], pairs (2i, 2i + 1)
    DeepSeek V3  the same, but the rotated part is stored de-interleaved: pairs (i, i + R/2)
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

if TYPE_CHECKING:
    from collections.abc import Sequence

    from leyline_agent.directives import Directive, DirectiveSet

Layer = tuple[Tensor, Tensor]
"""One layer's `.keys` and `.values`, as transformers names them."""


@dataclass(frozen=True)
class Rule:
    """How the downstream of a splice is moved. The default is the truth; anything else is a mutation of it."""

    sign: int = 1
    """-1 turns the keys the wrong way."""

    swap_pairing: bool = False
    """Takes interleaved pairs for halves and the other way round."""

    cumulative: bool = True
    """False moves each run by the delta of the last edit before it only, instead of by the sum of all."""

    off_by: int = 0
    """Added to every shift."""


TRUTH = Rule()
MUTATIONS = {
    "no rotation": Rule(sign=0),
    "wrong sign": Rule(sign=-1),
    "wrong pairing": Rule(swap_pairing=True),
    "last delta only": Rule(cumulative=False),
    "one position off": Rule(off_by=1),
}


def inverse_frequencies(config: dict[str, Any]) -> Tensor:
    """Radians per position of each rotated pair, float64 [R / 2], from the JSON of a model's config."""
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = float(scaling.get("rope_theta") or config["rope_theta"])
    width = config.get("qk_rope_head_dim") or config.get("head_dim")
    if not width:
        width = config["hidden_size"] // config["num_attention_heads"]
    plain = [theta ** (-2 * pair / width) for pair in range(width // 2)]
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind == "default":
        frequencies = plain
    elif kind == "llama3":
        frequencies = [_llama3(frequency, scaling) for frequency in plain]
    elif kind in ("yarn", "deepseek_yarn"):
        frequencies = _yarn(plain, theta, width, scaling)
    else:
        msg = f"the reference knows no rope type {kind!r}"
        raise ValueError(msg)
    return torch.tensor(frequencies, dtype=torch.float64)


def _llama3(frequency: float, scaling: dict[str, Any]) -> float:
    """Long waves are stretched by `factor`, short ones left alone, those between blended by their turns in context."""
    turns = scaling["original_max_position_embeddings"] * frequency / (2 * math.pi)
    low, high, factor = scaling["low_freq_factor"], scaling["high_freq_factor"], scaling["factor"]
    kept = min(1.0, max(0.0, (turns - low) / (high - low)))
    return frequency * (kept + (1 - kept) / factor)


def _yarn(plain: list[float], theta: float, width: int, scaling: dict[str, Any]) -> list[float]:
    """Pairs that turn more than `beta_fast` times in the original context keep their frequency; see YaRN, eq. 18-23."""

    def pair_with_turns(turns: float) -> float:
        context = scaling["original_max_position_embeddings"]
        return width * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(pair_with_turns(scaling.get("beta_fast") or 32)), 0)
    high = min(math.ceil(pair_with_turns(scaling.get("beta_slow") or 1)), width - 1)
    frequencies = []
    for pair, frequency in enumerate(plain):
        stretched = min(1.0, max(0.0, (pair - low) / max(high - low, 0.001)))
        frequencies.append(frequency * (1 - stretched) + frequency / scaling["factor"] * stretched)
    return frequencies


@dataclass(frozen=True)
class ReferenceModel:
    """A model folder, run by transformers."""

    path: Path
    config: dict[str, Any] = field(repr=False)
    hf: Any = field(repr=False)

    @classmethod
    def load(cls, path: str | Path) -> ReferenceModel:
        config = json.loads((Path(path) / "config.json").read_text())
        hf = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
        return cls(Path(path), config, hf)

    @property
    def vocab_size(self) -> int:
        return int(self.config["vocab_size"])

    @cached_property
    def frequencies(self) -> Tensor:
        return inverse_frequencies(self.config)

    @property
    def is_mla(self) -> bool:
        return "kv_lora_rank" in self.config

    @property
    def interleaved(self) -> bool:
        """Whether the pairs of a cached key lie next to each other (see the table at the top)."""
        return self.config["model_type"] == "deepseek_v2"

    def empty(self) -> KvState:
        return KvState(self, (), ())

    def prefill(self, tokens: Sequence[int]) -> KvState:
        return self.empty().extend(tokens)

    def rotate(self, keys: Tensor, shift: int, rule: Rule = TRUTH) -> Tensor:
        """Keys [..., R] that were rotated for some positions, turned on for positions `shift` further."""
        angles = rule.sign * (shift + rule.off_by) * self.frequencies
        cos, sin = angles.cos(), angles.sin()
        wide = keys.double()
        if self.interleaved != rule.swap_pairing:
            first, second = wide[..., 0::2], wide[..., 1::2]
            turned = torch.stack((first * cos - second * sin, first * sin + second * cos), dim=-1).flatten(-2)
        else:
            first, second = wide.chunk(2, dim=-1)
            turned = torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)
        return turned.to(keys.dtype)

    def moved(self, layer: Layer, shift: int, rule: Rule = TRUTH) -> Layer:
        """A layer's cache, moved by `shift` positions: what is not rotated keeps every bit."""
        keys, values = layer
        return (keys, self.rotate(values, shift, rule)) if self.is_mla else (self.rotate(keys, shift, rule), values)


@dataclass(frozen=True)
class KvState:
    """Tokens and their cached keys and values. Values of this class are never changed, so they may be shared freely."""

    model: ReferenceModel = field(repr=False)
    tokens: tuple[int, ...]
    layers: tuple[Layer, ...] = field(repr=False)

    def __len__(self) -> int:
        return len(self.tokens)

    def extend(self, tokens: Sequence[int]) -> KvState:
        """This cache with `tokens` run through the model behind it."""
        return self._run(tokens)[0] if tokens else self

    def log_probs(self, prompt_rest: Sequence[int], sampled: Sequence[int]) -> Tensor:
        """Log-probs [len(sampled), V] of each next token when `sampled` follows `prompt_rest`, teacher-forced."""
        _, log_probs = self._run([*prompt_rest, *sampled[:-1]])
        return log_probs[len(prompt_rest) - 1 :]

    @torch.no_grad()
    def _run(self, tokens: Sequence[int]) -> tuple[KvState, Tensor]:
        cache = DynamicCache()
        for number, (keys, values) in enumerate(self.layers):
            cache.update(keys, values, number)
        positions = torch.arange(len(self), len(self) + len(tokens))
        output = self.model.hf(
            input_ids=torch.tensor([list(tokens)]),
            position_ids=positions[None],
            past_key_values=cache,
            use_cache=True,
        )
        layers = tuple((layer.keys, layer.values) for layer in output.past_key_values.layers)
        state = KvState(self.model, (*self.tokens, *tokens), layers)
        assert all(part.shape[2] == len(state) for layer in layers for part in layer)
        return state, torch.log_softmax(output.logits[0].double(), dim=-1)

    def head(self, length: int) -> KvState:
        """The first `length` tokens of this cache (all of it if it is shorter)."""
        return replace(self, tokens=self.tokens[:length], layers=self._cut(0, length) if length else ())

    def _cut(self, start: int, end: int) -> tuple[Layer, ...]:
        return tuple((keys[:, :, start:end], values[:, :, start:end]) for keys, values in self.layers)

    def splice(self, directives: DirectiveSet | Sequence[Directive], rule: Rule = TRUTH) -> KvState:
        """This cache after an AMORTIZE of `directives`.

        From left to right: every replacement is run on what stands before it by then, every surviving run is taken
        from this cache and moved by the sum of the deltas before it. Where this cache ends (the last sampled token of a
        base has no KV), the last run ends.
        """
        if not directives:
            return self
        result, position, shift = self.head(directives[0].start), directives[0].start, 0
        for directive in directives:
            result = self.moved_onto(result, position, directive.start, shift, rule)
            result = result.extend(directive.replacement)
            position = directive.end
            shift = directive.delta + (shift if rule.cumulative else 0)
        return self.moved_onto(result, position, len(self), shift, rule)

    def moved_onto(self, front: KvState, start: int, end: int, shift: int, rule: Rule = TRUTH) -> KvState:
        """`front`, followed by this cache's tokens [start, end) moved by `shift`."""
        tokens = self.tokens[start:end]
        if not tokens:
            return front
        assert rule is not TRUTH or len(front) == start + shift
        layers = tuple(self.model.moved(layer, shift, rule) for layer in self._cut(start, end))
        if front.layers:
            layers = tuple(
                (torch.cat((keys, more_keys), dim=2), torch.cat((values, more_values), dim=2))
                for (keys, values), (more_keys, more_values) in zip(front.layers, layers, strict=True)
            )
        return replace(self, tokens=front.tokens + tokens, layers=layers)
