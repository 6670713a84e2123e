"""The words that say what a dense method does, what it needs to know, and which weights it may change."""

from typing import Literal

Kind = Literal["prune", "quantise", "joint"]
Needs = Literal["nothing", "norms", "hessian"]  # what a method must know about a layer's inputs
ROLES = ("attention", "dense_mlp", "shared_expert", "routed_expert")
