"""Checkpoints: what a killed run needs to go on, in a folder that appears whole.

    checkpoints/step-00012/     after 12 steps were trained
        meta.json               step, run, seed, metrics of the last step
        state.pt                actor: master weights, optimiser, step count, RNG; of several ranks instead:
        shards/                 a file or more of each rank, and checksums.json
        critic/                 the same, where there is one

The batches are not in it: they are events of the book.
"""

from pathlib import Path

import msgspec

from .backend import Backend
from .errors import BadCheckpoint
from .folders import appears_whole, keep_newest, number_of


class Meta(msgspec.Struct, kw_only=True):
    """What a checkpoint says about itself."""

    run_id: str
    step: int  # steps trained
    metrics: dict[str, float | None] = {}  # of the last of them; None: no finite number


def write_checkpoint(parent: Path, meta: Meta, *, actor: Backend, critic: Backend | None, keep: int) -> Path:
    """Durable when this returns; older checkpoints beyond `keep` go."""
    folder = parent / f"step-{meta.step:08d}"
    with appears_whole(folder) as building:
        actor.save(building)
        if critic is not None:
            (building / "critic").mkdir()
            critic.save(building / "critic")
        (building / "meta.json").write_bytes(msgspec.json.encode(meta))
    keep_newest(parent, "step-[0-9]*", keep=keep)
    return folder


def newest_checkpoint(parent: Path) -> Path | None:
    """The folder of the last finished checkpoint."""
    found = [p for p in parent.glob("step-[0-9]*") if p.is_dir() and number_of(p) is not None]
    return max(found, key=lambda p: number_of(p) or 0, default=None)


def read_checkpoint(folder: Path, *, run_id: str, actor: Backend, critic: Backend | None) -> Meta:
    """Load it. Raises BadCheckpoint for one of another run or model."""
    try:
        meta = msgspec.json.decode((folder / "meta.json").read_bytes(), type=Meta)
    except (OSError, msgspec.DecodeError) as error:
        raise BadCheckpoint(f"{folder / 'meta.json'} cannot be read ({error}); {_way_out(folder)}") from error
    if meta.run_id != run_id:
        raise BadCheckpoint(
            f"{folder} is of run {meta.run_id!r}, this run is {run_id!r}; give the run its own fileroot"
        )
    if critic is not None and not (folder / "critic").is_dir():
        raise BadCheckpoint(
            f"{folder} has no critic, so another algorithm wrote it; go on with that, or {_way_out(folder)}"
        )
    try:
        actor.load(folder)
        if critic is not None:
            critic.load(folder / "critic")
    except BadCheckpoint as error:
        raise BadCheckpoint(f"{error}; {_way_out(folder)}") from error
    return meta


def _way_out(folder: Path) -> str:
    return f"remove {folder} to go on from an older one, or from the beginning"
