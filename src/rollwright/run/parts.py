"""From configuration to parts that both sides of a run need.

Role: builds task set, tokenizer, template, model and store the same way in every process. Neighbours:
`rollout_side`, `trainer_side`, `coupled`. Invariant: two processes with one configuration and one folder
build equal parts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rollwright.agents.base import Codec, ScriptTemplate
from rollwright.agents.template import PieceTemplate
from rollwright.archive.base import Archive
from rollwright.archive.sqlite import SqliteArchive
from rollwright.blobs.folder import FolderBlobs
from rollwright.buffer.base import Store
from rollwright.clock import Clock
from rollwright.config import RunConfig
from rollwright.errors import ConfigError
from rollwright.model.decoder import Decoder
from rollwright.model.tokenizer import PieceTokenizer
from rollwright.run.folder import RunFolder
from rollwright.run.preflight import taskset
from rollwright.tasks.base import TaskSet
from rollwright.weights.base import WeightChannel


@dataclass(frozen=True)
class Parts:
    """What rollouts and training share."""

    config: RunConfig
    folder: RunFolder
    tasks: TaskSet
    codec: Codec
    template: ScriptTemplate
    store: Store
    archive: Archive
    clock: Clock

    def close(self) -> None:
        """Release store and archive; idempotent."""
        self.archive.close()
        self.store.close()

    def decoder(self) -> Decoder:
        """The policy with fresh weights: the same ones for the same seed."""
        decoder = Decoder(self.config.model, self.codec.size)
        decoder.initialise(torch.Generator().manual_seed(self.config.seed))
        return decoder

    def blobs(self, what: str) -> FolderBlobs:
        """One content-addressed folder for each kind of payload, so that each can be collected on its own."""
        return FolderBlobs(self.folder.blobs / what)

    def file_channel(self) -> WeightChannel:
        """Weights by file, for two processes."""
        from rollwright.weights.file import FileChannel

        return FileChannel(self.blobs("weights"), self.folder.weights)


def build(folder: RunFolder, clock: Clock) -> Parts:
    """The parts of the run in `folder`."""
    config = folder.load()
    codec = _tokenizer(folder)
    store = config.queue.build(folder.store, clock, run=folder.id)
    archive = SqliteArchive(folder.rollouts)
    return Parts(
        config=config,
        folder=folder,
        tasks=taskset(config),
        codec=codec,
        template=PieceTemplate(codec),
        store=store,
        archive=archive,
        clock=clock,
    )


def _tokenizer(folder: RunFolder) -> PieceTokenizer:
    try:
        return PieceTokenizer.from_json(folder.tokenizer.read_text())
    except OSError as error:
        raise ConfigError(
            f"{folder.tokenizer}: cannot be read ({error.strerror}): the run folder is not whole"
        ) from error
