"""Several ranks, several workers, hundreds of sessions: every edited turn is the reference's, whoever serves it."""

from __future__ import annotations

import asyncio
import random

import httpx
import pytest

from judge import TOLERANCE, JudgedConversation, assert_exact
from leyline_agent.directives import Directive, DirectiveSet
from leyline_agent.wire import SpliceRequest
from splice_client import generate_answer, generate_body

pytestmark = [pytest.mark.server, pytest.mark.slow]

BASE_LEN = 150
TWO_RANKS = {"SGLANG_CPU_OMP_THREADS_BIND": "0|0"}
"""SGLang wants to be told where the ranks run if they are more than the machine's NUMA nodes."""


@pytest.fixture
def two_edits(tokens):
    return Directive(60, 90, tuple(tokens(5))), Directive(120, 130)


# --- tensor parallelism ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def tp_live(cpu_server):
    return cpu_server("llama", "--tp-size", "2", env=TWO_RANKS)
