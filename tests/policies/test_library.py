"""What each policy does to a small history, and which settings it refuses."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest

from histories import calls, result, says, session, step, system, user
from leyline_agent import policies
from leyline_agent.directives import Mode
from leyline_agent.edits import Message, MessageEdit, Part, Turn, Usage, View, apply_edits
from leyline_agent.errors import ConfigError, PolicyError
from leyline_agent.policies import factory, placeholders
from leyline_agent.policies.placeholders import looks_failed
from leyline_agent.policy import Policy
from leyline_agent.replay import replay

LONG = "line of output\n" * 40


def view(policy: Policy, messages: list[dict[str, Any]], **turn: Any) -> View:
    return apply_edits(messages, policy.decide(Turn(tuple(messages), **turn)))


def contents(shown: View) -> list[Any]:
    return [message.get("content") for message in shown.messages]


def test_truncate_cuts_what_is_older_than_keep_turns() -> None:
    history = session(4)
    shown = view(policies.TruncateToolOutputs(keep_turns=2, max_chars=200), history)
    cut = [k for k, message in enumerate(history) if shown.messages[k] is not message]
    assert cut == [3, 5], "the outputs of the last two turns stay whole"
    assert shown.messages[3]["content"] == history[3]["content"][:200] + placeholders.CUT_OUTPUT


def test_truncate_leaves_what_a_cut_would_not_shorten_and_what_is_not_text() -> None:
    image = [{"type": "image_url", "image_url": {"url": "data:,"}}]
    history = [user(), *step("a", "x" * 260), *step("b", "short"), calls(("c", {})), result(image), *session(3)[2:]]
    shown = view(policies.TruncateToolOutputs(keep_turns=1), history)
    assert contents(shown)[:7] == contents(apply_edits(history, ()))[:7]


def test_truncate_keeps_the_shape_of_parts() -> None:
    parts = [{"type": "text", "text": LONG}, {"type": "text", "text": LONG}]
    shown = view(
        policies.TruncateToolOutputs(keep_turns=1), [user(), calls(("a", {})), result(parts), says("ok"), user()]
    )
    assert shown.messages[2]["content"] == [{"type": "text", "text": (LONG + LONG)[:200] + placeholders.CUT_OUTPUT}]


def test_truncate_never_touches_an_output_the_model_has_not_seen() -> None:
    history = [user(), *step("a", LONG)]
    assert view(policies.TruncateToolOutputs(keep_turns=1, max_chars=0), history).messages == tuple(history)


def test_truncate_in_a_text_protocol_needs_to_be_told_and_leaves_people_alone() -> None:
    history = [user("task"), says("```\ncat a.py\n```"), user(LONG), says("What else?"), user(LONG), says("ok"), user()]
    assert view(policies.TruncateToolOutputs(keep_turns=1), history).messages == tuple(history)
    shown = view(policies.TruncateToolOutputs(keep_turns=1, text_protocol=True), history)
    assert [k for k in range(len(history)) if shown.messages[k] is not history[k]] == [2]


def test_clear_tool_uses_waits_for_its_trigger_and_keeps_the_newest() -> None:
    history = session(8)
    tokens = 8 * 100
    assert view(policies.ClearToolUses(trigger=10 * tokens), history).messages == tuple(history)
    shown = view(policies.ClearToolUses(trigger=tokens // 2, keep=3, clear_at_least=100), history)
    cleared = [k for k, m in enumerate(shown.messages) if m["content"] == placeholders.REMOVED_OUTPUT]
    assert cleared == [3, 5, 7, 9, 11]


def test_clear_tool_uses_does_nothing_for_less_than_clear_at_least() -> None:
    policy = policies.ClearToolUses(trigger=1, keep=3, clear_at_least=10_000)
    assert policy.decide(Turn(tuple(session(8)))) == []


def test_clear_tool_uses_clears_inputs_with_the_output_or_not_at_all() -> None:
    policy = policies.ClearToolUses(trigger=0, keep=0, clear_at_least=0, clear_tool_inputs=True, exclude_tools=("b",))
    history = [user(), *step("a", LONG, x=1), *step("b", LONG, x=1), says("ok"), user()]
    edits = policy.decide(Turn(tuple(history)))
    assert [(e.index, e.part) for e in edits] == [(2, Part.CONTENT), (1, Part.ARGUMENTS)]
    assert len({e.group for e in edits}) == 1
    assert apply_edits(history, edits).messages[1]["tool_calls"][0]["function"]["arguments"] == "{}"


def test_clear_tool_uses_goes_by_the_servers_count() -> None:
    """langchain#34664, openclaw#99864: counting by itself, without tools, triggers at the wrong time."""
    policy = policies.ClearToolUses(trigger=5_000, keep=0, clear_at_least=0)
    history = (*session(3), says("ok"), user())
    assert policy.decide(Turn(history)) == []
    assert policy.decide(Turn(history, usage=Usage(prompt_tokens=6_000, cached_tokens=0)))
    assert policy.decide(Turn(history, usage=Usage(prompt_tokens=600, cached_tokens=90_000))) == []
    tools = ({"type": "function", "function": {"name": "t", "description": "word " * 5_000}},)
    assert policy.decide(Turn(history, tools=tools))


