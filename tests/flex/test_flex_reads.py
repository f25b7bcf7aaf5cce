"""What a mod reads, wherever it is held: after a change the next call has the new value, or is refused by name."""

from __future__ import annotations

import builtins
import collections
import contextlib
import dataclasses
import enum
import functools
import itertools
import math
import random
import sys
import textwrap
import time
import types
import typing
from collections.abc import Callable
from typing import Any

import pytest
import torch

import tk
from tk.flex.tracing import trace
from tk.flex.tracing.evaluate import evaluate, indices

AROUND = {"torch": torch, "functools": functools, "enum": enum, "dataclasses": dataclasses, "random": random,
          "itertools": itertools, "time": time, "types": types, "tk": tk,
          "collections": collections, "typing": typing}  # fmt: skip

# Each: what is set up, the expression of a number that the mask reads, and the change. V is the value, X another.
WAYS = {
    "global": ("N = V", "N", "N = X"),
    "class": ("class C: n = V", "C.n", "C.n = X"),
    "inherited": ("class A: n = V\nclass C(A): pass", "C.n", "A.n = X"),
    "hides an inherited one": ("class A: n = V\nclass C(A): pass", "C.n", "C.n = X"),
    "nested class": ("class C:\n  class D: n = V", "C.D.n", "C.D.n = X"),
    "nested class replaced": ("class C:\n  class D: n = V", "C.D.n", "class E: n = X\nC.D = E"),
    "of an object's class": ("class C: n = V\nc = C()", "c.n", "C.n = X"),
    "of __class__": ("class C: n = V\nc = C()", "c.__class__.n", "C.n = X"),
    "of type": ("class C: n = V\nc = C()", "type(c).n", "C.n = X"),
    "of self's type": ("class C:\n  n = V\n  def f(self): return type(self).n\nc = C()", "c.f()", "C.n = X"),
    "of self's class": ("class C:\n  n = V\n  def f(self): return self.__class__.n\nc = C()", "c.f()", "C.n = X"),
    "static method": ("class C:\n  n = V\n  @staticmethod\n  def f(): return C.n", "C.f()", "C.n = X"),
    "static method of an object": ("N = V\nclass C:\n  @staticmethod\n  def f(): return N\nc = C()", "c.f()", "N = X"),
    "class method": ("class C:\n  n = V\n  @classmethod\n  def f(cls): return cls.n", "C.f()", "C.n = X"),
    "class method of a subclass": (
        "class A:\n  n = V\n  @classmethod\n  def f(cls): return cls.n\nclass C(A): pass",
        "C.f()",
        "C.n = X",
    ),
    "method replaced": ("class C:\n  def f(self): return V\nc = C()", "c.f()", "C.f = lambda self: X"),
    "super": (
        "class A:\n  n = V\n  def f(self): return self.n\nclass C(A):\n  def f(self): return super().f()\nc = C()",
        "c.f()",
        "A.n = X",
    ),
    "super's global": (
        "N = V\nclass A:\n  def f(self): return N\nclass C(A):\n  def f(self): return super().f()\nc = C()",
        "c.f()",
        "N = X",
    ),
    "property": ("class C:\n  n = V\n  @property\n  def p(self): return self.n\nc = C()", "c.p", "c.n = X"),
    "property's global": ("N = V\nclass C:\n  @property\n  def p(self): return N\nc = C()", "c.p", "N = X"),
    "property that counts": (
        "class C:\n  n = V\n  @property\n  def p(self):\n    self.n = self.n + 1\n    return self.n\nc = C()",
        "c.p",
        "",
    ),
    "cached property": (
        "class C:\n  n = V\n  @functools.cached_property\n  def p(self): return self.n\nc = C()",
        "c.p",
        "c.__dict__['p'] = X",
    ),
    "metaclass": ("class M(type): n = V\nclass C(metaclass=M): pass", "C.n", "M.n = X"),
    "metaclass property": (
        "N = V\nclass M(type):\n  @property\n  def n(cls): return N\nclass C(metaclass=M): pass",
        "C.n",
        "N = X",
    ),
    "__getattr__": ("N = V\nclass C:\n  def __getattr__(self, n):\n    return N\nc = C()", "c.what", "N = X"),
    "descriptor": ("N = V\nclass D:\n  def __get__(self, o, t): return N\nclass C: n = D()", "C.n", "N = X"),
    "__slots__": ("class C:\n  __slots__ = ('n',)\nc = C()\nc.n = V", "c.n", "c.n = X"),
    "dataclass": ("@dataclasses.dataclass\nclass C: n: int = V\nc = C()", "c.n", "c.n = X"),
    "dataclass default": ("@dataclasses.dataclass\nclass C: n: int = V", "C.n", "C.n = X"),
    "equal dataclasses": (
        "@dataclasses.dataclass\nclass C: n: int\na, b = C(1), C(1)",
        "V if a == b else X",
        "b.n = 2",
    ),
    "unequal dataclasses": (
        "@dataclasses.dataclass\nclass C: n: int\na, b = C(1), C(1)",
        "V if a != b else X",
        "b.n = 2",
    ),
    "named tuple": (
        "from collections import namedtuple\nc = namedtuple('C', 'n m')(V, 1)",
        "c.n",
        "c = c._replace(n=X)",
    ),
    "named tuple unpacked": (
        "from collections import namedtuple\nc = namedtuple('C', 'n m')(V, 0)",
        "sum(c)",
        "c = c._replace(m=X-V)",
    ),
    "named tuple made": ("from collections import namedtuple\nP = namedtuple('P', 'n')\nN = V", "P(N).n", "N = X"),
    "object made": ("class C:\n  k = V\n  def __init__(self): self.n = self.k\n", "C().n", "C.k = X"),
    "object made, its method": ("N = V\nclass C:\n  def f(self): return N", "C().f()", "N = X"),
    "dataclass made": ("@dataclasses.dataclass\nclass C: n: int\nN = V", "C(N).n", "N = X"),
    "enum": ("class E(enum.Enum):\n  A = V\n  B = X\ne = E.A", "e.value", "e = E.B"),
    "enum by class": ("class E(enum.Enum):\n  A = V", "E.A.value", "E.A._value_ = X"),
    "enum method": ("N = V\nclass E(enum.Enum):\n  A = 1\n  def f(self): return N", "E.A.f()", "N = X"),
    "enum chosen": ("class E(enum.Enum):\n  A = 1\n  B = 2\ne = E.A", "V if e is E.A else X", "e = E.B"),
    "enum equal": ("class E(enum.Enum):\n  A = 1\n  B = 2\ne = E.A", "V if e == E.A else X", "e = E.B"),
    "enum attribute": ("class E(enum.Enum):\n  A = 1\nE.A.n = V", "E.A.n", "E.A.n = X"),
    "enum as key": ("class E(enum.Enum):\n  A = 1\nD = {E.A: V}", "D[E.A]", "D[E.A] = X"),
    "enum of ints": ("class E(enum.IntEnum):\n  A = V\n  B = X\ne = E.A", "e", "e = E.B"),
    "enum by number": ("class E(enum.Enum):\n  A = 1\n  B = 2\ni = 1", "V if E(i) is E.A else X", "i = 2"),
    "list": ("L = [V]", "L[0]", "L[0] = X"),
    "list replaced": ("L = [V]", "L[0]", "L = [X]"),
    "list's length": ("L = [0] * V", "len(L)", "L.extend([0] * (X - V))"),
    "list's sum": ("L = [V]", "sum(L)", "L.append(X - V)"),
    "in list": ("L = [1]", "V if 2 not in L else X", "L.append(2)"),
    "in tuple": ("L = (1,)", "V if 2 not in L else X", "L = (1, 2)"),
    "list iterated": ("L = [V]", "[x for x in L][-1]", "L.append(X)"),
    "list written": ("L = [V]", "(L.append(1), L[0])[1]", ""),
    "dict": ("D = {'n': V}", "D['n']", "D['n'] = X"),
    "dict's get": ("D = {}", "D.get('n', V)", "D['n'] = X"),
    "dict's bound get": ("D = {}\nget = D.get", "get('n', V)", "D['n'] = X"),
    "in dict": ("D = {}", "V if 'n' not in D else X", "D['n'] = 1"),
    "dict's values": ("D = {1: V}", "max(D.values())", "D[2] = X"),
    "dict of dicts": ("D = {'a': {'n': V}}", "D['a']['n']", "D['a']['n'] = X"),
    "dict written": ("D = {'n': V}", "D.setdefault('m', D['n'])", ""),
    "OrderedDict": ("from collections import OrderedDict\nD = OrderedDict(n=V)", "D['n']", "D['n'] = X"),
    "OrderedDict's get": ("from collections import OrderedDict\nD = OrderedDict()", "D.get('n', V)", "D['n'] = X"),
    "OrderedDict's items": (
        "from collections import OrderedDict\nD = OrderedDict(n=V)",
        "max(v for _, v in D.items())",
        "D['m'] = X",
    ),
    "defaultdict": ("from collections import defaultdict\nD = defaultdict(int, n=V)", "D['n']", "D['n'] = X"),
    "ChainMap": ("from collections import ChainMap\nA = {'n': V}\nD = ChainMap({}, A)", "D['n']", "A['n'] = X"),
    "Counter": ("from collections import Counter\nD = Counter({'n': V})", "D['n']", "D['n'] = X"),
    "dict's own kind": ("class C(dict):\n  def __getattr__(self, n): return self[n]\nc = C(n=V)", "c.n", "c['n'] = X"),
    "list's own kind": ("class C(list): pass\nc = C([V])", "c[0]", "c[0] = X"),
    "list's own kind, in": ("class C(list): pass\nc = C([1])", "V if 2 not in c else X", "c.append(2)"),
    "list's own kind, index": ("class C(list): pass\nc = C([0] * V + [7])", "c.index(7)", "c[:0] = [0] * (X - V)"),
    "own items": ("N = V\nclass C:\n  def __getitem__(self, i): return N\nc = C()", "c[0]", "N = X"),
    "own length": ("N = V\nclass C:\n  def __len__(self): return N\nc = C()", "len(c)", "N = X"),
    "own truth": ("N = 1\nclass C:\n  def __bool__(self): return N == 1\nc = C()", "V if c else X", "N = 2"),
    "own in": ("N = 1\nclass C:\n  def __contains__(self, x): return x == N\nc = C()", "V if 1 in c else X", "N = 2"),
    "own iteration": ("N = V\nclass C:\n  def __iter__(self): yield N\nc = C()", "list(c)[0]", "N = X"),
    "own sum": ("N = V\nclass C:\n  def __add__(self, x): return N + x\nc = C()", "c + 0", "N = X"),
    "own equality": ("N = 1\nclass C:\n  def __eq__(self, x): return N == x\nc = C()", "V if c == 1 else X", "N = 2"),
    "own order": ("N = 1\nclass C:\n  def __lt__(self, x): return N < x\nc = C()", "V if c < 2 else X", "N = 5"),
    "own hash": ("N = 1\nclass C:\n  def __hash__(self): return N\nc = C()", "V if hash(c) == 1 else X", "N = 2"),
    "own inequality that comes": ("class C: pass\nc = C()", "V if c != 1 else X", "C.__ne__ = lambda s, x: False"),
    "own text": ("N = 1\nclass C:\n  def __str__(self): return str(N)\nc = C()", "V if str(c) == '1' else X", "N = 2"),
    "own call": ("N = V\nclass C:\n  def __call__(self): return N\nc = C()", "c()", "N = X"),
    "deque": ("from collections import deque\nD = deque([V])", "D[0]", "D[0] = X"),
    "set": ("S = {1}", "V if 2 not in S else X", "S.add(2)"),
    "set's length": ("S = set(range(V))", "len(S)", "S.update(range(X))"),
    "set's maximum": ("S = {V}", "max(S)", "S.add(X)"),
    "set written": ("S = {V}", "(S.add(1), max(S))[1]", ""),
    "frozenset": ("S = frozenset({1})", "V if 2 not in S else X", "S = frozenset({1, 2})"),
    "set of a list": ("class C: s = {1}", "V if 2 not in C.s else X", "C.s.add(2)"),
    "set's own kind": ("class S(set): pass\nS = S({1})", "V if 2 not in S else X", "S.add(2)"),
    "set of numbers of other kinds": ("S = {1}", "V if type(max(S)) is int else X", "S.clear()\nS.add(1.0)"),
    "hasattr": ("class C: pass\nc = C()", "X if hasattr(c, 'n') else V", "c.n = 1"),
    "hasattr of a class": ("class C: pass", "X if hasattr(C, 'n') else V", "C.n = 1"),
    "hasattr by class": ("class C: pass\nc = C()", "X if hasattr(c, 'n') else V", "C.n = 1"),
    "getattr": ("class C: pass\nc = C()", "getattr(c, 'n', V)", "c.n = X"),
    "hasattr of a module": ("m = types.ModuleType('m')", "X if hasattr(m, 'n') else V", "m.n = 1"),
    "module": ("m = types.ModuleType('m')\nm.n = V", "m.n", "m.n = X"),
    "module imported in it": (
        "import sys\nm = types.ModuleType('tk_m')\nm.n = V\nsys.modules['tk_m'] = m",
        "__import__('tk_m').n",
        "m.n = X",
    ),
    "vars": ("class C: pass\nc = C()\nc.n = V", "vars(c)['n']", "c.n = X"),
    "vars of a class": ("class C: n = V", "vars(C)['n']", "C.n = X"),
    "__dict__": ("class C: pass\nc = C()", "c.__dict__.get('n', V)", "c.n = X"),
    "dir": ("class C: pass\nc = C()", "X if 'n' in dir(c) else V", "c.n = 1"),
    "globals": ("N = V", "globals()['N']", "N = X"),
    "eval": ("N = V", "eval('N')", "N = X"),
    "function": ("N = V\ndef f(): return N", "f()", "N = X"),
    "function's attribute": ("def f(): pass\nf.n = V", "f.n", "f.n = X"),
    "function's absent attribute": ("def f(): pass", "getattr(f, 'n', V)", "f.n = X"),
    "function's name": ("def f(): pass", "V if f.__name__ == 'f' else X", "f.__name__ = 'g'"),
    "function's default": ("def f(n=V): return n", "f()", "f.__defaults__ = (X,)"),
    "function's keyword": ("def f(*, n=V): return n", "f()", "f.__kwdefaults__ = {'n': X}"),
    "default mutated": ("D = [V]\ndef f(n=D): return n[0]", "f()", "D[0] = X"),
    "nested function": ("N = V\ndef f():\n  def g(): return N\n  return g()", "f()", "N = X"),
    "closure": (
        "def make(n):\n  def f(): return n\n  def to(x):\n    nonlocal n\n    n = x\n  return f, to\nf, to = make(V)",
        "f()",
        "to(X)",
    ),
    "closure written": (
        "def make(n):\n  def f():\n    nonlocal n\n    n += 1\n    return n\n  return f\nf = make(V)",
        "f()",
        "",
    ),
    "global written": ("N = V\ndef f():\n  global N\n  N += 1\n  return N", "f()", ""),
    "global that comes": ("def f():\n  try: return N\n  except NameError: return V", "f()", "N = X"),
    "built-in that is hidden": ("L = [1] * V", "len(L)", "len = lambda x: X"),
    "partial": ("def f(n): return n\np = functools.partial(f, V)", "p()", "p = functools.partial(f, X)"),
    "partial of a list": ("def f(n): return n[0]\nL = [V]\np = functools.partial(f, L)", "p()", "L[0] = X"),
    "wraps": (
        "N = V\ndef d(f):\n  @functools.wraps(f)\n  def g(): return f()\n  return g\n@d\ndef f(): return N",
        "f()",
        "N = X",
    ),
    "lru_cache": ("N = V\n@functools.lru_cache\ndef f(): return N", "f()", "N = X"),
    "lru_cache cleared": ("N = V\n@functools.lru_cache\ndef f(): return N", "f()", "N = X\nf.cache_clear()"),
    "lru_cache of a number": ("@functools.lru_cache\ndef f(n): return n\nN = V", "f(N)", "N = X"),
    "iterator": ("I = iter([V, X, 1, 2])", "next(I)", ""),
    "counter": ("I = itertools.count(V)", "next(I)", ""),
    "generator": ("I = (x for x in [V, X, 1, 2])", "next(I)", ""),
    "random": ("", "random.randint(1, 1000)", ""),
    "random's own": ("r = random.Random(3)", "int(r.random() * 1000)", ""),
    "time": ("", "int(time.time() * 1e6) % 1000003", ""),
    "context variable": ("import contextvars\nc = contextvars.ContextVar('c', default=V)", "c.get()", "c.set(X)"),
    "environment": (
        "import os\nos.environ['TK_TEST_N'] = str(V)",
        "int(os.environ['TK_TEST_N'])",
        "os.environ['TK_TEST_N'] = str(X)",
    ),
    "absent environment": (
        "import os\nos.environ.pop('TK_TEST_M', None)",
        "int(os.environ.get('TK_TEST_M', V))",
        "os.environ['TK_TEST_M'] = str(X)",
    ),
    "simple namespace": ("c = types.SimpleNamespace(n=V)", "c.n", "c.n = X"),
    "mapping proxy": ("D = {'n': V}\nP = types.MappingProxyType(D)", "P['n']", "D['n'] = X"),
    "mapping proxy's get": ("D = {}\nP = types.MappingProxyType(D)", "P.get('n', V)", "D['n'] = X"),
    "isinstance": ("class A: pass\nclass B(A): pass\nc = A()", "X if isinstance(c, B) else V", "c = B()"),
    "registered with a kind": (
        "import abc\nclass A(abc.ABC): pass\nclass C: pass\nc = C()",
        "X if isinstance(c, A) else V",
        "A.register(C)",
    ),
    "registered with one of two kinds": (
        "import abc\nclass A(abc.ABC): pass\nclass C: pass",
        "X if issubclass(C, (A, dict)) else V",
        "A.register(C)",
    ),
    "number of numpy": ("import numpy\nn = numpy.int64(V)", "n", "n = numpy.int64(X)"),
    "float of numpy": ("import numpy\nn = numpy.float32(V)", "n", "n = numpy.float32(X)"),
    "functions of operator": ("from operator import mul\nN = V", "mul(N, 2)", "N = X"),
    "reduce": ("from functools import reduce\nL = [V]", "reduce(lambda a, b: a + b, L)", "L.append(X - V)"),
    "kind of a number": ("n = 1", "V if isinstance(n, int) else X", "n = 1.0"),
    "type of a number": ("n = 1", "V if type(n) is int else X", "n = 1.0"),
    "class of an object": ("class A: n = V\nclass B: n = X\nc = A()", "c.n", "c.__class__ = B"),
    "callable": ("class C: pass\nc = C()", "X if callable(c) else V", "c = lambda: 1"),
    "module of torch": ("m = torch.nn.Linear(2, 2)\nm.n = V", "m.n", "m.n = X"),
    "training": ("m = torch.nn.Linear(2, 2)", "V if m.training else X", "m.eval()"),
    "module list": (
        "m = torch.nn.ModuleList([torch.nn.Identity()] * V)",
        "len(m)",
        "m.extend([torch.nn.Identity()] * (X - V))",
    ),
    "minus zero": ("z = 0.0", "V if str(z) == '0.0' else X", "z = -0.0"),
    "torch's attribute": (
        "",
        "V if torch.backends.cuda.matmul.allow_tf32 else X",
        "torch.backends.cuda.matmul.allow_tf32 = not torch.backends.cuda.matmul.allow_tf32",
    ),
    "0-d tensor": ("class C: n = torch.tensor(V)", "C.n", "C.n = torch.tensor(X)"),
    "0-d tensor in place": ("class C: n = torch.tensor(V)", "C.n", "C.n.fill_(X)"),
    "1-d tensor": ("class C: n = torch.full((2,), V)", "C.n[h]", "C.n = torch.full((2,), X)"),
    "1-d tensor of an instance's class": (
        "class C: n = torch.full((2,), V)\nc = C()",
        "c.n[h]",
        "C.n = torch.full((2,), X)",
    ),
    "tensor of another dtype": ("class C: n = torch.tensor(V)", "C.n", "C.n = torch.tensor(float(X))"),
    "property of a tensor": (
        "class C:\n  t = torch.tensor(V)\n  @property\n  def n(self): return self.t * 1\nc = C()",
        "c.n",
        "C.t = torch.tensor(X)",
    ),
    "tensor's requires_grad": ("t = torch.ones(2)", "V if not t.requires_grad else X", "t.requires_grad_()"),
    "class tensor's requires_grad": (
        "class C: t = torch.tensor(1.)",
        "V if not C.t.requires_grad else X",
        "C.t.requires_grad_()",
    ),
    "tensor's attribute": ("t = torch.ones(2)\nt.n = V", "t.n", "t.n = X"),
    "tensor's absent attribute": ("t = torch.ones(2)", "getattr(t, 'n', V)", "t.n = X"),
    "tensor's class": (
        "t = torch.ones(2)",
        "V if not isinstance(t, torch.nn.Parameter) else X",
        "t = torch.nn.Parameter(torch.ones(2))",
    ),
    "tensor's type": (
        "t = torch.ones(2)",
        "V if type(t) is torch.Tensor else X",
        "t = torch.nn.Parameter(torch.ones(2))",
    ),
    "query's requires_grad": ("", "V if not q.requires_grad else X", ""),
    "default dtype": (
        "",
        "V if torch.get_default_dtype() is torch.float32 else X",
        "torch.set_default_dtype(torch.float64)",
    ),
    "default dtype by name": (
        "from torch import get_default_dtype",
        "V if get_default_dtype() is torch.float32 else X",
        "torch.set_default_dtype(torch.float64)",
    ),
    "default dtype of a number": (
        "",
        "V if torch.tensor(1.5).dtype is torch.float32 else X",
        "torch.set_default_dtype(torch.float64)",
    ),
    "grad mode": ("", "V if torch.is_grad_enabled() else X", "torch.set_grad_enabled(False)"),
    "grad mode in a function": (
        "def f(): return torch.is_grad_enabled()",
        "V if f() else X",
        "torch.set_grad_enabled(False)",
    ),
    "inference mode": ("", "V if not torch.is_inference_mode_enabled() else X", "GUARDS.enter(torch.inference_mode())"),
    "autocast": ("", "V if not torch.is_autocast_enabled('cpu') else X", "GUARDS.enter(torch.autocast('cpu'))"),
    "autocast's dtype": (
        "",
        "V if torch.get_autocast_dtype('cpu') is torch.bfloat16 else X",
        "torch.set_autocast_dtype('cpu', torch.float16)",
    ),
    "deterministic": (
        "",
        "V if not torch.are_deterministic_algorithms_enabled() else X",
        "torch.use_deterministic_algorithms(True)",
    ),
    "threads": ("torch.set_num_threads(1)", "torch.get_num_threads()", "torch.set_num_threads(2)"),
    "default device": ("", "V if torch.get_default_device().type == 'cpu' else X", "torch.set_default_device('meta')"),
    "device of a tensor": ("T = torch.ones(3)", "V if T.device.type == 'cpu' else X", "T = T.to('meta')"),
    "device of an index": ("", "V if (q + 1).device.type == 'cpu' else X", ""),
    "devices that are one": ("T = torch.ones(3)", "V if q.device == T.device else X", "T = T.to('meta')"),
    "one tensor": ("T = torch.ones(3)\nU = T", "V if T is U else X", "U = T.clone()"),
    "two tensors": ("T = torch.ones(3)\nU = T.clone()", "V if T is U else X", "U = T"),
    "two numbers": ("T = torch.tensor(2)\nU = T.clone()", "V if T is U else X", "U = T"),
    "one of several": (
        "T = torch.ones(3)\nL = [T, T]\nclass C: pass\nc = C()\nc.t = T",
        "V if L[0] is L[1] is c.t else X",
        "c.t = T.clone()",
    ),
    "one tensor, not asked": ("T = torch.ones(3)\nU = T", "V if T is not None else X", "U = T.clone()"),
    "tensors of two functions": (
        "T = torch.ones(3)\nU = T\ndef f(): return U\ndef g(): return T is f()",
        "V if g() else X",
        "U = T + 1",
    ),
    "no_grad": ("def f():\n  with torch.no_grad(): return V", "f()", ""),
    "no_grad's decorator": ("N = V\n@torch.no_grad()\ndef f(): return N", "f()", "N = X"),
    "precision": (
        "",
        "V if torch.get_float32_matmul_precision() == 'highest' else X",
        "torch.set_float32_matmul_precision('high')",
    ),
    "two objects": ("class C: pass\na=C()\nd=C()", "V if a is d else X", "d=a"),
    "one object": ("class C: pass\na=C()\nd=a", "V if a is d else X", "d=C()"),
    "two lists": ("a=[1]\nd=[1]", "V if a is d else X", "d=a"),
    "one list": ("a=[1]\nd=a", "V if a is d else X", "d=[1]"),
    "one dict": ("a={1:1}\nd=a", "V if a is d else X", "d={1:1}"),
    "one tuple": ("a=(1,[2])\nd=a", "V if a is d else X", "d=(1,[2])"),
    "one set": ("a={1}\nd=a", "V if a is d else X", "d={1}"),
    "two deques": ("a=collections.deque([1])\nd=collections.deque([1])", "V if a is d else X", "d=a"),
    "two functions": ("def mk():\n  def f(): pass\n  return f\na=mk()\nd=mk()", "V if a is d else X", "d=a"),
    "one function": ("def mk():\n  def f(): pass\n  return f\na=mk()\nd=a", "V if a is d else X", "d=mk()"),
    "equal functions": ("def mk():\n  def f(): pass\n  return f\na=mk()\nd=mk()", "V if a == d else X", "d=a"),
    "in list of functions": (
        "def mk():\n  def f(): pass\n  return f\na=mk()\nd=mk()\nD=[d]",
        "V if a in D else X",
        "a=d",
    ),
    "equal methods": ("class C:\n  def f(s): pass\na=C()\nd=C()", "V if a.f == d.f else X", "d=a"),
    "objects equal by identity": ("class C: pass\na=C()\nd=C()", "V if a == d else X", "d=a"),
    "in list of objects": ("class C: pass\na=C()\nL=[C()]", "V if a in L else X", "a=L[0]"),
    "in dict of objects": ("class C: pass\na=C()\nL={a:1}", "V if a in L else X", "a=C()"),
    "in dict of objects, later": ("class C: pass\na=C()\nd=C()\nL={d:1}", "V if a in L else X", "a=d"),
    "dict's get of an object": ("class C: pass\na=C()\nd=C()\nL={d:X}", "L.get(a,V)", "a=d"),
    "list's count of objects": ("class C: pass\na=C()\nd=C()\nL=[d]", "L.count(a)+V", "a=d"),
    "equal lists of objects": ("class C: pass\na=C()\nd=C()\nL=[a]\nM=[d]", "V if L==M else X", "M[0]=a"),
    "object as key": ("class K: pass\nk_=K()\nj=K()\nD={k_:V,j:X}", "D[k_]", "k_=j"),
    "tuple with an object as key": ("class K: pass\na=K()\nd=K()\nD={(a,1):V,(d,1):X}", "D[a,1]", "a=d"),
    "function as key": ("def a(): pass\nD={a:V}", "D[a]", "D[a]=X"),
    "attribute of a key": ("class K:\n  n=V\nk_=K()\nD={k_:1}", "sum(x.n for x in D)", "k_.n=X"),
    "function among keys": ("N=V\ndef a(): return N\nD={a:1}", "sum(x() for x in D)", "N=X"),
    "lru_cache of an object": (
        "class C:\n  def __init__(s,n): s.n=n\nc=C(V)\n@functools.cache\ndef f(c): return c.n",
        "f(c)",
        "c=C(X)",
    ),
    "dict's own kind, object as key": (
        "class D_(dict): pass\nclass C: pass\na=C()\nd=C()\nD=D_({a:V,d:X})",
        "D[a]",
        "a=d",
    ),
    "number as key": ("D={1:V,2:X}\nn=1", "D[n]", "n=2"),
    "number in set": ("S={1,2}\nn=1", "V if n in S else X", "n=3"),
    "set made of numbers": ("L=[V,V]", "sum({x for x in L})", "L.append(X)"),
    "shape as key": ("t=torch.ones(4)\nD={(4,):V,(9,):X}", "D[tuple(t.shape)]", "t=torch.ones(9)"),
    "list that holds itself": ("L=[V]\nL.append(L)", "L[0]", "L[0]=X"),
    "own format": (
        "class C:\n  n=1\n  def __format__(s,f): return str(s.n)\nc=C()",
        "V if f'{c}'=='1' else X",
        "c.n=2",
    ),
    "own negation": ("class C:\n  n=V\n  def __neg__(s): return -s.n\nc=C()", "-(-c)", "c.n=X"),
    "own inversion": ("class C:\n  n=V\n  def __invert__(s): return s.n\nc=C()", "~c", "c.n=X"),
    "own int": ("class C:\n  n=V\n  def __int__(s): return s.n\nc=C()", "int(c)", "c.n=X"),
    "own index": ("class C:\n  n=1\n  def __index__(s): return s.n\nc=C()\nL=[0,V,X]", "L[c]", "c.n=2"),
    "array of numpy as number": ("import numpy as np\na=np.array(V)", "float(a)", "a[...]=X"),
    "own context": (
        "class C:\n  n=V\n  def __enter__(s): return s.n\n"
        "  def __exit__(s,*a): return None\nc=C()\ndef f():\n  with c as n: return n",
        "f()",
        "c.n=X",
    ),
    "int's own kind": ("class I(int):\n  def __add__(s,o): return N\nN=V\nn=I(1)", "n+1", "N=X"),
    "attribute of a str's own kind": ("class S(str): pass\nt=S('a')\nt.n=V", "t.n", "t.n=X"),
    "method of a str's own kind": ("N=V\nclass S(str):\n  def f(s): return N\ns_=S('a')", "s_.f()", "N=X"),
    "own __instancecheck__": (
        "N=True\nclass M(type):\n  def __instancecheck__(c,x): return N\nclass C(metaclass=M): pass\nc=1",
        "V if isinstance(c,C) else X",
        "N=False",
    ),
    "own __subclasshook__": (
        "import abc\nN=True\nclass C(abc.ABC):\n  @classmethod\n  def __subclasshook__(c,x): return N\nclass D: pass",
        "V if issubclass(D,C) else X",
        "N=False\nclass D: pass",
    ),
    "call of a metaclass": (
        "class M(type):\n  def __call__(c): return N\nclass C(metaclass=M): pass\nN=V",
        "C()",
        "N=X",
    ),
    "list's own kind matched": (
        "class L_(list): pass\nL=L_([1,V])\ndef f():\n  match L:\n    case [1,x]: return x\n    case _: return X",
        "f()",
        "L[0]=2",
    ),
    "dict's own kind matched": (
        "D=collections.OrderedDict(n=V)\ndef f():\n  match D:\n    case {'m':x}: return x\n    case {'n':x}: return x",
        "f()",
        "D['m']=X",
    ),
    "class matched": (
        "@dataclasses.dataclass\nclass C: n:int\nc=C(1)\ndef f():\n"
        "  match c:\n    case C(n=1): return V\n    case C(): return X",
        "f()",
        "c.n=2",
    ),
    "int matched": ("n=1\ndef f():\n  match n:\n    case int(): return V\n    case float(): return X", "f()", "n=1.5"),
    "named tuple matched": (
        "class P(typing.NamedTuple):\n  n:int\n  m:int\np=P(V,1)\ndef f():\n"
        "  match p:\n    case (a,1): return a\n    case (a,_): return X",
        "f()",
        "p=P(5,2)",
    ),
    "exception of one's own": (
        "class E(Exception): pass\nn=1\ndef f():\n  try:\n"
        "    if n>1: raise E(n)\n  except E as e: return X\n  return V",
        "f()",
        "n=2",
    ),
    "exception with an attribute": (
        "class E(Exception):\n  n=V\ndef f():\n  try: raise E()\n  except E as e: return e.n",
        "f()",
        "E.n=X",
    ),
    "tensor's text": ("t=torch.tensor(1)", "V if f'{t}'=='1' else X", "t.fill_(2)"),
    "tensor as key": ("t=torch.ones(2)\nD={t:X}", "D.get(t,V)", ""),
    "tensor that is no key": ("t=torch.ones(2)\nD={1:X}", "D[t]", ""),
    "hook of all modules": (
        "class M(torch.nn.Module):\n  def forward(s,x): return x*0+V\nm=M()",
        "m(q)",
        "H=torch.nn.modules.module.register_module_forward_hook(lambda m,i,o: o+1)\nGUARDS.later(H.remove)",
    ),
    "torch's own attribute": ("torch.my_n=V", "torch.my_n", "torch.my_n=X"),
    "function put into torch": ("torch.my_f=lambda: V", "torch.my_f()", "torch.my_f=lambda: X"),
    "list put into torch": ("torch.my_l=[V]", "torch.my_l[0]", "torch.my_l[0]=X"),
    "math's own attribute": ("import math\nmath.my_n=V", "math.my_n", "math.my_n=X"),
    "function put into math": ("import math\nmath.my_f=lambda: V", "math.my_f()", "math.my_f=lambda: X"),
    "built-in put there": ("import builtins\nbuiltins.my_n=V", "my_n", "import builtins\nbuiltins.my_n=X"),
    "built-in that comes": (
        "import builtins\nbuiltins.__dict__.pop('my_m',None)\n"
        "def f():\n  try: return my_m\n  except NameError: return V",
        "f()",
        "import builtins\nbuiltins.my_m=X",
    ),
    "enum's own text": (
        "N='a'\nclass E(enum.Enum):\n  A='z'\n  def __str__(s): return N\ne=E.A",
        "V if str(e)=='a' else X",
        "N='b'",
    ),
    "enum's own equality": (
        "N=True\nclass E(enum.Enum):\n  A='z'\n  def __eq__(s,o): return N\n  __hash__=enum.Enum.__hash__\ne=E.A",
        "V if e=='q' else X",
        "N=False",
    ),
    "enum's own call": ("N=V\nclass E(enum.Enum):\n  A=1\n  def __call__(s): return N\ne=E.A", "e()", "N=X"),
    "own text of an enum of texts": (
        "N='a'\nclass E(enum.StrEnum):\n  A='z'\n  def __str__(s): return N\ne=E.A",
        "V if str(e)=='a' else X",
        "N='b'",
    ),
    "method of an enum of ints": ("N=V\nclass E(enum.IntEnum):\n  A=1\n  def f(s): return N\ne=E.A", "e.f()", "N=X"),
    "attribute of an enum's class": ("class E(enum.Enum):\n  A=1\nE.K=V", "E.A.K", "E.K=X"),
    "own length hint": (
        "class C:\n  n=V\n  def __length_hint__(s): return s.n\nc=C()\nimport operator",
        "operator.length_hint(c)",
        "c.n=X",
    ),
}


