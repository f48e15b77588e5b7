"""Adapters: the functions of other libraries, by their names and contracts, over the ops of this package.

One module per library, :mod:`.vllm` and :mod:`.flashinfer`; ``docs/compat.md`` says in tables how each
contract maps to the ops. Adapters are plain torch code around the public ops: they run where those run,
and where a contract cannot be served they raise an error of :mod:`..errors`.
"""
