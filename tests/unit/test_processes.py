"""Mixed batches in two processes give what one process gives on the rows of both."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.multiprocessing.spawn import spawn

from process_work import LABELS, PROCESSES, new_model, rows, train, work

pytestmark = pytest.mark.skipif(
    not torch.distributed.is_available() or not torch.distributed.is_gloo_available(), reason="needs gloo"
)


@pytest.mark.parametrize(("way", "kind"), [("ddp", "sgd"), ("fsdp", "adamw")])
def test_two_processes_agree_with_one(way: str, kind: str, tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    spawn(work, (port, way, kind, str(tmp_path)), nprocs=PROCESSES)
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(PROCESSES)]
    assert found[0] == found[1]
    both = [rows(rank) for rank in range(PROCESSES)]
    steps = [torch.cat(parts) for parts in zip(*(steps for steps, _ in both), strict=True)]
    validation = torch.cat([own for _, own in both])
    alone = train(new_model(), kind, steps, validation, LABELS.repeat(PROCESSES))
    np.testing.assert_allclose(list(found[0].values()), list(alone.values()), rtol=1e-7)