class Guards:
    def __init__(self) -> None:
        self.entered: list[Any] = []

    def enter(self, guard: Any) -> None:
        guard.__enter__()
        self.entered.append(guard)

    def later(self, undo: Callable[[], Any]) -> None:
        self.entered.append(contextlib.ExitStack())
        self.entered[-1].callback(undo)


@pytest.fixture
def guards() -> Any:
    before = torch.get_num_threads(), torch.get_autocast_dtype("cpu"), torch.backends.cuda.matmul.allow_tf32
    found = Guards()
    yield found
    for guard in reversed(found.entered):
        guard.__exit__(None, None, None)
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)
    torch.set_grad_enabled(True)
    torch.use_deterministic_algorithms(False)
    torch.set_float32_matmul_precision("highest")
    torch.set_num_threads(before[0])
    torch.set_autocast_dtype("cpu", before[1])
    torch.backends.cuda.matmul.allow_tf32 = before[2]
    for name in ("tk_m", "a_users_module"):
        sys.modules.pop(name, None)
    for module in (torch, math, builtins):
        for name in [n for n in vars(module) if n.startswith("my_")]:
            delattr(module, name)


def scope_of(way: str, guards: Guards) -> dict[str, Any]:
    """What the way sets up, with two mods: the first is a global's, the other an object's."""
    setup, read, _ = WAYS[way]
    sys.modules["a_users_module"] = module = types.ModuleType("a_users_module")
    scope = module.__dict__
    scope.update(AROUND, V=4, X=9, GUARDS=guards)
    exec(compile(setup, "users.py", "exec"), scope)
    mods = f"""
    def mask(b, h, q, k):
        return q - k < ({read})
    def score(s, b, h, q, k):
        return s * ({read})
    """
    exec(compile(textwrap.dedent(mods), "users.py", "exec"), scope)
    return scope


