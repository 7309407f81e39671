"""FlashInfer: it makes the names of its operations from dtypes and head sizes, so its whole library is registered.

Versions that leave the registration out (for its dispatch cost) show Dynamo no operation. Their wrappers are planned on
the host and run on the device: write a break op that calls ``wrapper.run`` and plan in its ``prepare`` (the page on
break ops has it as an example with a paged cache).
"""

from __future__ import annotations

from torch_graph_backend.integrations import register

OPERATIONS = ("flashinfer::*",)

register(OPERATIONS)
