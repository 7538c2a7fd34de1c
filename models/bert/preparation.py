"""Shards out of a tokenised corpus, made by several processes, and what a folder of them says of its making.

Copy e of the corpus holds the samples that training on the text draws in epoch e, in that epoch's order, so that
reading the shards as they are stored is the same training. Shards are finished one by one, each is a function of the
settings alone, and the manifest says what they were made of: a restart goes on with those that are missing, and is
refused where something has changed.
"""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ds_vpipe.errors import VPipeConfigError, show
from ds_vpipe.models.bert.sample import Ints, Sample, shuffled
from ds_vpipe.models.bert.samples import PairSamples, Spans, spans_of
from ds_vpipe.models.bert.shards import SUFFIXES, write_shard
from ds_vpipe.models.bert.wordpiece import TokenCorpus

MANIFEST = "preparation.json"


@dataclass(frozen=True)
class Settings:
    """What the content of shards depends on, beside the corpus.

    Attributes:
        seq_length: S, tokens per sequence.
        max_predictions: P, predicted tokens per sequence at most.
        dupe_factor: copies of the corpus, each with other masks and pairs.
        seed: of pairs, masks and order.
        shard_size: rows per shard.
    """

    seq_length: int
    max_predictions: int
    dupe_factor: int
    seed: int
    shard_size: int


@dataclass(frozen=True)
class SampleSet:
    """Some documents' samples, ready to be written by any process; everything large lies in files.

    Attributes:
        corpus: folder of the `TokenCorpus`.
        plan: folder of this set's spans and orders.
        output: where the shards go.
        kind: "training" or "validation", part of the file names.
        settings: of the samples.
        count: samples of one copy.
        copies: of the corpus, in this set.
    """

    corpus: Path
    plan: Path
    output: Path
    kind: str
    settings: Settings
    count: int
    copies: int

    @property
    def num_shards(self) -> int:
        """Number of shards."""
        return -(-self.count * self.copies // self.settings.shard_size)

    def path_of(self, shard: int) -> Path:
        """The file of a shard; names sort like numbers."""
        return self.output / f"part_{shard:06d}_{self.kind}.hdf5"

    def missing(self) -> list[int]:
        """Numbers of the shards that are not there yet."""
        return [shard for shard in range(self.num_shards) if not self.path_of(shard).exists()]

    def write(self, shard: int) -> None:
        """Make a shard."""
        settings = self.settings
        begin = shard * settings.shard_size
        end = min(begin + settings.shard_size, self.count * self.copies)
        spans = Spans(*(np.load(self.plan / f"{name}.npy", mmap_mode="r") for name in ("sentences", "documents")))
        corpus = TokenCorpus.load(self.corpus)
        samples = PairSamples(corpus, spans, settings.seq_length, settings.max_predictions, settings.seed)
        drawn: list[Sample] = []
        for copy in range(begin // self.count, -(-end // self.count)):
            order = np.load(self.plan / f"order_{copy}.npy", mmap_mode="r")
            first = copy * self.count
            indices = order[max(begin - first, 0) : min(end - first, self.count)]
            drawn.extend(samples.sample(int(index), copy) for index in indices)
        write_shard(self.path_of(shard), drawn)


def plan_samples(
    corpus: Path,
    documents: Ints,
    plan: Path,
    output: Path,
    kind: str,
    settings: Settings,
) -> SampleSet | None:
    """Cut documents into samples and draw the order of every copy; None if they are too few for pairs.

    Training has a drawn order and ``dupe_factor`` copies, validation the order of the text and one copy.
    """
    loaded = TokenCorpus.load(corpus)
    spans = spans_of(loaded, documents, settings.seq_length)
    try:
        samples = PairSamples(loaded, spans, settings.seq_length, settings.max_predictions, settings.seed)
    except ValueError:
        return None
    plan.mkdir(parents=True, exist_ok=True)
    np.save(plan / "sentences.npy", spans.sentences)
    np.save(plan / "documents.npy", spans.documents)
    copies = settings.dupe_factor if kind == "training" else 1
    for copy in range(copies):
        count = len(samples)
        order = shuffled(count, settings.seed, copy) if kind == "training" else np.arange(count)
        np.save(plan / f"order_{copy}.npy", order)
    return SampleSet(corpus, plan, output, kind, settings, len(samples), copies)


def begin_output(output: Path, made_of: dict[str, Any]) -> dict[str, Any] | None:
    """Begin or go on with a folder of shards; returns its manifest's result if the folder is complete.

    Args:
        output: the folder; created if missing.
        made_of: JSON values: everything that the content of the shards depends on.

    Raises:
        VPipeConfigError: the folder is not writable, or holds shards that were made of something else.
    """
    there = read_manifest(output)
    if there is None:
        try:
            output.mkdir(parents=True, exist_ok=True)
            if any(path.suffix in SUFFIXES for path in output.iterdir()):
                raise VPipeConfigError(
                    f"--output_dir {output}: holds HDF5 files that are not of this command; choose another folder"
                )
            write_manifest(output, made_of, None)
        except OSError as error:
            raise VPipeConfigError(f"--output_dir {output}: not writable: {error}") from error
        return None
    before = there["made_of"]
    for key in sorted({*before, *made_of}):
        if before.get(key) != made_of.get(key):
            raise VPipeConfigError(
                f"--output_dir {output}: its shards were made with {key} {show(before.get(key))}, now it is"
                f" {show(made_of.get(key))}; choose another folder, or remove this one"
            )
    return there["result"]


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """The manifest of a folder of shards, None if there is none.

    Raises:
        VPipeConfigError: it cannot be read.
    """
    path = folder / MANIFEST
    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        result = content["result"]
        if result is not None and not isinstance(result["unigram_entropy"], float):
            raise ValueError(f"unigram_entropy {show(result['unigram_entropy'])} is no number")
        return {"made_of": dict(content["made_of"]), "result": result}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise VPipeConfigError(f"{path}: not readable: {error}; remove it to do without, or prepare anew") from error


def write_manifest(folder: Path, made_of: dict[str, Any], result: dict[str, Any] | None) -> None:
    """Replace the manifest; ``result`` is None until all shards are there."""
    unfinished = folder / f".{MANIFEST}.{os.getpid()}"
    unfinished.write_text(json.dumps({"made_of": made_of, "result": result}, indent=2) + "\n", encoding="utf-8")
    os.replace(unfinished, folder / MANIFEST)
