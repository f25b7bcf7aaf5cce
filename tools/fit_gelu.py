"""Fits the polynomial of kernels/epilogue.py: the upper tail of the normal distribution.

    python tools/fit_gelu.py

Q(z) = exp(-z^2 / 2) q(z) with q(z) = erfcx(z / sqrt 2) / 2, which is smooth; q is t p(t) with t = 1 / (1 + s z). The
scale s and the coefficients minimise the greatest relative error over z in 0..14, where Q leaves fp32.
"""

import numpy as np
from scipy.special import erfcx

DEGREE = 7  # of t p(t)
Z_MAX = 14.0


def fit(scale: float, samples: int) -> tuple[np.ndarray, float]:
    """Coefficients of t, t^2, ..., and their greatest relative error: least squares, weighted towards the peaks."""
    lowest = 1 / (1 + scale * Z_MAX)
    nodes = np.cos(np.pi * (np.arange(samples) + 0.5) / samples)
    t = 0.5 * (1 + lowest) + 0.5 * (1 - lowest) * nodes
    q = 0.5 * erfcx((1 / t - 1) / scale / np.sqrt(2))
    powers = np.stack([t ** (i + 1) for i in range(DEGREE)], axis=1) / q[:, None]
    weights = np.ones(samples)
    for _ in range(200):
        coefficients = np.linalg.lstsq(powers * weights[:, None], weights, rcond=None)[0]
        error = np.abs(powers @ coefficients - 1)
        weights *= (error / error.max() + 1e-3) ** 0.15
        weights /= weights.max()
    return coefficients, error.max()


def main() -> None:
    scale = min(np.linspace(0.28, 0.42, 29), key=lambda s: fit(s, 1500)[1])
    coefficients, error = fit(scale, 6000)
    print(f"scale {scale:.4g}, greatest relative error {error:.2g}; the highest power first:")
    print(", ".join(repr(float(np.float32(c))) for c in coefficients[::-1]))


if __name__ == "__main__":
    main()
