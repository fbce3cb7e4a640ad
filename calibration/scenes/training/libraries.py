"""transformers, which the models are classes of. Training and the tests need it; vitdeploy does not."""

from __future__ import annotations

import contextlib

# It declares two of torchvision's operators, without which a CUDA wheel of torchvision stops transformers' import.
from tests.references import reference

transformers = reference("transformers")
# Messages about missing optional packages and bars of progress say nothing here.
transformers.logging.set_verbosity_error()
with contextlib.suppress(AttributeError):
    transformers.logging.disable_progress_bar()
