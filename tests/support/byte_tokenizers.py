"""A tokenizer of bytes, in the fast form of transformers, that begins and ends every text as a template says."""

from __future__ import annotations

from typing import Any

TEMPLATES = {
    "$A": 0,
    "<s> $A": 1,
    "$A </s>": 0,
    "[CLS] $A [SEP]": 1,
    "[gMASK] <sop> $A": 2,
}
"""Templates, and how many tokens each puts before a text."""
SPECIAL = ("<s>", "</s>", "<pad>", "[CLS]", "[SEP]", "[gMASK]", "<sop>")
VOCABULARY = 256 + len(SPECIAL)


def byte_tokenizer(template: str) -> Any:
    """Bytes in an order of their own, from `len(SPECIAL)` on; BOS only where the template has it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    known = {name: number for number, name in enumerate((*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())))}
    fast = Tokenizer(models.BPE(known, []))
    fast.pre_tokenizer, fast.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    fast.add_special_tokens(list(SPECIAL))
    fast.post_processor = processors.TemplateProcessing(
        single=template, special_tokens=[(name, known[name]) for name in SPECIAL]
    )
    bos = {"bos_token": "<s>"} if "<s>" in template else {}
    return PreTrainedTokenizerFast(tokenizer_object=fast, eos_token="</s>", pad_token="<pad>", **bos)
