"""Regular expressions that end a growing text, in linear time.

A match is found at the character that completes it, so its end is the earliest possible one. Its start is the earliest
start of all matches with this end. Neither depends on how the text is cut into pieces.
"""

from graftlm.stop_patterns.automaton import MAX_MATCH_CHARS, Automaton, PatternTracker, compile_pattern
from graftlm.stop_patterns.nfa import MAX_STATES, PatternError

__all__ = ["MAX_MATCH_CHARS", "MAX_STATES", "Automaton", "PatternError", "PatternTracker", "compile_pattern"]
