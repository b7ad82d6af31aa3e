"""The sampler once more, in NumPy and float64, a row at a time and by sorting: the compiled one is held against it."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from mcjax.types import Sampling


@dataclass
class Asked:
    """One row: what is asked, and what there has been."""

    sampling: Sampling
    prompt: list[int] = field(default_factory=list)
    output: list[int] = field(default_factory=list)


def penalised(logits: np.ndarray, asked: Asked) -> np.ndarray:
    """`[V]` float64: penalties, and stop tokens held back."""
    sampling, scores = asked.sampling, logits.astype(np.float64)
    for token in {*asked.prompt, *asked.output}:
        if scores[token] > 0:
            scores[token] /= sampling.repetition_penalty
        else:
            scores[token] *= sampling.repetition_penalty
    for token in asked.output:
        scores[token] -= sampling.frequency_penalty
    for token in {*asked.output}:
        scores[token] -= sampling.presence_penalty
    if len(asked.output) < sampling.min_tokens:
        scores[list(sampling.stop_tokens)] = -np.inf
    return scores


def softmax(scores: np.ndarray) -> np.ndarray:
    weights = np.exp(scores - scores.max())
    return weights / weights.sum()


def passing(logits: np.ndarray, asked: Asked, slack: float = 0.0) -> np.ndarray:
    """`[V]` bool: what the filters leave. `slack` widens them (narrows them, below 0), for what rounding may decide."""
    sampling = asked.sampling
    scores = penalised(logits, asked) / (sampling.temperature or 1)
    left = np.isfinite(scores)
    if sampling.top_k:
        kept = np.sort(scores)[::-1][: sampling.top_k]
        left &= scores >= kept[-1] - slack
    if sampling.top_p < 1 and left.any():
        masked = np.where(left, scores, -np.inf)
        order = np.argsort(-masked, kind="stable")
        before = np.cumsum(softmax(masked)[order]) - softmax(masked)[order]
        count = max(1, int((before < sampling.top_p + slack).sum()))
        left &= scores >= masked[order[count - 1]] - slack
    if sampling.min_p > 0:
        left &= scores >= scores.max() + np.log(sampling.min_p) - slack
    return left


def distribution(logits: np.ndarray, asked: Asked) -> np.ndarray:
    """`[V]`: how likely each token is to be drawn."""
    scores = penalised(logits, asked)
    if asked.sampling.temperature == 0:
        return np.eye(len(scores))[int(scores.argmax())]
    return softmax(np.where(passing(logits, asked), scores / asked.sampling.temperature, -np.inf))


def logprobs(logits: np.ndarray) -> np.ndarray:
    """`[V]`: of the model's own distribution."""
    return np.log(softmax(logits.astype(np.float64)))
