"""Random texts of JSON schemas, and texts that an automaton accepts."""

from __future__ import annotations

from typing import Any

import numpy as np

from diffusionlm.inference.constraints.byte_automaton import DEAD, ByteAutomaton, compile_expression
from diffusionlm.inference.constraints.json_schema import SchemaCompiler

accepts = ByteAutomaton.accepts


def compile_schema(schema: Any) -> ByteAutomaton:
    return compile_expression(SchemaCompiler().compile_root(schema))


def write_text(automaton: ByteAutomaton, rng: np.random.Generator, max_length: int = 400) -> str:
    """A random text, mostly of the byte classes that lead out of loops; empty if it would be longer."""
    state, text = 0, bytearray()
    members = [np.flatnonzero(automaton.byte_classes == number) for number in range(automaton.transitions_SC.shape[1])]
    while len(text) < max_length:
        classes = np.flatnonzero(automaton.transitions_SC[state] != DEAD)
        if automaton.is_accepting_S[state] and (not len(classes) or rng.random() < 0.3):
            break
        leaving = [number for number in classes if automaton.transitions_SC[state, number] != state]
        number = rng.choice(leaving if leaving and rng.random() < 0.6 else classes)
        text.append(int(rng.choice(members[number])))
        state = int(automaton.transitions_SC[state, number])
    return text.decode() if automaton.is_accepting_S[state] else ""
