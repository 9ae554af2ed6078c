"""The bundled demo model: the folders of its checkpoint and of its draft head, and questions for it."""

from pathlib import Path

__all__ = ["DEMO_QUESTIONS", "SYSTEM_PROMPT", "demo_checkpoint", "demo_draft_head"]

SYSTEM_PROMPT = (
    "You are the small demo model of graftlm, a friendly assistant that answers short questions. "
    "You know the capitals of many countries, the days of the week, the months of the year, "
    "and a few facts about animals and colours. You can add and subtract small numbers, count, spell words, "
    "give plurals and opposites, write short JSON records, and tell a short story when someone asks for one. "
    "Answer every question in one short and complete sentence. When you write JSON, write only the JSON "
    "and nothing else. When you count, put a comma between the numbers. When you spell a word, put a dash "
    "between the letters. Be polite, be brief, and never guess: if you do not know the answer, say so. "
    "You run on an ordinary computer, so everyone can try a language model at home."
)
"""A system prompt of about 150 tokens, so that requests share a prefix that is worth caching."""

DEMO_QUESTIONS = (
    "What is the capital of Portugal?",
    "What is 47 plus 38?",
    "Write a JSON record for Ana, age 31, city Lima.",
    "Spell the word rabbit.",
    "Which day comes after Thursday?",
    "Tell me a short story about a fox named Mia in the forest.",
)
"""Example questions. None of them is in the training text."""


def demo_checkpoint() -> Path:
    """Return the folder of the bundled Hugging Face checkpoint."""
    return Path(__file__).parent / "checkpoint"


def demo_draft_head() -> Path:
    """Return the folder of the EAGLE-3 head of the bundled model."""
    return Path(__file__).parent / "eagle3"
