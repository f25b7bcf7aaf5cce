"""Wrong and unusual arguments: an error that can be read, or torch's answer."""

from __future__ import annotations

import random
import warnings

import pytest
import torch

import tk
from tk.cli import _calls

from .bad_input import failures, report

CASES = 2000


def test_every_public_function_has_a_right_call():
    made = _calls.calls()
    assert {call.name for call in made} == set(tk.inspect.functions())
    for call in made:
        found = call.function(*call.args, **call.kwargs)
        if call.torchs is not None:
            found, wanted = (
                (x,) if isinstance(x, torch.Tensor) else tuple(x) for x in (found, call.torchs(*call.args))
            )
            torch.testing.assert_close(
                found, wanted, rtol=1e-4, atol=1e-4, msg=lambda text, c=call: f"{c.name}: {text}"
            )


@pytest.mark.slow
def test_changed_calls_of_every_function():
    """Another seed in every run; a failure prints it."""
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = list(failures(seed, CASES, "cpu", "meta"))
    assert not found, f"seed {seed}:\n{report(found)}"


@pytest.mark.parametrize(
    ("function", "args"),
    [
        ("linear", (torch.ones(2, 3), torch.ones(4, 3), torch.ones(4, device="meta"))),
        ("conv1d", (torch.ones(1, 2, 5), torch.ones(3, 2, 2), torch.ones(3, device="meta"))),
        ("layer_norm", (torch.ones(2, 3), (3,), torch.ones(3, device="meta"), torch.ones(3))),
    ],
)
def test_a_tensor_of_the_meta_device_among_real_ones_is_refused(function: str, args: tuple):
    """torch takes such a call for one of fakes, and what these allocate for a result."""
    with pytest.raises((ValueError, RuntimeError), match="device"):
        getattr(tk, function)(*args)


def test_norms_of_orders_that_are_none():
    for p in ((1.5,), (), "other"):
        with pytest.raises((TypeError, ValueError), match=r"tk\.norm: p"):
            tk.norm(torch.ones(3), p)


def test_sdpa_with_batches_that_do_not_broadcast():
    q = torch.ones(3, 2, 4, 8)
    with pytest.raises(ValueError, match="must broadcast"):
        tk.sdpa(q, torch.ones(5, 2, 2, 4, 8), q)
