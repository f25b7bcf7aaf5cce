"""What a wrong call is told: what was given, what is taken, and the line that would work. The table is to be read from
top to bottom; each message is whole, but for `...`."""

from __future__ import annotations

import re
import warnings
from typing import Any

import numpy as np
import pytest
import torch

import tk

x = torch.ones(4, 8)
i = torch.ones(4, 8, dtype=torch.int64)
q = torch.ones(1, 4, 16, 16)
three = torch.ones(1, 3, 16, 16)
on_meta = torch.ones(16, device="meta")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch's, that these are old
    nested = torch.nested.nested_tensor([x, x[:2]])
    quantized = torch.quantize_per_tensor(x, 1.0, 0, torch.qint8)


def twice(x):
    return x * 2


# (the call, its error, what it says)
MESSAGES: list[tuple[str, type[Exception], str]] = [
    # Products
    ("tk.mm(x, x)", ValueError, "tk.mm: the inner sizes differ: a is [4, 8], b is [4, 8]"),
    ("tk.mm(x, i.T)", ValueError, "tk.mm: a is float32, b is int64; they must have one dtype"),
    ("tk.mm(x, None)", TypeError, "tk.mm: b must be a Tensor, is NoneType"),
    ("torch.ops.tk.mm(x, None)", RuntimeError, "tk.mm: b must be a Tensor, is None"),
    ("torch.inference_mode()(torch.ops.tk.mm)(x, None)", RuntimeError, "tk.mm: b must be a Tensor, is None"),
    ("torch.ops.tk.addmm(None, x, x)", RuntimeError, "tk.addmm: bias must be a Tensor, is None"),
    ("torch.ops.tk.gelu(None, False)", RuntimeError, "tk.gelu: x must be a Tensor, is None"),
    ("tk.linear(x, x, activation='swish')", ValueError,
     "tk.linear: activation is 'swish', must be one of none, relu, gelu, gelu_tanh, silu; swish is 'silu'"),
    ("tk.linear(x, x, activation=torch.nn.functional.gelu)", ValueError,
     "tk.linear: activation is <built-in function gelu>, must be one of none, relu, gelu, gelu_tanh, silu; that is "
     "'gelu'"),
    ("tk.linear(x, x, activation=torch.nn.SiLU())", ValueError,
     "tk.linear: activation is SiLU(), must be one of none, relu, gelu, gelu_tanh, silu; that is 'silu'"),
    ("tk.linear(x, x, activation=None)", ValueError,
     "tk.linear: activation is None, must be one of none, relu, gelu, gelu_tanh, silu; that is 'none'"),
    ("tk.linear(x, x, activation='gelu_tan')", ValueError,
     "tk.linear: activation is 'gelu_tan', must be one of none, relu, gelu, gelu_tanh, silu; did you mean gelu_tanh or "
     "gelu?"),
    ("tk.linear(x, x, config=3.5)", TypeError, "tk.linear: config must be a config's name or number, or None, is 3.5"),
    ("tk.mm(x, x.T.to('meta'))", ValueError, "tk.mm: a is on cpu, b on meta; all tensors must be on one device"),
    ("tk.mm(q, q)", ValueError, "tk.mm: a must have 2 dimensions, is [1, 4, 16, 16]"),
    ("tk.addmm(x, x, x.T, precision='fp8')", ValueError,
     "tk.addmm: precision is 'fp8', must be 'ieee', 'tf32' or None"),
    ("tk.mm(x, x.T, out_dtype='bf16')", TypeError, "tk.mm: out_dtype must be a torch.dtype or None, is 'bf16'"),
    # Convolutions
    ("tk.conv1d(x[None], x[:, :4, None], padding=(1, 2))", ValueError,
     "tk.conv1d: expected padding to be a single integer value or a list of 1 values to match the convolution "
     "dimensions, but got padding=[1, 2]"),
    ("tk.conv2d(q, q, stride=0)", ValueError, "tk.conv2d: non-positive stride is not supported"),
    # Functions
    ("tk.softmax(i, -1)", TypeError,
     "tk.softmax: input is torch.int64, must be floating-point: give dtype=torch.float32"),
    ("tk.softmax(None, -1)", TypeError, "tk.softmax: input must be a Tensor, is NoneType"),
    ("tk.softmax(x, 'last')", TypeError, "tk.softmax: dim must be an int, is 'last'"),
    ("tk.softmax(x, -1, dtype='fp16')", TypeError, "tk.softmax: dtype must be a torch.dtype or None, is 'fp16'"),
    ("tk.topk(x, 9)", ValueError, "tk.topk: k is 9, must be 0 to 8, the size of dimension 1"),
    ("tk.dropout(x, 'half')", TypeError, "tk.dropout: p must be a number, is 'half'"),
    ("tk.rand((-1, 2))", ValueError, "tk.rand: shape is [-1, 2], must have no negative size"),
    ("tk.rand('4x8')", TypeError, "tk.rand: shape must be a tuple of ints, is '4x8'"),
    ("tk.rand((2, 2), dtype=torch.int64)", ValueError,
     "tk.rand: dtype is torch.int64, must be a floating-point one; tk.randint has integers"),
    ("tk.softmax(x, 5)", IndexError,
     "tk.softmax: dim is 5, must be -2 to 1 for [4, 8]"),
    ("tk.amax(x[:0], 0)", ValueError, "tk.amax: input is [0, 8], dim 0 of it is reduced and must not be 0"),
    ("tk.norm(x, 'nuclear')", ValueError, "tk.norm: p is 'nuclear', must be a number, 'fro' or 'nuc'"),
    ("tk.quantize_fp8(x, per='column')", ValueError, "tk.quantize_fp8: per is 'column', must be 'tensor' or 'row'"),
    # Attention
    ("tk.flex_attention(q, three, three)", ValueError,
     "tk.flex_attention: query has 4 heads and key 3; query's must be as many, or with enable_gqa=True a multiple of "
     "key's"),
    ("tk.flex_attention(q, q[:, :2], q[:, :2])", ValueError,
     "tk.flex_attention: query has 4 heads and key 2; for groups of query heads give enable_gqa=True"),
    ("tk.sdpa(q, q[:, :2], q[:, :2])", ValueError,
     "tk.sdpa: batches and heads must broadcast, are query [1, 4, 16, 16], key [1, 2, 16, 16], value [1, 2, 16, 16]; "
     "for groups of query heads give enable_gqa=True"),
    ("tk.sdpa(q, q, q, dropout_p=0.1)", tk.UnsupportedError,
     "tk.sdpa: dropout_p is 0.1; no kernel drops, use 0"),
    ("tk.flex_attention(q, q, q, lambda s, b, h, m, n: np.tanh(s))", tk.UnsupportedError,
     "...: NumPy is given a tensor, which has no numbers yet: call torch's function of that name"),
    ("tk.flex_attention(q, q, q, lambda s, b, h, m, n: s if m > n else -s)", tk.UnsupportedError,
     "...: control flow on a tensor (an if, a loop, or .item()): what holds for one score need not hold for the next; "
     "write it with torch.where, & and |"),
    ("tk.flex_attention(q, q, q, lambda s, b, h, m, n: s + on_meta[n])", ValueError,
     "tk.flex_attention: on_meta, which the score_mod captures, is on meta, query on cpu; move it"),
    ("tk.flex_attention(q, q, q, block_mask=x)", TypeError,
     "tk.flex_attention: block_mask must be a BlockMask, is Tensor; make one with tk.flex.create_block_mask(mask_mod, "
     "B, H, Q_LEN, KV_LEN)"),
    ("tk.flex_attention(q, q, q.half())", ValueError,
     "tk.flex_attention: value is torch.float16, must be torch.float32 as query is"),
    ("tk.flex.create_block_mask(lambda b, h, m, n: on_meta[n] > 0, None, None, 16, 16, device='cpu')", ValueError,
     "tk.flex.create_block_mask: on_meta, which the mask_mod captures, is on meta, the mask on cpu; move it"),
    ("tk.flex.create_block_mask(tk.flex.mods.causal, None, None, -16, 16)", ValueError,
     "tk.flex.create_block_mask: Q_LEN is -16, must not be negative"),
    # Declarations
    ("tk.op(twice, x='fp32[M]')", ValueError,
     "tk.op(twice, x='fp32[M]'): the function comes behind: tk.op(x='fp32[M]')(twice)"),
    ("tk.op(twice)", ValueError,
     "@tk.op on twice (...): it needs a keyword for every parameter, which says what it is: @tk.op(x='fp32[...]'); a "
     "tensor is 'dtype[sizes]', a number 'float', 'int' or 'bool'"),
    ("tk.op(x='fp32[M]', z='float')(twice)", ValueError,
     "@tk.op on twice (...): z='float': the function has no parameter z; its parameters are x"),
    ("tk.op(x='f32[M]')(twice)", ValueError,
     "@tk.op on twice (...): x='f32[M]': f32 is neither a dtype (...) nor a variable of this decorator. Here f32 is "
     "'fp32'"),
    ("tk.op(x='T[M]', T=(torch.bfloat16, 'fp61'))(twice)", ValueError,
     "@tk.op on twice (...): T=(torch.bfloat16, 'fp61'): 'fp61' is no dtype; there are bf16, fp16, fp32, fp64, "
     "fp8e4m3fn, fp8e5m2, i8, i16, i32, i64, u8, bool, or torch's names for them, such as torch.bfloat16; did you mean "
     "fp64 or fp16?"),
    ("tk.op(x='T[M]', T=torch.complex64)(twice)", ValueError,
     "@tk.op on twice (...): T=torch.complex64: the function has no parameter T, and torch.complex64 is no dtype that "
     "a variable could stand for; there are ..."),
    ("tk.op(x=torch.float32)(twice)", ValueError,
     "@tk.op on twice (...): x=torch.float32: x is a parameter; its sizes belong to it: x='fp32[...]'"),
    ("tk.op(x=x)(twice)", ValueError,
     "@tk.op on twice (...): x=a tensor of torch.float32 [4, 8]: give a text, such as 'T[M, N]', 'fp32[N]' or 'float', "
     "or, for a variable, a tuple of dtypes; these are ..."),
    ("tk.op(x='fp32[M]')(torch.nn.GELU())", ValueError,
     "@tk.op on GELU(...): a GELU is no plain function: write a def that calls it"),
    ("tk.op(x='fp32[M]', mode='float')(eval('lambda x, mode: x'))", ValueError,
     "@tk.op on <lambda> (...): parameter mode: every op has one, as it has config, mode, "
     "mode_bits; call it something else, such as mode_"),
    ("tk.op(x='fp32[M]', grad='yes')(twice)", ValueError,
     "@tk.op on twice (...): grad='yes': it is True or False; a parameter of that name must be renamed"),
    # Settings
    ("tk.config.modes(deterministic='no').__enter__()", TypeError,
     "tk.config.modes: deterministic is 'no', must be True, False or None, which leaves it as it is"),
    ("tk.config.batch_invariant('off').__enter__()", TypeError,
     "tk.config.batch_invariant: enabled must be a bool, is 'off'"),
    ("tk.config.set_default_modes(strict=0)", TypeError,
     "tk.config.set_default_modes: strict is 0, must be True, False or None, which leaves it as it is"),
    ("tk.config.build_missing('no')", TypeError,
     "tk.config.build_missing: enabled must be a bool, is 'no'"),
    ("tk.config.override('mm', 3.5).__enter__()", TypeError,
     "tk.config.override: config must be a config's name or number, or None, is 3.5"),
    # Models
    ("tk.use('model')", TypeError, "tk.use: model must be a torch.nn.Module, is str"),
    ("tk.use(torch.nn.Linear)", TypeError,
     "tk.use: model must be a torch.nn.Module, is the class Linear: make one first"),
    ("tk.use(torch.nn.Linear(3, 3), sample=3)", TypeError,
     "tk.use: sample must be a tensor, a tuple of arguments, a dict of keywords, or a function that returns one of "
     "these, is int"),
    ("tk.use(torch.nn.Linear(3, 3), sample=x, only_faster=False)", ValueError,
     "tk.use: with a sample, what is faster is measured: leave only_faster out"),
    # What there is
    ("tk.explain(tk.mm, x, x.T)", TypeError,
     "tk.explain: op must be the name of a function of tk or of an op, such as 'mm', is <function mm at ...>"),
    ("tk.load_pack('')", tk.PackError, "tk.load_pack: path '' is empty; name a pack, such as 'my.tkpack'"),
    ("tk.load_pack('/')", tk.PackError, "tk.load_pack: path '/' is a folder; name a pack, such as 'my.tkpack'"),
    ("tk.load_pack(None)", TypeError, "tk.load_pack: path must be a str or a path, is None"),
    ("tk.linear_cross_entropy(x, None, i[:, 0])", TypeError,
     "tk.linear_cross_entropy: linear_weight must be a Tensor, is NoneType"),
    ("tk.index_put(x, (i,), x.to('meta')[0, 0])", ValueError,
     "tk.index_put: input is on cpu, values on meta; all tensors must be on one device"),
    ("tk.index_put(x, (i.to('meta'),), x[0, 0])", ValueError,
     "tk.index_put: input is on cpu, indices[0] on meta; all tensors must be on one device"),
    ("tk.explain('softmx', x)", ValueError,
     "tk has no op 'softmx', and no loaded pack has (...); did you mean softmax...?"),
    ("tk.explain('bias_gelu', x, x[0], False, bais=1)", TypeError,
     "tk.bias_gelu: there is no argument 'bais'; did you mean bias?"),
    ("tk.explain('bias_gelu', x, x[0], False, qq=1)", TypeError,
     "tk.bias_gelu: there is no argument 'qq'; there are x, bias, tanh, config, ..."),
    ("tk.explain('bias_gelu', x)", TypeError, "tk.bias_gelu: argument 'bias' is missing"),
    ("tk.explain('bias_gelu', *[x] * 9)", TypeError,
     "tk.bias_gelu: there are fewer arguments than the 9 that are given"),
    ("tk.explain('mm', x, x.T, arch=91)", ValueError,
     "tk.explain: no GPU is described of arch 91; where no pack is for it, it runs PTX for sm_80; GPUs are described "
     "of 80 (A100), 90 (H100)"),
    ("tk.explain('mm', x, x.T, arch='sm_86')", ValueError,
     "tk.explain: no GPU is described of arch 'sm_86'; it runs the kernels for sm_80: write 80; ..."),
    ("tk.explain('mm', x, x.T, arch=8.6)", TypeError,
     "tk.explain: arch must be an int or a str, is 8.6; it runs the kernels for sm_80: write 80; GPUs are described "
     "..."),
    ("tk.explain('mm', x, x.T, arch=True)", TypeError,
     "tk.explain: arch must be an int or a str, is True; GPUs are described of 80 (A100), 90 (H100)"),
    ("tk.explain('mm', x, x.T, arch='ptx80')", ValueError,
     "tk.explain: no GPU is described of arch 'ptx80'; GPUs are described of 80 (A100), 90 (H100)"),
    ("tk.check(100).__enter__()", ValueError,
     "tk.check: no GPU is described of arch 100; where no pack is for it, it runs PTX for sm_80; ..."),
    ("tk.check(None).__enter__()", TypeError,
     "tk.check: arch must be an int or a str, is None; GPUs are described of 80 (A100), 90 (H100)"),
    ("tk.supports(tk.mm, x, x.T)", TypeError,
     "tk.supports: op must be the name of a function of tk or of an op, such as 'mm', is <function mm at ...>"),
    ("tk.supports(None)", TypeError,
     "tk.supports: op must be the name of a function of tk or of an op, such as 'mm', is None"),
    ("tk.supports('mm', x, x.T, arch=86)", ValueError,
     "tk.supports: no GPU is described of arch 86; it runs the kernels for sm_80: write 80; ..."),
    ("tk.explain('mm', x.to_sparse(), x.T, arch=90)", tk.UnsupportedError,
     "tk.mm: a is sparse_coo, must be a dense tensor, as x.to_dense() makes one"),
    ("tk.explain('softmax', nested, -1, arch=90)", tk.UnsupportedError,
     "tk.softmax: input is nested, must be a dense tensor, as x.to_padded_tensor(0) makes one"),
    ("tk.explain('gelu', quantized, arch=90)", tk.UnsupportedError,
     "tk.gelu: a tensor is quantized, must not be, as x.dequantize() makes one"),
    ("tk.coverage().only(op=tk.mm)", TypeError, "tk.coverage().only: op must be a str, is <function mm at ...>"),
    ("tk.coverage().only(arch=9.0)", TypeError, "tk.coverage().only: arch must be an int or a str, is 9.0"),
    ("tk.preload(tk.mm)", TypeError,
     "tk.preload: ops must be the name of an op, or several, has <function mm at ...>"),
    ("tk.preload(['mm', 3])", TypeError, "tk.preload: ops must be the name of an op, or several, has 3"),
    ("tk.preload(x)", TypeError, "tk.preload: ops must be the name of an op, or several, has tensor(...)"),
    ("tk.preload(device=True)", TypeError,
     "tk.preload: device must be a torch.device, a str, an int or None, is True"),
    ("tk.preload(device='gpu')", ValueError, "tk.preload: device is 'gpu', must be a CUDA device"),
    ("tk.preload(device=-1)", ValueError, "tk.preload: device is -1, must be a CUDA device"),
    ("tk.norm(x, np.ones(2))", TypeError, "tk.norm: p must be a number, is array([1., 1.])"),
    ("tk.conv2d(q, q, groups=i)", TypeError, "tk.conv2d: groups must be an int, is tensor(...)"),
    ("tk.load_pack('missing.tkpack')", tk.PackError, "...missing.tkpack cannot be opened: No such file or directory"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "kind", "said"), MESSAGES, ids=[call for call, *_ in MESSAGES])
def test_what_is_said(call: str, kind: type[Exception], said: str) -> None:
    scope: dict[str, Any] = {**globals(), "np": np}
    with pytest.raises(kind) as caught:
        eval(call, scope)
    pattern = ".*".join(map(re.escape, said.split("...")))
    assert re.fullmatch(pattern, str(caught.value), re.DOTALL), str(caught.value)
