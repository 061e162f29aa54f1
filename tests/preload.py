"""Imported once, by the process that ranks of tests fork from: what each of them would import itself."""

import gc
import sys
from importlib import import_module
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
for name in (
    "conftest",  # with train, torch and pytest
    "torch._dynamo",  # for the optimizer
    "transformers.models.auto.tokenization_auto",
    "transformers.models.auto.modeling_auto",
):
    import_module(name)
gc.collect()
gc.freeze()  # else each rank looks at a million objects, and so copies their pages