def test_a_failure_that_is_cleared_still_says_that_it_failed() -> None:
    history = [user(), *step("a", "Error: no.\n" + LONG), *step("b", LONG), says("ok"), user()]
    shown = view(policies.ClearToolUses(trigger=0, keep=0, clear_at_least=0), history)
    assert [m["content"] for m in shown.messages if m["role"] == "tool"] == [
        placeholders.REMOVED_FAILURE,
        placeholders.REMOVED_OUTPUT,
    ]
    assert looks_failed(shown.messages[2])
    assert not looks_failed(shown.messages[4])


@pytest.mark.parametrize(
    ("text", "failed"),
    [
        ("Error: flight not available", True),
        ("Traceback (most recent call last):\n...", True),
        ("ValueError: x", True),
        ('{"error": "busy"}', True),
        ('{"success": false}', True),
        ("exit code: 2\n...", True),
        ("bash: foo: command not found", True),
        ("exit code: 0\nfine", False),
        ('{"error": null, "rows": 3}', False),
        ("0 errors, 3 passed", False),
        ("def test_error(): ...", False),
        ("The error handling code is in errors.py", False),
        ("", False),
        *((text, "failed" in text or "interrupted" in text) for text in placeholders.OF_OUTPUTS),
    ],
)
def test_failures_are_told_from_other_outputs(text: str, failed: bool) -> None:
    assert looks_failed({"role": "tool", "content": text}) is failed


def test_placeholders_of_completed_calls_say_so() -> None:
    for text in placeholders.OF_OUTPUTS:
        assert ("completed" in text) != ("failed" in text or "interrupted" in text)
        assert "{" not in text, "a placeholder is constant"
        assert not any(char.isdigit() for char in text)


def test_clear_thinking_keeps_the_newest_of_both_kinds() -> None:
    history = [user(), says("a", reasoning_content="r1"), user(), says("<think>r2</think>b"), user()]
    history += [says("c", reasoning_content="r3"), user()]
    shown = view(policies.ClearThinking(keep=1), history)
    assert shown.messages[1] == {"role": "assistant", "content": "a"}
    assert shown.messages[3]["content"] == "b"
    assert shown.messages[5] is history[5]
    assert policies.ClearThinking(keep="all").decide(Turn(tuple(history))) == ()


def test_clear_thinking_leaves_a_message_that_is_nothing_but_thinking() -> None:
    history = [user(), says("<think>only</think>"), user()]
    assert view(policies.ClearThinking(keep=0), history).messages == tuple(history)


