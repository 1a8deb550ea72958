"""AdapMoE's gate for the first layer (section 4.3, equation 9). No layer precedes the first, so a separate
matrix predicts its experts from the last layer's x of the previous token.

    minimise over G the mean of KL(softmax(G_0(x_0[t + 1])) || softmax(G x_last[t]))

x is the input of a layer's router, G_0 the first layer's router. This is a linear model with soft labels: the
loss is convex, and training starts from zeros, where all experts are equally likely.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from pipeline.arrays import FloatArray
from pipeline.policies.view import Routing

HELD_OUT = 0.2  # share of the rows: the last ones, because neighbours in a text are correlated
BATCH = 256  # rows of a step
RATE = 0.05  # of Adam, divided by sqrt(H) and the RMS of x: about the change of a logit in a step
MOMENTS = 0.9, 0.999  # Adam's decay of the means of gradients and of their squares
EPOCHS = 100  # at most
PATIENCE = 5  # epochs without a better divergence on the held-out rows before training stops


@dataclass(frozen=True)
class FirstGate:
    """A trained gate, and how well it predicts the held-out rows."""

    matrix: FloatArray  # [E, H]
    accuracy: float  # share of the experts in use that are among as many predicted ones
    divergence: float  # mean KL, nats


def train_first_gate(
    last: FloatArray,
    logits: FloatArray,
    router: Callable[[FloatArray], Routing],
    seed: int,
    tick: Callable[[], None] = lambda: None,
) -> FirstGate:
    """last [N, H]: the last layer's x at token t; logits [N, E]: the first layer's router at token t + 1 of
    the same sequence; rows in the text's order. `router`: the model's own routing (`spec.router`).

    The last fifth of the rows is held out: it stops the training early and chooses the epoch. The same arrays
    and seed give the same matrix on the same machine. `tick` is called at each epoch. Raises ValueError for
    arrays of different lengths or of fewer than 2 rows."""
    if len(last) != len(logits) or len(last) < 2:
        raise ValueError(f"a first gate needs pairs of tokens, not {len(last)} and {len(logits)} rows")
    trained = len(last) - max(1, round(len(last) * HELD_OUT))
    held, truth = last[trained:], _log_softmax(logits[trained:])
    adam = _Adam((logits.shape[1], last.shape[1]), RATE / math.sqrt(last.shape[1]) / _rms(last[:trained]))
    best, least, worse = adam.matrix.copy(), _divergence(truth, held @ adam.matrix.T), 0
    random = np.random.default_rng(seed)
    for _ in range(EPOCHS):
        tick()
        order = random.permutation(trained)
        for rows in (order[lo : lo + BATCH] for lo in range(0, trained, BATCH)):
            x = last[rows]
            wrong = np.exp(_log_softmax(x @ adam.matrix.T)) - np.exp(_log_softmax(logits[rows]))
            adam.step(wrong.T @ x / np.float32(len(rows)))
        divergence, worse = _divergence(truth, held @ adam.matrix.T), worse + 1
        if divergence < least:
            best, least, worse = adam.matrix.copy(), divergence, 0
        if worse == PATIENCE:
            break
    return FirstGate(best, _accuracy(router(held @ best.T), router(logits[trained:])), least)


class _Adam:
    """Adam on one matrix, from zeros."""

    def __init__(self, shape: tuple[int, int], rate: float) -> None:
        self.matrix, self._mean, self._square = (np.zeros(shape, np.float32) for _ in range(3))
        self._rate = rate
        self._steps = 0

    def step(self, gradient: FloatArray) -> None:
        self._steps += 1
        first, second = MOMENTS
        self._mean += np.float32(1 - first) * (gradient - self._mean)
        self._square += np.float32(1 - second) * (gradient**2 - self._square)
        mean, square = (1 - kept**self._steps for kept in MOMENTS)  # corrects the start from 0
        root = np.sqrt(self._square / np.float32(square)) + np.float32(1e-12)
        self.matrix -= np.float32(self._rate / mean) * self._mean / root


def _rms(x: FloatArray) -> float:
    """Root mean square."""
    return max(math.sqrt(np.square(x).mean()), 1e-12)


def _log_softmax(logits: FloatArray) -> FloatArray:
    less = logits - logits.max(axis=1, keepdims=True)
    result: FloatArray = less - np.log(np.exp(less).sum(axis=1, keepdims=True))
    return result


def _divergence(truth: FloatArray, logits: FloatArray) -> float:
    """Mean KL of predicted logits from the truth's log-probabilities, both [n, E]."""
    return float((np.exp(truth) * (truth - _log_softmax(logits))).sum(axis=1).mean())


def _accuracy(predicted: Routing, used: Routing) -> float:
    """The share of the used experts that were predicted."""
    among = (used.experts[:, :, None] == predicted.experts[:, None]).any(axis=2)
    return float(np.average(among, weights=used.weights != 0))
