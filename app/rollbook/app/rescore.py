"""`rollbook rescore`: what other weights think of stored answers, written back as facts beside those that sampled them.

Each answer is scored under the distribution that it was sampled from (temperature, top_p, top_k), or the model's own
where its engine reported that. The same name with the same weights scores only what has not been scored yet, so a
command that was stopped goes on. Read back by `book.scores(name)`, by SQL in the view `scores`, and by a learner with
`ref_scores: NAME`.
"""

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import duckdb
import numpy as np

from rollbook.learner.backend.single import SingleBackend
from rollbook.learner.batches import load_rows
from rollbook.learner.config import MicroBatchSpec, ModelConfig
from rollbook.learner.errors import BadSetting
from rollbook.learner.learn import check_vocabulary, tries_of
from rollbook.store import Book, Event, QueryRefused, TokensScored, open_book
from rollbook.store.directory import read_manifest
from rollbook.store.expressions import in_parentheses

_CHUNK = 512
"""Answers that are scored and written down at a time; what a kill costs at most."""


@dataclass(frozen=True)
class Rescored:
    """What was done. weights: sha256 of the checkpoint's files. mean_gap: per token, to the recorded logprobs,
    where those are numbers."""

    name: str
    weights_sha256: str
    n_scored: int
    n_tokens: int
    n_skipped: int
    mean_gap: float


def weights_sha256(folder: Path) -> str:
    """One hash over config.json and the files of weights of a model folder, their names included."""
    total = hashlib.sha256()
    for file in sorted([folder / "config.json", *folder.glob("*.safetensors"), *folder.glob("*.bin")]):
        with file.open("rb") as data:
            total.update(f"{file.name}\0{hashlib.file_digest(data, 'sha256').hexdigest()}\n".encode())
    return total.hexdigest()


def rescore(
    book_path: str | os.PathLike[str],
    model: str | os.PathLike[str],
    *,
    name: str | None = None,
    where: str | None = None,
    dtype: Literal["bfloat16", "float16", "float32", "float64"] = "bfloat16",
    device: str = "auto",
    max_tokens: int = 32768,
    progress: Callable[[int, int], None] | None = None,
) -> Rescored:
    """Score the answers of the ended episodes for which the SQL condition `where` is true.

    model: a model folder. name: of the scores, by default that of the folder. max_tokens: computed at once.
    progress: called with (done, of). Raises QueryRefused, and BadSetting for a model that cannot be loaded, does not
    have the tokens, or gives logprobs that are no finite numbers.
    """
    read_manifest(Path(book_path))  # a wrong path must not become a book
    folder = Path(model).resolve()
    if not (folder / "config.json").is_file():
        raise BadSetting(f"{folder} has no config.json; give the folder of a transformers model")
    name = name or folder.name
    weights = weights_sha256(folder)
    spec = MicroBatchSpec(max_tokens_per_mb=max_tokens)
    with open_book(book_path, writer=f"scores-{os.getpid()}") as book:
        wanted, n_skipped = _wanted(book, where, name, weights)
        version_of = _versions(book, folder)
        n_tokens, n_done, n_compared, off = 0, 0, 0, 0.0
        backend: SingleBackend | None = None
        for at in range(0, len(wanted), _CHUNK):
            chunk = {row["interaction_id"]: row for row in wanted[at : at + _CHUNK]}
            if backend is None:
                backend = SingleBackend(ModelConfig(path=str(folder), dtype=dtype, device=device, mb_spec=spec))
            rows = load_rows(book, interaction_ids=list(chunk))
            check_vocabulary(rows, backend)
            logprobs, entropies = backend.score(tries_of(rows, spec, backend))
            if n_odd := int((~np.isfinite(logprobs)).sum()):
                raise BadSetting(
                    f"the model {folder} gives {n_odd} of {len(logprobs)} tokens a logprob that is no finite number; "
                    "look at its weights, or compute in another dtype. None of these answers was scored"
                )
            out = rows.output_starts
            book.log.append_blocking(
                *(
                    Event(
                        run_id=chunk[interaction_id]["run_id"],
                        episode_id=rows.episode_ids[r],
                        interaction_id=interaction_id,
                        fact=TokensScored(
                            version=version_of.get(chunk[interaction_id]["run_id"]),
                            scorer=name,
                            weights_sha256=weights,
                        ),
                        logprobs=logprobs[out[r] : out[r + 1]].astype("float32"),
                        entropies=entropies[out[r] : out[r + 1]].astype("float32"),
                    )
                    for r, interaction_id in enumerate(rows.interaction_ids)
                )
            )
            is_known = np.isfinite(rows.logprobs)
            off, n_compared = off + float((logprobs - rows.logprobs)[is_known].sum()), n_compared + int(is_known.sum())
            n_tokens, n_done = n_tokens + len(logprobs), n_done + len(chunk)
            if progress is not None:
                progress(n_done, len(wanted))
    return Rescored(name, weights, len(wanted), n_tokens, n_skipped, off / max(n_compared, 1))


def _wanted(book: Book, where: str | None, name: str, weights: str) -> tuple[list[dict[str, Any]], int]:
    """What is to be scored, neighbours together, and how many answers were scored by these weights before."""
    condition = f"and {in_parentheses(where)}" if where else ""
    try:
        chosen = book.sql(f"select episode_id from episodes where state <> 'open' {condition}")
    except duckdb.Error as error:
        raise QueryRefused(f"{str(error).strip()} (docs/sql.md lists the columns of `episodes`)") from error
    rows = book.sql(
        """
        select i.interaction_id, i.run_id, s.interaction_id is not null as is_known
        from interactions i join episodes e using (episode_id) left join (
            select distinct interaction_id from scores where scorer = $name and weights_sha256 = $weights
        ) s using (interaction_id)
        where i.n_output > 0 and i.n_prompt > 0 and i.origin_id is null and not i.is_broken and not i.is_pruned
          and i.episode_id in (select episode_id from _chosen)
        order by e.run_id, e.group_id, i.episode_id, i.recorded_at, i.event_id
        """,
        {"name": name, "weights": weights},
        _chosen=chosen,
    ).to_pylist()
    wanted = [row for row in rows if not row["is_known"]]
    return wanted, len(rows) - len(wanted)


def _versions(book: Book, folder: Path) -> dict[str, int]:
    """By run: the version that the folder's weights are, where they are one of its policies."""
    found = book.sql("select run_id, max(version) as version from policies where path = ? group by 1", [str(folder)])
    return {row["run_id"]: row["version"] for row in found.to_pylist()}