def test_failed_retries_go_whole_where_nothing_else_is_said() -> None:
    history = [user(), *step("run", "Error: x", command="make"), *step("run", "ok", command="make"), user()]
    shown = view(policies.DropFailedRetries(), history)
    assert shown.sources == (0, 3, 4, 5)


def test_failed_retries_with_text_or_siblings_keep_their_call() -> None:
    failed = "Error: " + LONG
    spoken = [calls(("run", {"command": "make"}), content="I try."), result(failed)]
    parallel = [calls(("run", {"command": "make"}), ("ls", {})), result(failed, "c0"), result("a", "c1")]
    for first in (spoken, parallel):
        history = [user(), *first, *step("run", "ok", command="make"), user()]
        shown = view(policies.DropFailedRetries(), history)
        assert shown.messages[2]["content"] == placeholders.RETRIED
        assert len(shown.messages) == len(history)


def test_a_failure_without_a_later_success_stays() -> None:
    history = [user(), *step("run", "Error: x", command="make"), *step("run", "ok", command="make test"), user()]
    assert view(policies.DropFailedRetries(), history).messages == tuple(history)
    assert view(policies.DropFailedRetries(match="tool"), history).sources == (0, 3, 4, 5)


def test_superseded_drops_the_older_read_of_the_same_thing() -> None:
    history = [user()]
    history += step("read_file", LONG, path="a.py") + step("read_file", LONG, path="a.py", offset=100)
    history += step("write_file", LONG, path="a.py") + step("write_file", LONG, path="a.py")
    history += [*step("read_file", LONG + "newer", path="a.py"), says("ok"), user()]
    shown = view(policies.DropSuperseded(), history)
    assert [k for k, m in enumerate(shown.messages) if m is not history[k]] == [2]
    assert shown.messages[2]["content"] == placeholders.SUPERSEDED


def test_a_failed_read_replaces_nothing() -> None:
    history = [
        user(),
        *step("read_file", LONG, path="a"),
        *step("read_file", "Error: gone", path="a"),
        says("ok"),
        user(),
    ]
    assert view(policies.DropSuperseded(), history).messages == tuple(history)


def test_repeats_are_shown_once() -> None:
    history = [user(), *step("ls", LONG), *step("ls", LONG), *step("ls", LONG + "x"), says("ok"), user()]
    assert contents(view(policies.DropRepeats(), history))[2] == placeholders.REPEATED_BELOW
    assert contents(view(policies.DropRepeats(keep="first"), history))[4] == placeholders.REPEATED_ABOVE
    short = [user(), *step("set", "OK"), *step("set", "OK"), says("ok"), user()]
    assert view(policies.DropRepeats(), short).messages == tuple(short)


def test_repeats_kept_first_never_edit_what_was_served() -> None:
    history = [user(), *step("ls", LONG), *step("ls", LONG), *step("ls", LONG), says("ok"), user()]
    turns = list(replay(policies.DropRepeats(keep="first"), history))
    for before, now in itertools.pairwise(turns):
        assert now.view.messages[: len(before.view.messages)] == before.view.messages


def test_window_keeps_head_and_newest_turns_and_moves_in_steps() -> None:
    lengths = []
    for turn in replay(policies.SlidingWindow(keep_turns=4, step=3), session(14)):
        shown = turn.view
        assert shown.sources[:2] == (0, 1)
        lengths.append(sum(m["role"] == "assistant" for m in shown.messages))
    assert max(lengths) == 4 + 3 - 1
    assert lengths[6:13] == [6, 4, 5, 6, 4, 5, 6]


def test_window_keeps_the_turn_with_the_newest_user_message() -> None:
    history = [system(), user("first"), says("what?"), user("the real task"), *session(9)[2:]]
    shown = view(policies.SlidingWindow(keep_turns=2, step=1), history)
    assert [m["content"] for m in shown.messages][:4] == ["You are an agent.", "first", "what?", "the real task"]


