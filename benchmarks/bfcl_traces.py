"""Histories from BFCL's multi-turn tasks: its reference calls, run through its own simulators, without a model.

    pip install --no-deps --target /tmp/bfcl bfcl-eval==2026.3.23 && pip install mpmath
    PYTHONPATH=/tmp/bfcl python benchmarks/bfcl_traces.py bfcl_long.jsonl [--set multi_turn_base] [--limit 50]

Writes one `{"id", "messages"}` a line for `leyline policies compare` and `leyline bench replay --trace`. BFCL is
Apache-2.0; the histories are the same on every run. Outputs are what the simulated file systems, cars and brokers
answer, so they are as long as those of the long-context set are meant to be.
"""

from __future__ import annotations

import argparse
import ast
import json
from importlib.resources import files
from pathlib import Path
from typing import Any


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--set", default="multi_turn_long_context")
    parser.add_argument("--limit", type=int, default=200)
    options = parser.parse_args()
    tasks, answers = read(f"BFCL_v4_{options.set}.json"), read(f"possible_answer/BFCL_v4_{options.set}.json")
    reference = {answer["id"]: answer["ground_truth"] for answer in answers}
    long_context = "long_context" in options.set
    with options.out.open("w", encoding="utf-8") as out:
        for task in tasks[: options.limit]:
            messages = history(task, reference[task["id"]], long_context=long_context)
            out.write(json.dumps({"id": task["id"], "messages": messages}) + "\n")


def read(name: str) -> list[dict[str, Any]]:
    text = (files("bfcl_eval") / "data" / name).read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def history(task: dict[str, Any], reference: list[list[str]], *, long_context: bool) -> list[dict[str, Any]]:
    from bfcl_eval.eval_checker.multi_turn_eval.multi_turn_utils import execute_multi_turn_func_call

    messages: list[dict[str, Any]] = [{"role": "system", "content": "Use the tools to do what the user asks for."}]
    for question, calls in zip(task["question"], reference, strict=True):
        messages.extend(question)
        for call in calls:
            (result,), _ = execute_multi_turn_func_call(
                [call], task["initial_config"], task["involved_classes"], "reference", task["id"], long_context
            )
            call_id = f"call_{len(messages)}"
            wanted = [{"id": call_id, "type": "function", "function": function_of(call)}]
            messages.append({"role": "assistant", "content": None, "tool_calls": wanted})
            messages.append({"role": "tool", "tool_call_id": call_id, "content": result})
        messages.append({"role": "assistant", "content": "Done."})
    return messages


def function_of(call: str) -> dict[str, str]:
    """A call written in Python as a function with JSON arguments; positional ones go by their place."""
    node = ast.parse(call, mode="eval").body
    assert isinstance(node, ast.Call)
    given = {f"argument_{place}": value for place, value in enumerate(node.args)}
    given |= {keyword.arg or "": keyword.value for keyword in node.keywords}
    arguments = {name: literal(value) for name, value in given.items()}
    return {"name": ast.unparse(node.func), "arguments": json.dumps(arguments)}


def literal(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except ValueError:
        return ast.unparse(node)


if __name__ == "__main__":
    main()
