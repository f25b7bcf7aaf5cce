"""What users write first, and its gradients, in kernels."""

from __future__ import annotations

import host
import pytest
from wordy import CASES, INTERPRETED, arguments, close, flat, gradients, made


@pytest.mark.drawn
@pytest.mark.parametrize("name", INTERPRETED)
def test_as_the_function_itself(name: str) -> None:
    case, generated = CASES[name], made(name)
    args = arguments(generated.first)
    pairs = [(generated, args, flat((case.eager or case.fn)(**args)))]
    if generated.backward is not None:
        wanted, grads = gradients(case, args)
        pairs.append((generated.backward, {**args, **grads}, wanted))
    for one, given, expected in pairs:
        variants = host.run_all(one, *(given[n] for n in one.signature.params))
        variant, results = next(variants)
        for i, (found, e) in enumerate(zip(results, expected, strict=True)):
            close(found, e, f"{one.name} {variant}, {i}")