def test_redact_reaches_every_text_and_always_forgets() -> None:
    key = "sk-" + "x" * 24
    history = [
        system(f"use {key}"),
        user(f"my key is {key}"),
        {**calls(("run", {"env": {"KEY": key}, "n": 1})), "reasoning_content": f"the key {key}"},
        result([{"type": "text", "text": key}, {"type": "image_url", "image_url": {"url": "data:,"}}]),
    ]
    edits = policies.Redact().decide(Turn(tuple(history)))
    shown = apply_edits(history, edits)
    assert key not in str(shown.messages)
    assert {edit.mode for edit in edits} == {Mode.FORGET}
    assert policies.Redact().decide(Turn(shown.messages)) == [], "redacting twice changes nothing more"
    assert shown.messages[3]["content"][1] is history[3]["content"][1]


def test_redact_with_a_function() -> None:
    policy = policies.Redact(patterns=(), find=lambda text: text.replace("Bob", "[name]"))
    assert contents(view(policy, [user("Bob asks")])) == ["[name] asks"]


def test_redact_leaves_the_bytes_of_clean_arguments_alone() -> None:
    spaced = {"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": '{ "a":1 }'}}]}
    assert policies.Redact().decide(Turn((user(), spaced, result("x", "a")))) == []


def test_summarize_makes_one_summary_a_batch_and_keeps_it() -> None:
    asked: list[list[Message]] = []

    def model(messages: Any) -> str:
        asked.append(list(messages))
        return f"summary {len(asked)}"

    policy = policies.Summarize(model=model, trigger=500, keep_turns=2, batch_turns=4)
    turns = list(replay(policy, session(16)))
    assert len(asked) >= 2
    assert [m["content"] for m in asked[0][:2]] == ["You are an agent.", "Read them all."]
    last = [m["content"] for m in turns[-1].view.messages if m["content"]]
    written = [text for text in last if text.startswith("Summary of earlier work")]
    assert [text[-9:] for text in written] == [f"summary {k + 1}" for k in range(len(asked))]
    assert all(turn.refused == () for turn in turns)


def test_a_summarizer_that_says_nothing_is_an_error() -> None:
    with pytest.raises(PolicyError, match="no text"):
        policies.Summarize(model=lambda _: " ", trigger=0, keep_turns=1, batch_turns=1).decide(Turn(tuple(session(4))))


def test_chat_summarizer_asks_any_client() -> None:
    requests: list[dict[str, Any]] = []

    def create(**request: Any) -> Any:
        requests.append(request)
        return SimpleNamespace(choices=[SimpleNamespace(message=SimpleNamespace(content="done"))])

    client = SimpleNamespace(chat=SimpleNamespace(completions=SimpleNamespace(create=create)))
    summarize = policies.chat_summarizer(client, "m")
    assert summarize([user("a"), says("b")]) == "done"
    assert summarize([user("a")]) == "done"
    assert [m["role"] for m in requests[0]["messages"]] == ["user", "assistant", "user"]
    assert [m["role"] for m in requests[1]["messages"]] == ["user"]


def test_budget_goes_down_to_the_low_mark_in_one_batch_and_then_holds() -> None:
    policy = policies.TokenBudget(high_tokens=2_000, low_tokens=1_000, keep_turns=2)
    turns = list(replay(policy, session(60)))
    made = [len(turn.edits) for turn in turns]
    moved = sum(a != b for a, b in itertools.pairwise(made))
    assert 3 <= moved <= 60 * 110 // 1_000
    usage = [turn.turn.usage.prompt_tokens for turn in turns if turn.turn.usage]
    assert max(usage) <= 2_000 + 120


def test_budget_drops_turns_when_outputs_are_not_enough() -> None:
    history = [system(), user()]
    for k in range(30):
        history += [says(f"{k} " * 100), user("go on")]
    shown = view(policies.TokenBudget(high_tokens=1_000, low_tokens=400, keep_turns=2), history)
    assert len(shown.messages) < 16
    assert shown.messages[-1] is history[-1]


