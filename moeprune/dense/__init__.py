"""Compress what expert pruning leaves: attention, dense MLPs, shared experts and, when asked, routed experts.

`options.py` lists the methods; each is its own config section. Kernels are pure: a weight (out, in) in float32 and the
statistics of its inputs go in, a `DenseResult` comes out. `walk.py` runs them over a model, `export.py` writes them.
"""
