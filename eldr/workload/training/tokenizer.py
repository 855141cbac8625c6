"""Trains the byte-level BPE tokenizer and turns the corpus into token ids.

    python -m eldr.workload.training.tokenizer CORPUS_DIR TOKENIZER_DIR

writes the tokenizer, and beside the corpus' blocks `<domain>.{train,test}.npy`: uint16 [tokens].
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from eldr.workload.training.corpus import read_blocks, read_domains

END, PAD = "<|endoftext|>", "<|pad|>"
# Ids of the two special tokens; they come first in the vocabulary and are never sampled.
END_ID, PAD_ID = 0, 1

Ids = npt.NDArray[np.uint16]


def train_tokenizer(texts: Iterable[str], vocabulary: int, context: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE over `texts`; digits are split, so numbers do not fill the vocabulary.

    Raises:
        ValueError: the vocabulary cannot hold the 256 bytes and the special tokens, or exceeds the
            uint16 ids of traces.
    """
    if not 258 <= vocabulary <= 65_536:
        raise ValueError(f"vocabulary must be in [258, 65536], got {vocabulary}")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, pad_token=PAD, model_max_length=context
    )


def encode_corpus(corpus: Path, tokenizer: PreTrainedTokenizerFast) -> dict[str, tuple[int, int]]:
    """Writes each domain's ids; returns (training, test) tokens per domain."""
    sizes = {}
    for domain in read_domains(corpus):
        parts = []
        for part in ("train", "test"):
            encoded = tokenizer.backend_tokenizer.encode_batch(read_blocks(corpus, domain, part))
            ids = np.concatenate([np.array(e.ids, np.uint16) for e in encoded])
            np.save(corpus / f"{domain}.{part}.npy", ids)
            parts.append(len(ids))
        sizes[domain] = (parts[0], parts[1])
    return sizes


def read_ids(corpus: Path, domain: str, part: str) -> Ids:
    """The ids that `encode_corpus` wrote, uint16 [tokens]."""
    ids: Ids = np.load(corpus / f"{domain}.{part}.npy", allow_pickle=False)
    return ids


def _training_texts(corpus: Path, blocks: int) -> Iterator[str]:
    for domain in read_domains(corpus):
        yield from read_blocks(corpus, domain, "train")[:blocks]


def main(argv: Sequence[str] | None = None) -> int:
    """Command line of this module."""
    parser = argparse.ArgumentParser(
        prog="python -m eldr.workload.training.tokenizer",
        description="Train the tokenizer and encode the corpus with it.",
    )
    parser.add_argument("corpus", type=Path, help="folder that training.corpus wrote")
    parser.add_argument("tokenizer", type=Path, help="folder to write the tokenizer to")
    parser.add_argument("--vocabulary", type=int, default=4096, help="number of tokens")
    parser.add_argument("--context", type=int, default=1024, help="longest input of the model")
    parser.add_argument("--blocks", type=int, default=50, help="blocks per domain to learn from")
    args = parser.parse_args(argv)
    try:
        texts = _training_texts(args.corpus, args.blocks)
        tokenizer = train_tokenizer(texts, args.vocabulary, args.context)
        tokenizer.save_pretrained(args.tokenizer)
        sizes = encode_corpus(args.corpus, tokenizer)
    except (OSError, ValueError) as error:
        print(f"tokenizer: {error}", file=sys.stderr)
        return 2
    for domain, (train, test) in sizes.items():
        print(f"{domain}: {train} + {test} tokens")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
