"""The drop-in: ``tk.use(model)`` lets a model run through tk's ops. docs/use.md says what it replaces and how.

| | |
|---|---|
| ``replace.py`` | walks over a model and decides, module by module |
| ``redirect.py`` | copies of a module's functions that call tk where they called torch |
| ``bytecode.py`` | what a function's code reads of its globals, and the code with other names |
| ``replacement.py`` | the record of a function: what torch has, what is taken, what tk calls, where it is not slower |
| ``functions/`` | the records, a file per family: the one place where a function is added |
| ``target.py`` | where the model is, and which tensors are taken there |
| ``speed.py`` | rules of where tk is not slower, as measured |
| ``recognise.py`` | modules and functions of a model's own that compute what an op of tk does |
| ``graph.py`` | what a function computes, to be compared |
| ``report.py`` | what was done |

Beside it, ``beneath.py``: ``tk.enable``, which serves ATen's own ops in the whole process. ``flash.py``: the same of
flash attention, through torch's registry.
"""

from tk.dropin.beneath import Enabled, enable
from tk.dropin.replace import use
from tk.dropin.report import Record, Report

__all__ = ["Enabled", "Record", "Report", "enable", "use"]
