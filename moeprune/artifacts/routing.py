"""The routers' rules in numpy: which experts a token goes to, and how strongly, when only some of them are there."""

import numpy as np

from moeprune.artifacts.statistics import Layer


def affinities(layer: Layer, logits: np.ndarray) -> np.ndarray:
    """What gates are made of (tokens, experts), float64: e^(logit - the token's largest), or sigmoid(logit)."""
    logits = np.asarray(logits, dtype=np.float64)
    if layer.scoring == "softmax":
        return np.exp(logits - logits.max(axis=1, keepdims=True))
    assert layer.scoring == "sigmoid", layer.scoring
    return np.exp(-np.logaddexp(0.0, -logits))


def choices(layer: Layer, logits: np.ndarray, bias: np.ndarray) -> np.ndarray:
    """What experts are chosen by (tokens, experts), float64: the largest win."""
    if layer.scoring == "softmax" and layer.num_groups == 1:
        return np.asarray(logits, dtype=np.float64)  # in the order of the probabilities, and never rounded to equal 0
    return affinities(layer, logits) + bias


def in_the_best_groups(layer: Layer, choice: np.ndarray) -> np.ndarray:
    """`choice` (tokens, experts), -inf outside the groups that the token may draw from.

    A group's score is the sum of its `group_minimum` largest choices. A group without experts is never drawn from.
    """
    tokens, experts = choice.shape
    grouped = choice.reshape(tokens, layer.num_groups, -1)
    largest = -np.partition(-grouped, layer.group_minimum - 1, axis=2)[:, :, : layer.group_minimum]
    score = np.where(np.isfinite(largest), largest, 0.0).sum(axis=2)
    score[~np.isfinite(grouped).any(axis=2)] = -np.inf
    best = np.argsort(-score, axis=1, kind="stable")[:, : layer.topk_group]
    drawn = np.zeros(score.shape, dtype=bool)
    np.put_along_axis(drawn, best, True, axis=1)
    return np.where(drawn[:, :, None], grouped, -np.inf).reshape(tokens, experts)


def routed(layer: Layer, affinity: np.ndarray, choice: np.ndarray, kept: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Expert ids (tokens, top_k) and gates (tokens, top_k), float64, of a router that has the kept experts only.

    affinity, choice (tokens, experts): of all experts. kept (experts,) or (tokens, experts) bool. Where fewer than
    top_k experts can be chosen, the gates of the rest are 0. Equal choices go to the lowest id.
    """
    open_to = np.where(kept, choice, -np.inf)
    if layer.num_groups > 1:
        open_to = in_the_best_groups(layer, open_to)
    ids = np.argsort(-open_to, axis=1, kind="stable")[:, : layer.top_k]
    is_open = np.isfinite(np.take_along_axis(open_to, ids, axis=1))
    weights = np.where(is_open, np.take_along_axis(affinity, ids, axis=1), 0.0)
    return ids, weights * gate_factor(layer, weights.sum(axis=1), (affinity * kept).sum(axis=1))[:, None]


def gate_factor(layer: Layer, chosen: np.ndarray, kept: np.ndarray) -> np.ndarray:
    """What affinities are multiplied with to make gates, from their sums over chosen and over kept experts.

    Any shape. 0 where nothing is chosen.
    """
    if layer.scoring == "sigmoid":
        whole = chosen + 1e-20 if layer.renormalise else np.ones_like(chosen)
    else:
        whole = chosen if layer.renormalise else kept
    return np.divide(layer.scaling, whole, out=np.zeros_like(whole), where=(whole > 0) & (chosen > 0))
