"""How many more groups may begin: concurrency on one side, staleness on the other.

All counts are groups. `accepted` are finished groups that the learner took or will take, over the whole run;
a rejected group is in neither count, so rejecting frees its place.
"""


def capacity(
    *,
    concurrency: int,
    consumer_batch_size: int,
    max_head_offpolicyness: int,
    version: int,
    accepted: int,
    running: int,
) -> int:
    """min(max(1, C) - running, (eta + version + 1) * max(1, B) - (accepted + running)); below 1: wait.

    eta = 0 is synchronous: one batch per version.
    """
    free = max(1, concurrency) - running
    fresh = (max_head_offpolicyness + version + 1) * max(1, consumer_batch_size) - (accepted + running)
    return min(free, fresh)
