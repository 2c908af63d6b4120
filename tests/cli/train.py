"""A plain PyTorch loop around a Session, as anybody would write it; then two ways to die.

``train.py FOLDER``: with FOLDER/suicide, the first attempt kills itself in step 5 once step 3 is
committed; at step 7 it waits until FOLDER/go exists. The digest of its last state goes to FOLDER/digest.
"""

import os
import signal
import sys
import time
from pathlib import Path

import torch
import xxhash

import ftckpt

folder = Path(sys.argv[1])
run = Path(os.environ["FTCKPT_RUN"])
torch.manual_seed(0)
torch.use_deterministic_algorithms(True)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
optim = torch.optim.AdamW(model.parameters(), lr=1e-2)
with ftckpt.Session(run, {"model": model, "optim": optim}, save_every=3) as ckpt:
    for step in ckpt.steps(until=10):
        optim.zero_grad()
        model(torch.rand(16, 8)).square().mean().backward()
        optim.step()
        print("step", step, flush=True)
        if step == 5 and ckpt.attempt == 1 and (folder / "suicide").exists():
            while not (run / "commits/000000000003-000001").exists():
                time.sleep(0.02)
            os.kill(os.getpid(), signal.SIGKILL)
        while step == 7 and not (folder / "go").exists():
            time.sleep(0.02)

digest = xxhash.xxh3_128()
for tensor in [
    *model.parameters(),
    *(t for s in optim.state.values() for t in s.values()),
    torch.get_rng_state(),
]:
    digest.update(tensor.detach().numpy().tobytes())
(folder / "digest").write_text(digest.hexdigest())
