"""Functions that several processes run together: `from processes import SHARDED, together`."""

import datetime
import multiprocessing
import os

import pytest
import torch
import torch.distributed as dist

SECONDS = 60  # for all that processes do together; quiet machines need five
SHARDED = pytest.mark.skipif(torch.__version__ < (2, 9), reason="needs PyTorch 2.9")


def rank_of(folder, rank, ranks, function, arguments):
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
    os.environ |= {"LOCAL_WORLD_SIZE": str(ranks), "TQDM_DISABLE": "1"}
    wait = datetime.timedelta(seconds=SECONDS)
    dist.init_process_group("gloo", f"file://{folder}/group", wait, ranks, rank)
    function(*arguments)
    dist.destroy_process_group()


def together(ranks, folder, function, *arguments):
    """Run a function on so many processes; their exit codes, of which 0 is good."""
    context = multiprocessing.get_context("forkserver")  # they share what takes long to import
    context.set_forkserver_preload(["attnlib.gpt", "attnlib.train", "torch._dynamo"])
    (folder / "group").unlink(missing_ok=True)
    arguments = [(folder, rank, ranks, function, arguments) for rank in range(ranks)]
    processes = [context.Process(target=rank_of, args=each) for each in arguments]
    for process in processes:
        process.start()
    for process in processes:
        process.join(SECONDS)
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
        process.join()
    return codes
