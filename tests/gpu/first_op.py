"""Seconds until the first fused op of a process whose caches are empty:

    torchrun --nproc-per-node 2 tests/gpu/first_op.py

What torch itself takes (its import, the group and its first collective) is shown apart. The
slowest rank of each.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time

START = time.perf_counter()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

TOKENS, HIDDEN_SIZE = 8, 4096


def main() -> None:
    """Time each part on this rank, and print the slowest rank's."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
        seconds = {"import torch": time.perf_counter() - START}
        start = time.perf_counter()

        def lap(name: str) -> None:
            nonlocal start
            torch.cuda.synchronize()
            seconds[name] = time.perf_counter() - start
            start = time.perf_counter()

        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device)
        x, residual = torch.randn(2, TOKENS, HIDDEN_SIZE, device=device).bfloat16()
        dist.all_reduce(x.clone())
        lap("group and its first collective")
        import fx_fusion
        from fx_fusion.lowering.ops import all_reduce_add_rms_norm
        from fx_fusion.lowering.select import digest_of
        from fx_fusion.settings import FusionSettings

        lap("import fx_fusion and its op")
        group = dist.group.WORLD
        assert group is not None
        all_reduce_add_rms_norm(
            x,
            residual,
            torch.ones_like(x[0]),
            None,
            1e-6,
            str(group.group_name),
            dist.get_world_size(),
            want_residual=True,
            plan=digest_of(FusionSettings(kernel="fx_fusion")),
        )
        lap("first op: memory shared, kernel compiled, run")
        until_first = len(seconds)
        fx_fusion.prepare(max_tokens=TOKENS, hidden_size=HIDDEN_SIZE, kernel="fx_fusion")
        lap("prepare: every kernel of up to 8 tokens")
        times = torch.tensor(list(seconds.values()))
        dist.all_reduce(times, dist.ReduceOp.MAX)
        if dist.get_rank() == 0:
            for name, value in zip(seconds, times.tolist(), strict=True):
                sys.stdout.write(f"{value:6.2f} s  {name}\n")
            sys.stdout.write(
                f"{float(times[2:until_first].sum()):6.2f} s  from import to first op\n"
            )
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
