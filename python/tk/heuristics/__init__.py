"""Which config runs: a pure function of a described problem.

There is one engine, in the core (``tk.capi.choose``). An op that is given no config asks it by itself and remembers the
answer per problem, so the wrappers do not ask again; they look up what is laid over it: the user's pins
(``tk.config.override``) and the machine's own tuning (``tk tune``).
"""
