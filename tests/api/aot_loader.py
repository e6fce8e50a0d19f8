"""A process that runs a package made by AOTInductor; it imports fx_fusion.ops and no more.

    python aot_loader.py RANK WORLD_SIZE FOLDER DEVICE

FOLDER holds model.pt2 and calls.pt, which has the arguments of each call by rank. What happened
is saved there as RANK.pt.
"""

from __future__ import annotations

import datetime
import sys
from pathlib import Path

import torch
import torch.distributed as dist


def main(rank: int, world_size: int, folder: Path, device: str) -> None:
    if device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    gpus = torch.cuda.device_count() if device == "cuda" else 0
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if gpus >= world_size else "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world_size,
        timeout=datetime.timedelta(seconds=60),
    )
    path = str(folder / "model.pt2")
    index = rank % gpus if gpus else -1
    try:
        torch._inductor.aoti_load_package(path, device_index=index)
        refused = ""
    except RuntimeError as error:
        refused = str(error)
    assert not any(name.startswith("fx_fusion") for name in sys.modules)

    import fx_fusion.ops  # noqa: F401

    model = torch._inductor.aoti_load_package(path, device_index=index)
    results = []
    for arguments in torch.load(folder / "calls.pt")[rank]:
        outputs = model(*(argument.to(device) for argument in arguments))
        results.append([output.cpu() for output in outputs])
    found = {"refused": refused, "metadata": model.get_metadata(), "results": results}
    torch.save(found, folder / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4])
