"""The demo checkpoint's model card, written from what training measured."""

from dataclasses import dataclass

from graftlm.demo.evaluate import Report


@dataclass(frozen=True, slots=True)
class ModelCard:
    """What a reader should know about one training run."""

    settings: dict[str, object]
    num_parameters: int
    final_loss: float
    wall_s: float
    cpu_s: float
    report: Report

    def render(self) -> str:
        """Return the card as Markdown."""
        return _CARD.format(
            num_parameters=f"{self.num_parameters:,}",
            final_loss=f"{self.final_loss:.4f}",
            wall_minutes=f"{self.wall_s / 60:.1f}",
            cpu_minutes=f"{self.cpu_s / 60:.1f}",
            settings=", ".join(f"{name} {value}" for name, value in self.settings.items()),
            num_questions=f"{self.report.num_questions:,}",
            seed=self.settings["seed"],
            accuracy=self._accuracy_table(),
        )

    def _accuracy_table(self) -> str:
        accuracy = self.report.accuracy
        columns = list(accuracy)
        lines = ["| form | " + " | ".join(columns) + " |", "|---|" + "--:|" * len(columns)]
        for form in sorted(accuracy[columns[0]], key=lambda form: (form == "all", form)):
            cells = [f"{accuracy[column][form]:.1%}" for column in columns]
            lines.append(f"| {form} | " + " | ".join(cells) + " |")
        return "\n".join(lines)


_CARD = """\
---
license: apache-2.0
language: en
library_name: transformers
---

# graftlm demo model

A Llama-architecture language model with {num_parameters} parameters, small enough to ship inside graftlm. It exists
so that every part of the engine can be tried at once, on any computer and without a download. It has no other use.

It answers short questions in English: capitals, opposites, plurals, days and months, colours, a few facts about
animals, sums and differences below 100, the multiplication table up to 10, comparing, counting, spelling, reversing a
list, repeating a sentence, JSON records and lists, a short story, greetings and who it is. Anything else gets nonsense
or an apology. All of its training text was written by `graftlm.demo.corpus`; no other text or model was used.

Float32 weights, grouped-query attention, tied embeddings, a byte-level BPE tokenizer that takes any text, a chat
template. It saw sequences of up to 1,024 tokens; its context length is 2,048.

## Training

`python -m graftlm.demo.train --out DIR --seed {seed}` repeats it: the same seed on the same machine gives the same
weights.

- wall time {wall_minutes} minutes on 2 cores, which other work may have shared; CPU time {cpu_minutes} minutes
- final loss {final_loss} (mean of the last 100 steps)
- settings: {settings}

## Accuracy

Share of held-out questions answered exactly right, greedily, every character counted. Held out means: for sums,
differences, comparisons, counting, JSON, lists, sentences, stories and what it cannot know, the numbers or words are in
no training question, however it is phrased; for facts, that fact in that phrasing is not. The questions are asked
alone, after the demo's system prompt of about 160 tokens, and after three other turns:
{num_questions} questions in all.

{accuracy}
"""