def graphs_value(mod: Callable[..., Any], kind: str, arguments: list[torch.Tensor]) -> Any:
    pair = trace.pair(mod, None) if kind == "score" else trace.pair(None, mod)
    graph = pair.score if kind == "score" else pair.mask
    return graph, pair.values


@pytest.mark.parametrize("kind", ["mask", "score"])
@pytest.mark.parametrize("way", WAYS)
def test_a_change_is_seen_or_refused(way: str, kind: str, guards: Guards) -> None:
    b, h, q, k = indices((0, 1), (0, 1), (0, 12), (0, 12), "cpu")
    arguments = [b, h, q, k] if kind == "mask" else [torch.ones(2, 2, 12, 12), b, h, q, k]
    scope = scope_of(way, guards)
    try:
        for change in ("", WAYS[way][2]):
            exec(change, scope)
            graph, values = graphs_value(scope[kind], kind, arguments)
            found = evaluate(graph, arguments, values)
            expected = scope[kind](*arguments)
            is_right = bool((found == expected).all())
            assert is_right, (way, change)
    except (tk.UnsupportedError, tk.Error) as error:
        assert way in REFUSED, error
        assert REFUSED[way] in str(error), error
    else:
        assert way not in REFUSED


REFUSED = {
    "property that counts": "must not write n of c", "list written": "writes to L", "dict written": "writes to D",
    "set written": "writes to S", "closure written": "writes to n", "global written": "writes to globals of f",
    "dir": "asks which attributes c has", "globals": "calls globals()", "eval": "calls eval()",
    "iterator": "takes the next of I", "counter": "takes the next of I", "generator": "takes the next of I",
    "random": "uses random", "random's own": "asks for r.random", "time": "calls time.time",
    "query's requires_grad": "asks for requires_grad", "no_grad": "calls torch.no_grad",
    "no_grad's decorator": "calls f, decorated", "device of an index": "decides by the device of a tensor",
    "list that holds itself": "a list that holds itself", "int's own kind": "a kind of int with",
    "attribute of a str's own kind": "a kind of str with", "method of a str's own kind": "a kind of str with",
    "own __instancecheck__": "a __instancecheck__ of its own", "class matched": "write isinstance",
    "int matched": "write isinstance", "exception with an attribute": "catches an exception whose class",
    "tensor's text": "makes a text of a tensor", "tensor as key": "a dict with a tensor for a key",
    "tensor that is no key": "looks up a tensor", "hook of all modules": "a module with hooks",
    "method of an enum of ints": "asks for f, which e has of its class",
    "devices that are one": "decides by the device of a tensor",
}  # fmt: skip
