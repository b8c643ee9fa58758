"""Plans for forecasts of measurements, which tokenise no more of the text than a forecast needs."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rope_ext_hf.errors import CorpusError
from rope_ext_hf.eval.questions import LengthsQuestion, Passkey, Perplexity
from rope_ext_hf.options.method_choice import MethodChoice
from rope_ext_hf.reading.text.documents import Document, Documents, Tokens
from rope_ext_hf.reading.text.load import load

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from rope_ext_hf.runs.measurement import RunPlan

_CHARACTERS = 8  # for each token at first: about twice as many as most tokens have


def forecast_plan(
    question: LengthsQuestion,
    model: PreTrainedModel,
    methods: MethodChoice | None,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    **settings: Any,
) -> RunPlan[Any]:
    """Return a plan with passes as long and as many as those of `question.plan`, which takes the same arguments.

    If the question limits the number of spans, only the beginnings of documents are tokenised, as far as they have that
    many spans; a run itself spreads its spans over the whole text. The text around statements is shortened as well.
    """

    def plan(shortened: LengthsQuestion) -> RunPlan[Any]:
        return shortened.plan(model, methods, tokenizer=tokenizer, **settings)

    if isinstance(question, Passkey) and question.haystack is not None:
        haystack = load(question.haystack)
        characters = _CHARACTERS * max(question.lengths)
        return plan(replace(question, haystack=_beginnings(haystack, characters, characters)))
    if not isinstance(question, Perplexity) or question.max_spans is None or question.keys_by is not None:
        return plan(question)
    documents = load(question.data)
    each = _CHARACTERS * max(question.lengths)
    whole = sum(map(_size, documents))
    while (total := each * (question.max_spans + 1)) < whole:
        try:
            made = plan(replace(question, data=_beginnings(documents, each, total)))
        except CorpusError:  # these beginnings are too short, or the text is
            each *= 4
            continue
        spans = Counter(span.length for _, spans in made.measurement.plan.documents for span in spans)
        if min(spans.values()) >= question.max_spans:
            return made
        each *= 4
    return plan(replace(question, data=documents))


def _size(document: Document | Tokens) -> int:
    return len(document.text) if document.ids is None else len(document.ids)


def _beginnings(documents: Documents, each: int, total: int) -> Documents:
    """Return the first `each` characters or token ids of the first documents, about `total` altogether."""
    shortened = Documents()
    shortened.source = documents.source
    for document in documents:
        if isinstance(document, Tokens):
            shortened.append(Tokens(document.name, document.ids[:each], document.ends[:each], document.text))
        else:
            ids = None if document.ids is None else document.ids[:each]
            shortened.append(Document(document.name, document.text[:each], ids))
        total -= _size(shortened[-1])
        if total <= 0:
            break
    return shortened
