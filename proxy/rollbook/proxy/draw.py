"""Drawing tokens: from a batch of logits and each request's settings to ids and the logprobs of what was drawn.

The order is vLLM's: what the form forbids, penalties, forbidden stop tokens, temperature, min_p, top_k, top_p. A
uniform number of the request's own decides the token by inverting the cumulative distribution, so what a seed gives
does not depend on who else is in the batch, float noise in the logits aside. Temperature 0 takes the likeliest token;
its logprob is then that of temperature 1, after form and penalties. Everything is float32.

A row is one request's: whatever it asks for, the others of the batch are drawn.

Shapes: B requests, V tokens of the vocabulary.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from .engine import LogprobsMode, Sampling


@dataclass(kw_only=True)
class Dice:
    """What one request brings to a draw. prompt_ids and output_ids are read only where a penalty needs them.

    allowed: bool [V], the tokens that the answer's form leaves now; None: any.
    leaves_none: set where form, penalties and forbidden stop tokens together left nothing to draw from.
    """

    sampling: Sampling
    random: random.Random
    prompt_ids: Sequence[int] | np.ndarray = ()
    output_ids: list[int] = field(default_factory=list)
    allowed: np.ndarray | None = None
    leaves_none: bool = False


def draw(
    logits_BV: torch.Tensor, dice: Sequence[Dice], mode: LogprobsMode = "processed"
) -> tuple[list[int], list[float]]:
    """One token for each row, and its logprob. A row that is not finite gives NaN, which the caller must look for.

    logits_BV may be of any float type and is not changed unless it is float32.
    """
    device = logits_BV.device
    logits_BV = logits_BV.float()
    raw_BV = logits_BV.clone() if mode == "raw" else None
    best: dict[int, torch.Tensor] = {}  # logit of a row, before its form and penalties
    for row, one in enumerate(dice):
        if one.allowed is None and not _has_penalties(one):
            continue
        best[row] = logits_BV[row].max()
        if one.allowed is not None:
            logits_BV[row].masked_fill_(torch.from_numpy(~one.allowed).to(device), -torch.inf)
        _penalise(logits_BV[row], one)
    temperatures = [one.sampling.temperature or 1.0 for one in dice]
    if any(t != 1.0 for t in temperatures):
        # Counted from the likeliest, which stays 0 at any temperature; the others may come to -inf.
        t_B1 = torch.tensor(temperatures, device=device)[:, None]
        logits_BV.sub_(torch.where(t_B1 != 1.0, logits_BV.amax(-1, keepdim=True), 0.0)).div_(t_B1.clamp_(min=1e-30))
    cut = [i for i, one in enumerate(dice) if _is_cut(one.sampling, logits_BV.shape[1])]
    if cut:
        logits_BV[cut] = _cut(logits_BV[cut], [dice[i].sampling for i in cut])
    probabilities_BV = torch.softmax(logits_BV, -1)
    cumulative_BV = probabilities_BV.cumsum(-1)
    total_B1 = cumulative_BV[:, -1:]
    uniform_B1 = torch.tensor([one.random.random() for one in dice], dtype=torch.float32, device=device)[:, None]
    # Strictly below the total, or rounding could choose a token of probability zero behind the last possible one.
    chosen_B1 = torch.minimum(uniform_B1 * total_B1, torch.nextafter(total_B1, torch.zeros_like(total_B1)))
    ids_B1 = torch.searchsorted(cumulative_BV, chosen_B1, right=True).clamp_(max=logits_BV.shape[1] - 1)
    greedy = [i for i, one in enumerate(dice) if one.sampling.temperature == 0]
    if greedy:
        ids_B1[greedy] = logits_BV[greedy].argmax(-1, keepdim=True)
    if raw_BV is None:
        logprobs_B1 = probabilities_BV.gather(1, ids_B1).log()
    else:
        logprobs_B1 = torch.log_softmax(raw_BV, -1).gather(1, ids_B1)
    if best:
        totals = total_B1[:, 0].tolist()
        for row, before in best.items():
            if not math.isfinite(totals[row]):
                dice[row].leaves_none = bool(before.isfinite())
    return ids_B1[:, 0].tolist(), logprobs_B1[:, 0].tolist()


def _has_penalties(one: Dice) -> bool:
    """Whether `_penalise` changes anything now."""
    sampling, n = one.sampling, len(one.output_ids)
    return (
        sampling.repetition_penalty != 1.0
        or (n > 0 and bool(sampling.frequency_penalty or sampling.presence_penalty))
        or (n < sampling.min_tokens and bool(sampling.stop_token_ids))
    )


def _penalise(logits_V: torch.Tensor, one: Dice) -> None:
    sampling = one.sampling
    if sampling.repetition_penalty != 1.0:
        seen = torch.from_numpy(np.unique(np.concatenate([one.prompt_ids, one.output_ids]).astype(np.int64)))
        seen = seen.to(logits_V.device)
        values = logits_V[seen]
        penalty = sampling.repetition_penalty
        logits_V[seen] = torch.where(values > 0, values / penalty, values * penalty)
    if (sampling.frequency_penalty or sampling.presence_penalty) and one.output_ids:
        ids, counts = np.unique(np.asarray(one.output_ids, np.int64), return_counts=True)
        penalties = counts * sampling.frequency_penalty + sampling.presence_penalty
        logits_V[torch.from_numpy(ids).to(logits_V.device)] -= torch.from_numpy(penalties).to(logits_V)
    if len(one.output_ids) < sampling.min_tokens and sampling.stop_token_ids:
        logits_V[torch.tensor(sampling.stop_token_ids, device=logits_V.device)] = -torch.inf


def _is_cut(sampling: Sampling, vocab_size: int) -> bool:
    return sampling.temperature > 0 and (0 < sampling.top_k < vocab_size or sampling.top_p < 1 or sampling.min_p > 0)


def _cut(logits_BV: torch.Tensor, samplings: list[Sampling]) -> torch.Tensor:
    """-inf where min_p, top_k or top_p leave a token out. top_p keeps the token that reaches it."""
    device, n = logits_BV.device, logits_BV.shape[1]
    min_p_B1 = torch.tensor([s.min_p for s in samplings], device=device)[:, None]
    top_k_B1 = torch.tensor([s.top_k if s.top_k > 0 else n for s in samplings], device=device)[:, None]
    top_p_B1 = torch.tensor([s.top_p for s in samplings], device=device)[:, None]
    sorted_BV, order_BV = logits_BV.sort(dim=-1, descending=True, stable=True)
    likeliest_B1 = sorted_BV[:, :1]
    sorted_BV = sorted_BV.masked_fill(sorted_BV < likeliest_B1 + min_p_B1.log(), -torch.inf)
    sorted_BV = sorted_BV.masked_fill(torch.arange(n, device=device) >= top_k_B1, -torch.inf)
    probabilities_BV = torch.softmax(sorted_BV, -1)
    before_BV = probabilities_BV.cumsum(-1) - probabilities_BV
    before_BV[:, 0] = -1.0  # the likeliest stays, however small top_p is
    sorted_BV = sorted_BV.masked_fill((before_BV >= top_p_B1) & (top_p_B1 < 1), -torch.inf)
    return torch.empty_like(logits_BV).scatter_(1, order_BV, sorted_BV)
