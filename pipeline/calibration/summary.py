"""A calibration as a few numbers and as a text file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from pipeline.policies.calibration import Calibration, Floats, quantiles


def summary(calibration: Calibration, about: dict[str, Any]) -> dict[str, Any]:
    """The answer to a client: `about`, and means over the layers."""
    found: dict[str, Any] = {
        "accuracy": {name: mean_accuracy(calibration, name) for name in ("raw", "residual", "first", "mlp")},
        "similarity": float(calibration.similarity.mean()),
        "threshold": calibration.threshold,
        "up": calibration.up,
        "max_loss": calibration.max_loss,
        "sparsity": calibration.sparsity,
        "single_expert_share": None,
        "experts_per_token": None,
    }
    if calibration.needed is not None:
        found["single_expert_share"] = float(calibration.needed[:, 1].mean())
        found["experts_per_token"] = float(experts_per_token(calibration.needed).mean())
    return about | found


def mean_accuracy(calibration: Calibration, predictor: str) -> float | None:
    """Mean over the layers that the predictor predicts; None without any."""
    if predictor == "first":
        return None if calibration.first_gate is None else float(calibration.accuracy["first"][0])
    if predictor == "mlp":  # as `prediction=mlp` predicts: by the next gate where that is better
        mlps = calibration.mlp_accuracy
        raw = calibration.accuracy["raw"][1:]
        if mlps is None:
            return None
        return float(np.concatenate((np.maximum(mlps, raw[: len(mlps)]), raw[len(mlps) :])).mean())
    predicted = calibration.accuracy[predictor][1:]
    return float(predicted.mean()) if len(predicted) else None


def experts_per_token(needed: Floats) -> Floats:
    """Experts per token [L], from the shares [L, k + 1]."""
    counts = np.arange(needed.shape[1], dtype=np.float32)
    mean: Floats = np.sum(needed * counts, axis=1, dtype=np.float32)
    return mean


def describe(calibration: Calibration, about: dict[str, Any]) -> str:
    """The content of calibration.txt: everything but the large arrays."""
    layers, experts = calibration.prefill_counts.shape
    lines = [f"Calibration of {about.get('model', 'a model')}", ""]
    found = summary(calibration, about)
    prefetch = found.pop("prefetch", None) or {}
    lines += [f"{name}: {_plain(value)}" for name, value in found.items()]
    lines += ["", f"{layers} layers of {experts} experts", "", "  ".join(_COLUMNS)]
    for layer in range(layers):
        cells = _row(calibration, prefetch, layer)
        lines.append("  ".join(f"{cell:>{len(head)}}" for cell, head in zip(cells, _COLUMNS, strict=True)))
    if prefetch:
        lines += ["", "a batch's experts of most tokens, named by the prediction, %: raw, residual"]
        lines += ["rows  " + "  ".join(f"{f'top {top}':>11}" for top in prefetch["top"])]
        lines += [
            f"{rows:>4}  "
            + "  ".join(f"{f'{100 * raw:.1f}, {100 * corrected:.1f}':>11}" for raw, corrected in pairs)
            for rows, pairs in batched_accuracy(prefetch)
        ]
    for name, rates in calibration.hit_rates.items():
        lines += [
            "",
            f"hits of a cache in decode, by {name}, of 0 to {experts} experts a layer, a line for each, %",
        ]
        lines += [" ".join(f"{100 * rate:.1f}" for rate in layer) for layer in rates.tolist()]
    lines += _magnitudes(calibration)
    for phase, counts in (("prefill", calibration.prefill_counts), ("decode", calibration.decode_counts)):
        lines += ["", f"rows by expert in {phase}, a line for each layer"]
        lines += [" ".join(map(str, rows)) for rows in counts.tolist()]
    return "\n".join(lines) + "\n"


def _magnitudes(calibration: Calibration) -> list[str]:
    magnitudes, left = calibration.magnitudes, calibration.left_mass
    if magnitudes is None or left is None:
        return []
    shares = (0.5, 0.7, 0.8, 0.9)
    columns = [zip(quantiles(magnitudes, s), quantiles(left, s), strict=True) for s in shares]
    percents = ", ".join(f"{100 * share:g}" for share in shares)
    return [
        "",
        f"|u| below which {percents} % of the channels are, and their share of its sum, %",
        *("  ".join(f"{u:.3g}, {100 * mass:.1f}" for u, mass in row) for row in zip(*columns, strict=True)),
    ]


def batched_accuracy(prefetch: dict[str, Any]) -> list[tuple[int, list[tuple[float, float]]]]:
    """By rows of a batch, for each number of experts: raw, residual."""
    both = (prefetch["accuracy"][name] for name in ("raw", "residual"))
    return [
        (rows, list(zip(raw, residual, strict=True)))
        for rows, raw, residual in zip(prefetch["rows"], *both, strict=True)
    ]


_COLUMNS = (
    *("layer", "raw %", "residual %", "cosine raw", "cosine residual"),
    *("similarity", "sensitivity", "experts/token"),
)


def _row(calibration: Calibration, prefetch: dict[str, Any], layer: int) -> Sequence[str]:
    raw, residual = (f"{100 * calibration.accuracy[name][layer]:.1f}" for name in ("raw", "residual"))
    if layer == 0:
        raw, residual = "", ""
    cosines = ["", ""]
    if layer and prefetch:
        cosines = [f"{prefetch['cosines'][name][layer - 1]:.3f}" for name in ("raw", "residual")]
    sensitivity, needed = calibration.sensitivity, calibration.needed
    return (
        str(layer),
        raw,
        residual,
        *cosines,
        f"{calibration.similarity[layer]:.3f}",
        "" if sensitivity is None else f"{sensitivity[layer]:.3g}",
        "" if needed is None else f"{experts_per_token(needed)[layer]:.2f}",
    )


def _plain(value: Any) -> str:
    match value:
        case None | "":
            return "none"
        case float():
            return f"{value:.4g}"
        case dict():
            return ", ".join(f"{name} {_plain(item)}" for name, item in value.items()) or "none"
        case list():
            return "; ".join(map(_plain, value)) or "none"
    return str(value)