def test_budget_does_not_creep_when_little_can_be_freed() -> None:
    history = [system("word " * 8_000), *session(12, output_len=60)[1:]]
    turns = list(replay(policies.TokenBudget(high_tokens=2_000, low_tokens=500, keep_turns=8), history))
    assert turns[-1].edits == ()


@pytest.mark.parametrize(
    ("name", "parameters", "word"),
    [
        ("truncate_tool_outputs", {"keep_turns": 0}, "keep_turns"),
        ("truncate_tool_outputs", {"max_chars": -1}, "max_chars"),
        ("truncate_tool_outputs", {"max_chars": "many"}, "type int"),
        ("truncate_tool_outputs", {"keep": 3}, "no parameter 'keep'"),
        ("truncate_tool_outputs", {"mode": "rotate"}, "one of amortize"),
        ("clear_tool_uses", {"trigger": -1}, "trigger"),
        ("clear_tool_uses", {"placeholder": "Error: cleared"}, "reads like a failure"),
        ("clear_tool_uses", {"placeholder": " "}, "empty"),
        ("clear_thinking", {"keep": -1}, "keep"),
        ("drop_failed_retries", {"match": "name"}, "match"),
        ("drop_superseded", {"reads": "("}, "regular expression"),
        ("drop_repeats", {"keep": "both"}, "keep"),
        ("sliding_window", {"step": 0}, "step"),
        ("redact", {"patterns": ["("]}, "regular expression"),
        ("redact", {"patterns": ["a*"]}, "empty text"),
        ("redact", {"patterns": ["red"]}, "placeholder"),
        ("redact", {"mode": "amortize"}, "no parameter 'mode'"),
        ("summarize", {"keep_turns": 0}, "keep_turns"),
        ("summarize", {"model": "gpt"}, "function"),
        ("token_budget", {"low_tokens": 70_000}, "low_tokens"),
        ("hysteresis", {"policy": policies.ClearThinking(), "min_tokens": 0}, "min_tokens"),
        ("when_cold", {"policy": policies.ClearThinking(), "idle_s": 0.0}, "idle_s"),
        ("no_such_policy", {}, "truncate_tool_outputs"),
    ],
)
def test_bad_settings_are_refused_in_words(name: str, parameters: dict[str, Any], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        factory.make(name, **parameters)


@pytest.mark.parametrize("name", factory.available())
def test_the_factory_makes_every_policy(name: str) -> None:
    assert factory.make(name) == factory.from_spec(name.replace("_", "-")) or name == "keep_all"


def test_specs_read_parameters_wrappers_and_chains() -> None:
    spec = (
        'drop_repeats|hysteresis(truncate_tool_outputs:keep_turns=3,exclude_tools=["a","b"],mode=forget):min_tokens=9'
    )
    inner = policies.TruncateToolOutputs(keep_turns=3, exclude_tools=("a", "b"), mode=Mode.FORGET)
    expected = policies.Chain(policies.DropRepeats(), policies.Hysteresis(inner, min_tokens=9))
    assert factory.from_spec(spec) == expected
    config = {"name": "hysteresis", "min_tokens": 9, "policy": {"name": "drop_repeats", "keep": "first"}}
    assert factory.from_config(config) == policies.Hysteresis(policies.DropRepeats(keep="first"), min_tokens=9)


@pytest.mark.parametrize("spec", ["", "truncate_tool_outputs:keep_turns", "hysteresis(drop_repeats", "protect()"])
def test_specs_that_cannot_be_read_are_refused(spec: str) -> None:
    with pytest.raises(ConfigError):
        factory.from_spec(spec)


def test_edits_of_a_policy_are_frozen_values() -> None:
    edit = policies.TruncateToolOutputs().decide(Turn(tuple(session(4))))[0]
    assert isinstance(edit, MessageEdit)
    assert edit == policies.TruncateToolOutputs().decide(Turn(tuple(session(4))))[0]
