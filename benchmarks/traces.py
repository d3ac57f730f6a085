"""Real traces: the share of prefill that splicing saves, for each set of histories; no server, minutes on a laptop.

    python benchmarks/traces.py SET.jsonl [SET.jsonl ...] --tokenizer FOLDER/tokenizer.json --json FILE.json

Counted by comparing tokens turn by turn, as `leyline policies compare` does (docs/policies.md), with prompts in a plain
template of our own. Where histories hold no tool calls, actions in the assistant's text count as such.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from leyline_agent.bench.results import document, write_json
from leyline_agent.history import speaks_text_protocol
from leyline_agent.policies import TruncateToolOutputs
from leyline_agent.simulate import Renderer, cost_of
from leyline_agent.traces import read_traces


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sets", nargs="+", type=Path)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(options.tokenizer))
    renderer = Renderer(lambda text: tokenizer.encode(text, add_special_tokens=False).ids)
    rows = [row(file, renderer) for file in options.sets]
    print("| set | histories | turns | edited | prompt removed | prefilled, re-prefill | spliced | saved |")
    print("|---|---|---|---|---|---|---|---|")
    for one in rows:
        print(
            f"| {one['set']} | {one['traces']} | {one['turns']} | {one['edited_turns']} | {one['removed']:.1%} | "
            f"{one['reprefill_tokens']:,} | {one['splice_tokens']:,} | {one['saved']:.1%} |"
        )
    if options.json:
        config = {
            "policy": "truncate_tool_outputs:keep_turns=2,max_chars=200",
            "tokenizer": options.tokenizer.parent.name,
        }
        write_json(options.json, document("traces", config, rows))


def row(file: Path, renderer: Renderer) -> dict[str, Any]:
    traces = list(read_traces(file))
    text = 2 * sum(speaks_text_protocol(trace.messages) for trace in traces) > len(traces)
    cost = cost_of(TruncateToolOutputs(keep_turns=2, max_chars=200, text_protocol=text), traces, renderer)
    return {
        "set": file.stem,
        "text_protocol": text,
        **cost.to_json(),
        "removed": round(cost.removed_tokens / cost.history_tokens, 4),
        "saved": round(1 - cost.splice_tokens / cost.reprefill_tokens, 4),
    }


if __name__ == "__main__":
    main()
