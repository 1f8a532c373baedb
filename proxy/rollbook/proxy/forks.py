"""A fork: an episode that repeats another one up to an interaction, from the record, and goes on with the live policy.

What the other episode had answered before its origin is answered from the book, as `replay.py` does, so the agent's own
code comes to the very state in which the origin was asked. From the origin on the engine answers. What was repeated is
recorded with `origin_id` and is not trained again; its tokens are the prompt of what follows.
"""

from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable

from rollbook.store.book import Book
from rollbook.store.events import Int32s

from .engine import Engine, Generation, Sampled
from .errors import BadRequest, NotFound
from .replay import Recorded, ReplayEngine, recorded


class Origin:
    """What a book says of an interaction that is forked. Shared by the forks of one origin, and never changed.

    Raises NotFound.
    """

    def __init__(self, book: Book, interaction_id: str) -> None:
        try:
            forked = book.interaction(interaction_id)
        except KeyError:
            raise NotFound(
                f"the book has no interaction {interaction_id!r} to fork", param="origin_interaction_id"
            ) from None
        episode = book.episode(forked.row["episode_id"])
        whole = [one for one in episode.interactions if one.row["delivered"] is None]
        at = next((i for i, one in enumerate(whole) if one.interaction_id == interaction_id), len(whole))
        self.interaction_id = interaction_id
        self.prompt = forked.prompt_ids.tobytes()
        self.before = [recorded(one) for one in whole[:at]]
        self.later = {one.prompt_ids.tobytes() for one in whole[at + 1 :]}  # asked beside it: other branches


class Fork:
    """Where one forked episode is. repeated: ids of what it has repeated already, after a restart."""

    def __init__(self, origin: Origin, decode: Callable[[Int32s], str], repeated: Iterable[str] = ()) -> None:
        gone = Counter(repeated)
        self._origin = origin
        self._record = ReplayEngine([one for one in origin.before if not gone[one.interaction_id]], decode=decode)
        self.is_live = False
        """Whether the origin has been asked again: from then on everything new is the engine's."""

    def answer(self, generation: Generation, engine: Engine) -> tuple[AsyncIterator[Sampled], Recorded | None]:
        """Who answers: the engine, or the record, then with what it is. Raises BadRequest for a divergence."""
        prompt = generation.prompt_ids.tobytes()
        one = self._record.take(generation.prompt_ids)
        if one is not None:
            return self._record.play(one), one
        if not self.is_live and prompt != self._origin.prompt and prompt not in self._origin.later:
            raise BadRequest(
                f"the fork never came to {self._origin.interaction_id}: {self._record.diverge(generation.prompt_ids)}"
            )
        self.is_live = self.is_live or prompt == self._origin.prompt
        return engine.generate(generation), None
