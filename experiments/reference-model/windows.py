"""Training and validation windows of the encoded corpus."""

from pathlib import Path

import numpy as np
import torch

# Of the training windows.
SHARES = {"prose": 0.17, "python": 0.18, "c": 0.10, "json": 0.15, "math": 0.15, "agent": 0.25}
WINDOW = 256  # tokens


class Windows:
    """Windows of every domain. A batch depends on seed, rank and step alone: a resumed run draws what it would have."""

    def __init__(self, corpus: Path, seed: int, rank: int):
        self.domains = [domain for domain in SHARES if (corpus / f"{domain}.train.npy").is_file()]
        if not self.domains:
            raise FileNotFoundError(f"{corpus}: no DOMAIN.train.npy; run tokenizer.py first")
        shares = np.array([SHARES[domain] for domain in self.domains])
        self.shares = shares / shares.sum()
        self.train = {domain: self._ids(corpus / f"{domain}.train.npy") for domain in self.domains}
        self.val = {domain: self._ids(corpus / f"{domain}.val.npy") for domain in self.domains}
        self.seed, self.rank = seed, rank

    def batch(self, step: int, size: int) -> torch.Tensor:
        """Random training windows (size, WINDOW) int64."""
        generator = np.random.default_rng([self.seed, self.rank, step])
        drawn = generator.choice(len(self.domains), size=size, p=self.shares)
        return torch.stack([self._window(self.train[self.domains[i]], generator.random()) for i in drawn])

    def validation(self, domain: str, count: int) -> torch.Tensor:
        """Evenly spaced validation windows (count, WINDOW) int64."""
        return torch.stack([self._window(self.val[domain], i / count) for i in range(count)])

    @staticmethod
    def _window(ids: torch.Tensor, place: float) -> torch.Tensor:
        start = int(place * (len(ids) - WINDOW))
        return ids[start : start + WINDOW]

    @staticmethod
    def _ids(path: Path) -> torch.Tensor:
        ids = torch.from_numpy(np.load(path).astype(np.int64))
        if len(ids) <= WINDOW:
            raise ValueError(f"{path}: {len(ids)} tokens; a window needs more than {WINDOW}")
        return ids
