from __future__ import annotations

import os

# Child processes of tests find no model hub here; fail fast instead of retrying.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch

# Without a GPU Triton's kernels run in its interpreter, which must be chosen before they are defined.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Tiny models: a second thread costs more than it brings, above all when several test runs share the cores.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def fresh_dynamo() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
