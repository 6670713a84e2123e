"""Tables that list the experts of every token id (DeepSeek-V4's hash layers), after pruning.

Such a layer does not choose by score, so no expert is the next best one. A removed expert of a token is replaced by a
kept one that the token does not have yet, found by walking the kept experts in turn from a place that depends on the
token id and the removed expert: what a removed expert did is spread evenly over the others.
"""

from collections.abc import Sequence

import torch


def remapped(table: torch.Tensor, kept: Sequence[int], num_experts: int) -> torch.Tensor:
    """The table (tokens, k) with the new numbers of the kept experts, ascending in `kept`, in the same type.

    With all experts kept in another order the table only follows them.
    """
    count = len(kept)
    assert table.shape[1] <= count, "a token needs more experts than there are"
    numbers = torch.full((num_experts,), -1, dtype=torch.int64, device=table.device)
    numbers[torch.tensor(kept, device=table.device)] = torch.arange(count, device=table.device)
    old = table.to(torch.int64)
    new = numbers[old]
    tokens = torch.arange(len(table), device=table.device)
    for slot in range(table.shape[1]):
        lost = new[:, slot] < 0
        candidate = (tokens + old[:, slot]) % count
        while bool((taken := lost & (new == candidate.unsqueeze(1)).any(1)).any()):
            candidate = torch.where(taken, (candidate + 1) % count, candidate)
        new[:, slot] = torch.where(lost, candidate, new[:, slot])
    return new.to(table.dtype)
