"""The judge itself: the reference cache is held against plain transformers before it judges the server."""

import pytest
import torch

from judge import TOLERANCE
from leyline_agent.directives import Directive, DirectiveSet
from reference import MUTATIONS, ReferenceModel
from tiny_models import tiny_model

MODELS = ["llama", "llama3_rope", "deepseek_v2", "deepseek_v2_mscale", "deepseek_v3"]
EDITS = DirectiveSet.of(
    Directive(20, 35, tuple(range(4))), Directive(60, 62, tuple(range(50, 70))), Directive(120, 140)
)


@pytest.fixture(scope="module", params=MODELS)
def model(request):
    return ReferenceModel.load(tiny_model(request.param))


def test_frequencies_are_those_of_the_model(model):
    theirs = model.hf.model.rotary_emb.inv_freq.double()
    torch.testing.assert_close(model.frequencies, theirs, rtol=1e-6, atol=0)


def test_prefill_in_pieces_is_a_plain_forward(model, tokens):
    prompt, sampled = tokens(90), tokens(8)
    with torch.no_grad():
        logits = model.hf(torch.tensor([prompt + sampled]), use_cache=False).logits[0]
    plain = torch.log_softmax(logits.double(), dim=-1)[len(prompt) - 1 : -1]
    state = model.prefill(prompt[:1]).extend(prompt[1:40]).extend(prompt[40:70])
    assert (state.log_probs(prompt[70:], sampled) - plain).abs().max() < TOLERANCE


@pytest.mark.parametrize("shift", [150, 1, -19, -20])
def test_moved_keys_are_keys_computed_at_the_new_positions(model, shift):
    """In a prompt of one repeated token all layers see the same at every position, but for the rotation."""
    layers = model.prefill([7] * 300).layers
    for keys, values in layers:
        old = keys[:, :, 20:100], values[:, :, 20:100]
        new = keys[:, :, 20 + shift : 100 + shift], values[:, :, 20 + shift : 100 + shift]
        for found, expected in zip(model.moved(old, shift), new, strict=True):
            torch.testing.assert_close(found, expected, rtol=0, atol=2e-5 * expected.abs().max().item())


def test_shift_zero_changes_no_bit(model, tokens):
    for layer in model.prefill(tokens(30)).layers:
        for before, after in zip(layer, model.moved(layer, 0), strict=True):
            assert torch.equal(before, after)


def test_splice_joins_what_it_should(model, tokens):
    base = tokens(200)
    spliced = model.prefill(base).splice(EDITS)
    assert list(spliced.tokens) == EDITS.apply(base)
    before = model.prefill(base).layers[0]
    first_layer = model.prefill(spliced.tokens).layers[0]  # depends on each token and its position alone
    for found, expected in zip(spliced.layers[0], first_layer, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=2e-5 * expected.abs().max().item())
    for kept, whole in zip(spliced.head(20).layers[0], before, strict=True):
        assert torch.equal(kept, whole[:, :, :20])


@pytest.mark.parametrize("mutation", MUTATIONS.values(), ids=MUTATIONS.keys())
def test_mutations_are_not_small(model, tokens, mutation):
    """What the server's tests rest on: a splice by a wrong rule lies far outside the tolerance."""
    state, rest, sampled = model.prefill(tokens(200)), tokens(7), tokens(8)
    truth = state.splice(EDITS).log_probs(rest, sampled)
    assert (state.splice(EDITS, mutation).log_probs(rest, sampled) - truth).abs().max() > 0.05
