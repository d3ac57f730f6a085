"""The life of a session in the context manager: what is planned, what is remembered, and who is found again."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import pytest

from byte_renderer import END, ByteRenderer, encode
from leyline_agent.config import Config
from leyline_agent.directives import Mode
from leyline_agent.edits import MessageEdit, Part, Turn
from leyline_agent.manager import ContextManager, Session
from leyline_agent.policy import Policy
from leyline_agent.report import FallbackReason, TurnReport
from leyline_agent.token_changes import Cause
from leyline_agent.turn_plan import BaseSource, TurnPlan

Messages = list[dict[str, Any]]


@dataclass
class Scripted(Policy):
    """Returns the edits that the test last gave it."""

    edits: list[MessageEdit] = field(default_factory=list)
    error: Exception | None = None

    def decide(self, turn: Turn) -> list[MessageEdit]:
        if self.error is not None:
            raise self.error
        return self.edits


def call(name: str) -> dict[str, Any]:
    return {"id": name, "type": "function", "function": {"name": "look", "arguments": "{}"}}


def tool_history(rounds: int) -> Messages:
    messages: Messages = [
        {"role": "system", "content": "You are a careful agent."},
        {"role": "user", "content": "Look at everything, please."},
    ]
    for number in range(rounds):
        messages.append({"role": "assistant", "content": f"round {number}", "tool_calls": [call(f"c{number}")]})
        messages.append({"role": "tool", "tool_call_id": f"c{number}", "content": f"output {number}: " + "x" * 40})
    return messages


def serve(session: Session, plan: TurnPlan, output: list[int], marks: tuple[tuple[int, int, int], ...] = ()) -> None:
    """What a client does after a turn that the server answered."""
    prompt = plan.input_ids
    if prompt is None:
        prompt = ByteRenderer().render(plan.messages).token_ids.tolist()
    session.commit(plan, prompt_ids=prompt, output_ids=[output], report=TurnReport(marks=marks))


def answer(message: dict[str, Any]) -> list[int]:
    """The tokens a model would have sampled to say `message`: its rendering behind the generation prompt."""
    from byte_renderer import GENERATION_PROMPT, message_tokens

    return message_tokens(message)[len(GENERATION_PROMPT) : -1]


def spliced(plan: TurnPlan) -> list[int]:
    assert plan.tokens is not None
    return plan.tokens.directives.apply(plan.base[: plan.tokens.base_len].tolist()) + list(plan.tokens.new_tokens)


def served_session(policy: Policy, rounds: int, **config: Any) -> tuple[Session, ByteRenderer]:
    """A session whose turns up to `rounds` tool calls were served without edits."""
    renderer = ByteRenderer()
    session = ContextManager(policy, renderer, Config(**config)).session("s")
    history = tool_history(rounds)
    for end in [2, *range(4, len(history) + 1, 2)][:-1]:
        serve(session, session.plan(history[:end]), answer(history[end]))
    return session, renderer


def test_an_edit_of_a_served_message_becomes_one_directive_inside_it() -> None:
    policy = Scripted()
    session, renderer = served_session(policy, 3)
    history = tool_history(3)
    policy.edits = [MessageEdit(3, "[cut]", reason="old")]

    plan = session.plan(history)

    assert plan.base_source is BaseSource.SERVED
    [planned] = plan.directives
    assert planned.cause is Cause.POLICY
    assert planned.edits == (policy.edits[0],)
    rendered = renderer.render(plan.messages)
    start, end = rendered.span_of(3)
    assert start <= planned.directive.start <= planned.directive.start + len(planned.directive.replacement) <= end
    assert plan.input_ids == rendered.token_ids.tolist() == spliced(plan)
    assert plan.messages[3]["content"] == "[cut]"
    assert history == tool_history(3)


def test_nothing_is_rendered_while_nothing_is_edited() -> None:
    session, renderer = served_session(Scripted(), 4)
    plan = session.plan(tool_history(4))
    assert renderer.renderings == 0
    assert plan.input_ids is None
    assert plan.request_extras()["return_input_ids_in_sglext"] is True


def test_an_edit_of_what_is_new_this_turn_needs_no_directive() -> None:
    policy = Scripted()
    session, _ = served_session(policy, 3)
    policy.edits = [MessageEdit(7, "[cut]", mode=Mode.FORGET)]
    assert session.plan(tool_history(3)).directives == ()


def test_an_edit_in_force_is_not_sent_twice_and_its_end_undoes_it() -> None:
    policy = Scripted()
    session, _ = served_session(policy, 3)
    history = tool_history(4)
    policy.edits = [MessageEdit(3, "[cut]")]
    serve(session, session.plan(history[:8]), answer(history[8]), marks=((60, 1, 1),))

    held = session.plan(history)
    assert held.directives == ()
    assert held.marks == ((60, 1, 1),)
    assert held.splice_request.marks == [(60, 1, 1)]

    policy.edits = []
    undone = session.plan(history)
    [planned] = undone.directives
    assert planned.cause is Cause.POLICY
    assert bytes(planned.directive.replacement).startswith(b"output 1"[:0])
    assert undone.input_ids == ByteRenderer().render(history).token_ids.tolist()


def test_forgetting_what_was_amortized_is_sent_though_no_token_differs() -> None:
    policy = Scripted()
    session, renderer = served_session(policy, 3)
    history = tool_history(4)
    policy.edits = [MessageEdit(3, "[cut]")]
    serve(session, session.plan(history[:8]), answer(history[8]), marks=((60, 1, 1),))

    policy.edits = [MessageEdit(3, "[cut]", mode=Mode.FORGET)]
    plan = session.plan(history)

    [planned] = plan.directives
    assert planned.directive.mode is Mode.FORGET
    assert (planned.directive.start, planned.directive.end) == renderer.render(plan.messages).span_of(3)
    assert spliced(plan) == renderer.render(plan.messages).token_ids.tolist()


def test_forgetting_a_dropped_pair_reaches_from_the_message_before() -> None:
    policy = Scripted()
    session, renderer = served_session(policy, 3)
    history = tool_history(4)
    drop = [MessageEdit(i, None, Part.MESSAGE, group="pair") for i in (2, 3)]
    policy.edits = drop
    serve(session, session.plan(history[:8]), answer(history[8]), marks=((60, 1, 1),))

    policy.edits = [MessageEdit(i, None, Part.MESSAGE, Mode.FORGET, group="pair") for i in (2, 3)]
    plan = session.plan(history)

    assert plan.directives[0].directive.mode is Mode.FORGET
    assert plan.directives[0].directive.start == renderer.render(plan.messages).span_of(1)[1]


def test_forgetting_is_never_missed_for_want_of_spans() -> None:
    class Spanless(ByteRenderer):
        def render(self, *args: Any, **kwargs: Any) -> Any:
            from dataclasses import replace

            from leyline_agent.errors import RenderError

            def refuse(_: int) -> tuple[int, int]:
                raise RenderError("no spans here")

            return replace(super().render(*args, **kwargs), span_of=refuse)

    policy = Scripted()
    session = ContextManager(policy, Spanless()).session("s")
    history = tool_history(3)
    serve(session, session.plan(history[:2]), answer(history[2]))
    policy.edits = [MessageEdit(1, "nothing", mode=Mode.AMORTIZE)]
    serve(session, session.plan(history[:4]), answer(history[4]), marks=((30, 1, 1),))
    policy.edits = [MessageEdit(1, "nothing", mode=Mode.FORGET)]
    assert session.plan(history[:6]).mode is Mode.FORGET


def test_a_policy_that_raises_leaves_the_last_good_view() -> None:
    policy = Scripted([MessageEdit(3, "[cut]")])
    session, _ = served_session(policy, 3)
    policy.error = ZeroDivisionError("oops")
    plan = session.plan(tool_history(3))
    assert plan.messages[3]["content"] == "[cut]"
    assert [f.reason for f in plan.fallbacks] == [FallbackReason.POLICY_FAILED]
    assert "oops" in plan.fallbacks[0].detail


def test_an_edit_that_orphans_a_result_is_refused_and_the_others_hold() -> None:
    policy = Scripted([MessageEdit(2, None, Part.MESSAGE), MessageEdit(5, "[cut]")])
    session = ContextManager(policy, ByteRenderer()).session("s")
    plan = session.plan(tool_history(3))
    assert [m["role"] for m in plan.messages] == [m["role"] for m in tool_history(3)]
    assert plan.messages[5]["content"] == "[cut]"
    assert plan.fallbacks[0].reason is FallbackReason.HISTORY_REFUSED


def test_sampled_tokens_stay_where_only_the_tokenization_differs() -> None:
    """Most sampled texts encode to other ids than were sampled; the KV of the sampled ones is what the server has."""
    policy = Scripted()
    session, renderer = served_session(policy, 2, template_mode=Mode.AMORTIZE)
    history = tool_history(3)
    from byte_renderer import pair_token

    sampled = [pair_token("ro"), *answer(history[6])[2:]]
    serve(session, session.plan(history[:6]), sampled)

    plan = session.plan(history)

    assert plan.directives == ()
    assert plan.input_ids is not None
    prompt_len = len(renderer.render(history[:6]).token_ids)
    assert plan.input_ids[prompt_len : prompt_len + len(sampled)] == sampled
    assert plan.tokens is not None
    assert plan.tokens.base_len == prompt_len + len(sampled)

    serve(session, plan, [END])
    again = session.plan([*history, {"role": "assistant", "content": ""}, {"role": "user", "content": "go on"}])
    assert again.directives == ()
    assert again.input_ids is not None
    assert again.input_ids[: len(plan.input_ids)] == plan.input_ids


def test_sampled_tokens_that_say_something_else_are_replaced() -> None:
    policy = Scripted()
    session, renderer = served_session(policy, 2, template_mode=Mode.AMORTIZE)
    history = tool_history(3)
    serve(session, session.plan(history[:6]), [*encode("ROUND 2 and its call"), END])
    plan = session.plan(history)
    assert plan.input_ids == renderer.render(history).token_ids.tolist()


def test_text_that_looks_like_a_special_token_is_not_taken_for_one() -> None:
    policy = Scripted()
    session, renderer = served_session(policy, 2, template_mode=Mode.AMORTIZE)
    history = tool_history(3)
    spelled = [*answer(history[6])[:-1], *encode("<|im_end|>")]  # as letters, where the template has the one token
    serve(session, session.plan(history[:6]), spelled)
    assert session.plan(history).input_ids == renderer.render(history).token_ids.tolist()


@pytest.mark.parametrize(("mode", "amortizes"), [(Mode.AMORTIZE, True), (Mode.FORGET, False), (Mode.AUTO, False)])
def test_reasoning_that_the_template_strips_follows_the_config(mode: Mode, amortizes: bool) -> None:
    session, renderer = served_session(Scripted(), 2, template_mode=mode)
    history = tool_history(3)
    history[6]["reasoning_content"] = "hmm " * 20
    serve(session, session.plan(history[:6]), answer(history[6]))
    serve(session, session.plan(history), answer({"role": "assistant", "content": "so"}))
    later: Messages = [*history, {"role": "assistant", "content": "so"}, {"role": "user", "content": "and?"}]

    plan = session.plan(later)

    assert bool(plan.directives) is amortizes
    if amortizes:
        assert [one.cause for one in plan.directives] == [Cause.TEMPLATE]
        assert plan.input_ids == renderer.render(later).token_ids.tolist()


def test_an_exact_session_is_never_made_approximate_by_the_template() -> None:
    policy = Scripted([MessageEdit(3, "[cut]", mode=Mode.FORGET)])
    session, _ = served_session(policy, 2)
    history = tool_history(3)
    serve(session, session.plan(history[:6]), [*encode("ROUND 2 and its call"), END])
    assert all(one.directive.mode is Mode.FORGET for one in session.plan(history).directives)


def test_auto_asks_the_chooser() -> None:
    asked = []

    def choose(question: Any) -> Mode:
        asked.append(question)
        return Mode.FORGET

    policy = Scripted()
    manager = ContextManager(policy, ByteRenderer(), choose_mode=choose)
    session = manager.session("s")
    history = tool_history(2)
    serve(session, session.plan(history[:4]), answer(history[4]))
    policy.edits = [MessageEdit(3, "[cut]", mode=Mode.AUTO)]
    plan = session.plan(history)
    assert plan.mode is Mode.FORGET
    assert asked[0].downstream > 0


def test_without_an_id_a_history_finds_its_turn_and_a_fork_finds_the_same() -> None:
    policy = Scripted()
    manager = ContextManager(policy, ByteRenderer())
    history = tool_history(3)
    for end in (2, 4, 6):
        session = manager.session()
        serve(session, session.plan(history[:end]), answer(history[end]))
    fork = [*history[:4], {"role": "assistant", "content": "another way"}, {"role": "user", "content": "why?"}]
    policy.edits = [MessageEdit(3, "[cut]")]
    assert manager.session().plan(history).index == 3
    forked = manager.session().plan(fork)
    assert forked.index == 2
    assert forked.input_ids == ByteRenderer().render(forked.messages).token_ids.tolist()


def test_named_sessions_and_scopes_do_not_see_each_other() -> None:
    manager = ContextManager(Scripted(), ByteRenderer())
    history = tool_history(1)
    serve(manager.session("a"), manager.session("a").plan(history[:2]), answer(history[2]))
    assert manager.session("a").plan(history).index == 1
    assert manager.session("b").plan(history).index == 0
    assert manager.session("a", scope="other model").plan(history).index == 0


def test_a_with_block_forgets_a_named_session() -> None:
    manager = ContextManager(Scripted(), ByteRenderer())
    with manager.session("a") as session:
        serve(session, session.plan(tool_history(0)), [END])
        assert len(manager.store) == 1
    assert len(manager.store) == 0
    assert manager.store.token_count == 0


def test_memory_is_bounded_by_turns_and_by_tokens() -> None:
    for config in (Config(max_turns=3), Config(max_tokens=400)):
        manager = ContextManager(Scripted(), ByteRenderer(), config)
        for number in range(20):
            session = manager.session(str(number))
            serve(session, session.plan(tool_history(0)), [END])
        assert 1 <= len(manager.store) <= 4
        assert manager.store.token_count <= 400


def test_after_a_restart_the_base_is_recomputed_from_the_policy() -> None:
    history = tool_history(4)

    def cut_all_but_two(messages: Messages) -> Messages:
        tools = [k for k, message in enumerate(messages) if message["role"] == "tool"]
        for k in tools[:-2]:
            messages[k]["content"] = "[cut]"
        return messages

    plan = ContextManager(cut_all_but_two, ByteRenderer()).session().plan(history)

    assert plan.base_source is BaseSource.RECOMPUTED
    before = cut_all_but_two(copy.deepcopy(history[:8]))
    assert plan.base == ByteRenderer().render(before).token_ids
    assert len(plan.directives) == 1
    assert spliced(plan) == plan.input_ids


def test_text_repeated_in_a_new_output_is_not_taken_from_the_old_one() -> None:
    """A diff of the whole prompts found the tail of a cut output again in the next one, and kept its KV for it."""
    policy = Scripted()
    session, renderer = served_session(policy, 2)
    history = tool_history(3)
    history[5]["content"] = shared = "the same long listing " * 6
    serve(session, session.plan(history[:6]), answer(history[6]))
    history[7]["content"] = "again: " + shared
    policy.edits = [MessageEdit(5, "[cut]")]
    plan = session.plan(history)
    assert plan.tokens is not None
    start, end = renderer.render(plan.messages).span_of(5)
    for planned in plan.directives:
        assert start <= planned.directive.start
        assert planned.directive.start + len(planned.directive.replacement) <= end


def test_a_history_that_the_caller_rewrote_is_found_by_its_end() -> None:
    policy = Scripted()
    session, renderer = served_session(policy, 4, rewrite_mode=Mode.AMORTIZE)
    history = tool_history(4)
    history[3] = {**history[3], "content": "[cleared by somebody else]"}

    plan = session.plan(history)

    assert plan.base_source is BaseSource.SERVED
    assert [one.cause for one in plan.directives] == [Cause.CALLER]
    assert plan.input_ids == renderer.render(history).token_ids.tolist()


def test_edits_move_with_their_messages_when_the_caller_drops_some() -> None:
    policy = Scripted()
    session, _ = served_session(policy, 4, rewrite_mode=Mode.AMORTIZE)
    history = tool_history(5)
    policy.edits = [MessageEdit(5, "[cut]")]
    serve(session, session.plan(history[:10]), answer(history[10]), marks=((60, 1, 1),))
    shorter = [*history[:2], *history[4:]]
    policy.edits = [MessageEdit(3, "[cut]")]

    plan = session.plan(shorter)

    assert {one.cause for one in plan.directives} == {Cause.CALLER}


def test_an_interrupted_amortized_turn_leaves_the_base_of_the_turn_before() -> None:
    policy = Scripted()
    session, _ = served_session(policy, 3)
    history = tool_history(3)
    policy.edits = [MessageEdit(3, "[cut]")]
    first = session.plan(history)
    session.commit(first, partial=True)
    again = session.plan(history)
    assert again.base == first.base
    assert again.directives == first.directives


def test_several_answers_to_one_prompt_are_each_a_base() -> None:
    manager = ContextManager(Scripted(), ByteRenderer(), Config(template_mode=Mode.AMORTIZE))
    session = manager.session()
    start = tool_history(0)
    first, second = ({"role": "assistant", "content": text} for text in ("the first answer", "a second one"))
    plan = session.plan(start)
    session.commit(plan, prompt_ids=ByteRenderer().render(start).token_ids, output_ids=[answer(first), answer(second)])
    for reply in (first, second):
        following = session.plan([*start, reply, {"role": "user", "content": "more"}])
        assert following.tokens is not None
        assert following.tokens.base_len == len(following.base)


def test_a_dry_run_predicts_and_changes_nothing() -> None:
    policy = Scripted()
    session, _ = served_session(policy, 3)
    policy.edits = [MessageEdit(3, "[cut]")]
    plan = session.plan(tool_history(3), dry_run=True)
    predicted = plan.predicted
    assert predicted is not None
    assert predicted.exact + predicted.amortized + predicted.prefilled == predicted.prompt_tokens
    assert predicted.amortized > 0
    assert plan.request_extras() == {}
    held = len(session.manager.store)
    session.commit(plan)
    assert len(session.manager.store) == held
    assert "amortized" in plan._repr_html_()


def test_images_are_never_sent_as_token_ids() -> None:
    session = ContextManager(Scripted([MessageEdit(1, "hi")]), ByteRenderer()).session()
    image = {"type": "image_url", "image_url": {"url": "data:,"}}
    plan = session.plan([{"role": "user", "content": [image]}, *tool_history(1)[2:]])
    assert plan.input_ids is None
    assert FallbackReason.REQUEST_UNSUPPORTED in [f.reason for f in plan.fallbacks]
