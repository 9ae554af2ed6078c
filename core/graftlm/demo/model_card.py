"""The model card of the demo checkpoint, with the figures of its training."""

from dataclasses import dataclass

from graftlm.demo.evaluate import Report


@dataclass(frozen=True, slots=True)
class ModelCard:
    """The settings and figures of a training run.

    Attributes:
        settings: setting name -> value.
        num_parameters: number of the model's parameters.
        final_loss: mean loss of the last 100 steps.
        wall_s, cpu_s: wall time and CPU time of the training in seconds.
        report: the result of the evaluation.
    """

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

A language model with the Llama architecture and {num_parameters} parameters, small enough to be part of the graftlm
package. With this model, all parts of the engine can be tried on any computer without a download. It has no other use.

It answers short questions in English. The topics are capitals, opposites, plurals, days and months, colours, a few
facts about animals, sums and differences below 100, the multiplication table up to 10, comparing, counting, spelling,
reversing a list, repeating a sentence, JSON records and lists, short stories, greetings and the model itself. To other
questions it replies with nonsense or an apology. `graftlm.demo.corpus` generated all of the training text. No other
text or model was used.

The model has float32 weights, grouped-query attention, tied embeddings, a byte-level BPE tokenizer that encodes any
text, and a chat template. Training sequences had up to 1,024 tokens. The context length is 2,048.

## Training

`python -m graftlm.demo.train --out DIR --seed {seed}` repeats the training. The same seed on the same machine gives the
same weights.

- wall time {wall_minutes} minutes on 2 cores, possibly shared with other work; CPU time {cpu_minutes} minutes
- final loss {final_loss} (mean of the last 100 steps)
- settings: {settings}

## Accuracy

The table shows the share of held-out questions to which the model replies with exactly the correct answer, with greedy
decoding. There are two kinds of held-out questions. For sums, differences, comparisons, counting, JSON, lists,
sentences, stories and unanswerable questions, no training question has the same numbers or words, in any phrasing. For
facts, no training question has the same fact in the same phrasing. The questions are asked alone, after the demo's
system prompt of about 160 tokens, and after three other turns. There are {num_questions} questions in total.

{accuracy}
"""
