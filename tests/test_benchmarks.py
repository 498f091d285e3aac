"""All of `make gpu` and `make bench` runs at a tiny size, and records what it says it does."""

import concurrent.futures
import contextlib
import json
import os
import re
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import gpu, runner, runs, timing, vision

ROOT = Path(__file__).parent.parent
GPU = [sys.executable, "-m", "benchmarks.gpu"]
SLOW = pytest.mark.slow  # of each kind one goes with `make test`, and the others weekly
LONG_RUNS = ("translator", "lengths", "detr", "supernet", "captions", "gpt")


@pytest.fixture(scope="module")
def record(tmp_path_factory):
    """A function that runs a part of `make gpu`, tiny and on a CPU, and returns the record."""
    folder = tmp_path_factory.mktemp("records")

    def run(part, name):
        command = [*GPU, "--tiny", "--device", "cpu", "--out", folder]
        environment = dict(os.environ, OMP_NUM_THREADS="1", TQDM_DISABLE="1")
        done = subprocess.run(
            [*command, "--part", part],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        assert f"== {part}: done" in done.stdout
        found = json.loads((folder / f"{name}.json").read_text()) if name else {}
        assert not name or {"device", "torch", "date", "commit", "threads"} <= set(found)
        return found

    return run


def command_line(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--tiny", "--device", "cpu", *arguments])


def test_turns_are_taken_in_a_new_order_each_round():
    order = []
    calls = {name: lambda name=name: order.append(name) for name in "abc"}
    times = timing.take_turns(calls, 20, "cpu")
    rounds = [tuple(order[i : i + 3]) for i in range(0, 60, 3)]
    assert all(sorted(names) == ["a", "b", "c"] for names in rounds) and len(set(rounds)) > 3
    assert [len(times[name]) for name in "abc"] == [20, 20, 20]
    order.clear()
    timing.take_turns(calls, 20, "cpu")
    assert [tuple(order[i : i + 3]) for i in range(0, 60, 3)] == rounds  # seeded


def test_ratios_are_medians_over_rounds():
    """A slow round slows all who take part in it, so each round has a ratio of its own."""
    times = {
        "attnlib": [1, 20, 1, 1],
        "timm": [2, 40, 2, 2],
        "attnlib, optimized": [1, 10, 0.5, 1],
    }
    row = timing.compared(times, "timm")
    assert row["ratio"] == 0.5 and row["quartiles"] == [0.5, 0.5] and row["rounds"] == 4
    assert row["optimized"] == {"ratio": 0.375, "quartiles": [0.25, 0.5], "rounds": 4}
    assert row["ms"] == 2 and "optimized" not in timing.compared({"attnlib": [1]}, "attnlib")


def test_rows_have_medians_quartiles_and_rounds():
    calls = {name: lambda: sum(range(1000)) for name in ("attnlib", "timm")}
    rows = timing.measured(calls, 5, "cpu")
    for row in rows.values():
        low, high = row["ms_quartiles"]
        assert low <= row["ms"] <= high and row["rounds"] == 5 and "kernel" not in row
    assert rows["attnlib"]["ratio"] == 1


class Event:
    """A CUDA event by the clock of the test."""

    def __init__(self, now):
        self.now = now

    def record(self):
        self.at = self.now[0]

    def synchronize(self):
        pass

    def elapsed_time(self, end):
        return end.at - self.at


class Graph:
    """A CUDA graph: what is called while it is captured, it replays without the overhead."""

    def __init__(self, now):
        self.now, self.cost = now, 0

    def replay(self):
        self.now[0] += self.cost


def test_kernel_times_leave_overheads_out(monkeypatch):
    """With a clock of its own: a call costs 2 ms on the GPU, and 10 more where it is launched.

    One of the contestants cannot be captured, and another is twice as slow.
    """
    now, capturing = [0.0], []

    @contextlib.contextmanager
    def capture(graph, stream):
        capturing.append(graph)
        try:
            yield
        finally:
            capturing.pop()

    def call(cost, can=True):
        def run():
            if capturing:
                if not can:
                    raise RuntimeError("operation not permitted when stream is capturing")
                capturing[0].cost += cost
            else:
                now[0] += cost + 10

        return run

    renewed = []
    monkeypatch.setattr(timing, "new_random_state", lambda: renewed.append(True))
    for name, fake in {
        "Event": lambda enable_timing: Event(now),
        "CUDAGraph": lambda: Graph(now),
        "graph": capture,
        "current_stream": lambda: None,
        "synchronize": lambda: None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    calls = {"attnlib": call(2), "slow": call(4), "other": call(2, can=False)}
    rows = timing.measured(calls, 3, "cuda")
    assert "kernel" not in rows["other"] and renewed == [True]
    kernel = {name: rows[name]["kernel"] for name in ("attnlib", "slow")}
    assert [row["ms"] for row in kernel.values()] == [2, 4]
    assert kernel["slow"]["ratio"] == 0.5 and kernel["slow"]["rounds"] == 3
    assert kernel["attnlib"]["graph"] and rows["slow"]["ms"] > 0
    few = timing.measured(calls, 3, "cuda", graphs=("attnlib", "slow"))
    assert {name for name in few if "kernel" in few[name]} == {"attnlib", "slow"}
    none = timing.measured(calls, 3, "cuda", graphs=())
    assert [row["kernel"]["ms"] for row in none.values()] == [12, 14, 12]
    assert not any(row["kernel"]["graph"] for row in none.values())
    monkeypatch.setattr(timing, "LONG", 0.0)
    assert not timing.measured(calls, 3, "cuda")["slow"]["kernel"]["graph"]


def test_rows_are_kept_until_the_code_changes(tmp_path, monkeypatch, capsys):
    path, made = tmp_path / "rows_cpu.json", []

    def bench(minutes):
        rows = runner.Rows(path, "cpu", minutes, more=1)

        def go():
            for size in (1, 2):
                found = rows.once(
                    {"size": size}, lambda left_out, size=size: made.append(size) or [{}]
                )
                assert found == [{"size": size}]

        rows.work(go)

    with pytest.raises(SystemExit) as end:
        bench(0)
    assert end.value.code == runner.UNFINISHED and not made
    bench(1)
    bench(0)  # all is there
    record = json.loads(path.read_text())
    assert made == [1, 2] and record["rows"] == [{"size": 1}, {"size": 2}]
    assert record["more"] == 1 and record["code"] == runner.version("attnlib", "benchmarks")
    monkeypatch.setattr(runner, "version", lambda *folders: "other code")
    bench(1)
    assert made == [1, 2, 1, 2]
    assert "0 rows so far" in capsys.readouterr().out


@pytest.mark.parametrize(
    "part", ["checks", pytest.param("kernels", marks=pytest.mark.slow), "sanitize"]
)
def test_checks(record, part):
    record(part, None)


def test_all_files_with_tests_for_cuda_are_checked():
    """A machine with a GPU may lack what other files import, so those that count are named."""
    needles = "torch.cuda.is_available()", 'importorskip("triton")'
    found = {
        f"tests/{path.name}"
        for path in (ROOT / "tests").glob("test_*.py")
        if any(needle in path.read_text(encoding="utf-8") for needle in needles)
    }
    # compiled or interpreted on a CPU
    elsewhere = "benchmarks", "gpu_rehearsal", "kernels", "kernel_memory"
    elsewhere += "arguments", "dtypes", "errors", "shapes"
    found -= {f"tests/test_{name}.py" for name in elsewhere}
    assert found == set(gpu.CHECKS + gpu.KERNELS)


def test_without_a_gpu_nothing_is_begun(tmp_path):
    command = [*GPU, "--part", "attention", "--out", tmp_path]
    environment = dict(os.environ, CUDA_VISIBLE_DEVICES="")
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    assert (
        done.returncode == 2
        and "finds no CUDA device" in done.stderr
        and not any(tmp_path.iterdir())
    )


def test_a_machine_without_jupyter_can_start():
    missing = "IPython fastcore hypothesis jupyter_book nbclient nbdev nbformat"
    missing += " playwright sphinx"
    code = f"""
import sys
sys.modules.update(dict.fromkeys({missing.split()}))
import pytest
import benchmarks.gpu
files = benchmarks.gpu.CHECKS + benchmarks.gpu.KERNELS
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "--collect-only", *files]))
"""
    command = [sys.executable, "-c", code]
    environment = dict(os.environ, PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


def test_parts_without_their_packages_are_left_out(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(gpu, "find_spec", lambda name: None)
    monkeypatch.setattr(
        sys,
        "argv",
        [
            "gpu.py",
            "--part",
            "run_lengths",
            "run_digits",
            "--tiny",
            "--device",
            "cpu",
            "--out",
            str(tmp_path),
        ],
    )
    with pytest.raises(SystemExit) as end:
        gpu.main()
    said = capsys.readouterr().out
    assert (
        end.value.code == 0
        and "run_lengths: left out (since accelerate, safetensors, tqdm, num2words, " in said
    )
    parts = json.loads((tmp_path / "gpu_tiny_cpu.json").read_text())["parts"]
    assert parts["run_digits"]["how"] == "left out" and "sklearn" in parts["run_digits"]["why"]


def test_a_part_out_of_time_has_failed(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(gpu, "LIMIT", 0.1)
    monkeypatch.setattr(
        sys,
        "argv",
        ["gpu.py", "--part", "attention", "--tiny", "--device", "cpu", "--out", str(tmp_path)],
    )
    with pytest.raises(SystemExit, match="not done: attention"):
        gpu.main()
    assert "attention: out of time" in capsys.readouterr().out
    parts = json.loads((tmp_path / "gpu_tiny_cpu.json").read_text())["parts"]
    assert parts["attention"]["how"] == "out of time"


def test_a_part_that_can_go_on_is_no_finished_part(monkeypatch, tmp_path, capsys):
    """It gets a minute less than it has; a part for which no time is left is not begun."""
    given = []

    def call(command, seconds):
        given.append(float(command[command.index("--minutes") + 1]))
        return runner.UNFINISHED, "3 rows so far"

    monkeypatch.setattr(gpu, "call", call)
    command_line(monkeypatch, "--part", "windows", "--out", str(tmp_path))
    with pytest.raises(SystemExit, match="not done: windows"):
        gpu.main()
    assert "== windows: unfinished (3 rows so far)" in capsys.readouterr().out
    assert 6.9 < given[0] <= 7
    parts = json.loads((tmp_path / "gpu_tiny_cpu.json").read_text())["parts"]
    assert parts["windows"]["how"] == "unfinished"
    command_line(monkeypatch, "--part", "windows", "--out", str(tmp_path), "--minutes", "0")
    with pytest.raises(SystemExit, match="not done: windows"):
        gpu.main()
    assert "no time left" in capsys.readouterr().out and len(given) == 1


def test_children_of_a_part_end_with_it(tmp_path):
    """What a part has started does not hold the GPU when its time is up."""
    child = f"import pathlib, time; time.sleep(3); pathlib.Path(r'{tmp_path}/late').touch()"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    assert gpu.call([sys.executable, "-c", code], 1.5) == (None, "")
    time.sleep(3)
    assert not (tmp_path / "late").exists()
    said = "print('all is well'); print('or not', file=sys.stderr); sys.exit(3)"
    assert gpu.call([sys.executable, "-c", f"import sys; {said}"], 20) == (3, "or not")


def test_a_finished_part_is_not_run_again(tmp_path):
    done = {"attention": {"how": "done", "code": runner.version(*gpu.CODE)}}
    (tmp_path / "gpu_tiny_cpu.json").write_text(json.dumps({"parts": done}))
    command = [*GPU, "--tiny", "--device", "cpu", "--part", "attention"]
    done = subprocess.run(
        [*command, "--out", tmp_path], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert (
        "== attention: done with this code" in done.stdout
        and not (tmp_path / "attention_cpu.json").exists()
    )


def test_no_part_is_forgotten():
    """Each timing of a chapter and each run of the repository has a part."""
    timings = set()
    for path in (ROOT / "benchmarks").glob("*.py"):
        found = re.findall(r'commands\.timing\("(\w+)"', path.read_text(encoding="utf-8"))
        timings |= {(f"benchmarks.{path.stem}", command) for command in found}
    parts = set()
    for part in gpu.PARTS.values():
        parts |= {tuple(command[2:4]) for command in part("cpu", False)}
    elsewhere = {
        ("benchmarks.flash", "tune"),  # by hand, for another GPU
        ("benchmarks.gpt", "nanogpt"),  # needs a copy of nanoGPT
        ("benchmarks.windows", "overhead"),  # of CPUs
        ("benchmarks.inference", "speed"),
    }
    assert timings - parts == elsewhere and set(gpu.VISION) <= set(gpu.PARTS)
    assert set(gpu.RUNS + gpu.NETWORK) == set(runs.PARTS) and set(gpu.NEEDS) <= set(gpu.PARTS)
    assert set(gpu.PARTS) == set(gpu.MINUTES)
    assert {f"run_{name}" for name in runs.PARTS} <= set(gpu.PARTS)


def test_roof(record, monkeypatch):
    """Three numbers for each dtype, and the data sheet of a GPU that the book knows."""
    rows = record("roof", "roof_cpu")["rows"]
    assert [row["dtype"] for row in rows] == ["bfloat16", "float16", "float32"]
    for row in rows:
        assert row["flops"] > 0 and row["bytes"] > 0 and row["overhead_us"] > 0
        assert "of_sheet" not in row
    from benchmarks import cost

    names = {"NVIDIA H200": "H200", "NVIDIA A100-SXM4-80GB": "A100", "Tesla T4": "T4"}
    for name, known in (names | {"NVIDIA L4": None}).items():
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda name=name: name)
        assert cost.sheet("cuda") == (cost.GPUS[known] if known else None)


def test_attention(record):
    found = record("attention", "attention_cpu")
    assert len(found["rows"]) == 8
    for row in found["rows"]:
        assert row["reference"]["ratio"] == 1 and row["sdpa"]["ms"] > 0
        assert row["difference"] < (1e-5 if row["dtype"] == "float32" else 5e-2)


@pytest.mark.slow
def test_translation(record):
    for name in ("transformers", "x_transformers"):
        pytest.importorskip(name)
    found = record("translation", "translation_cpu")
    assert (
        "copy_gb_per_s" in found
        and len(found["training"]) == 36
        and len(found["decoding"]) == 18
    )
    for row in found["training"] + found["decoding"]:
        low, high = row["quartiles"]
        assert (
            row["ms"] > 0
            and low <= row["ratio"] <= high
            and (row["model"] != "attnlib" or row["ratio"] == 1)
        )
        assert row["memory"] > 0
    for row in found["training"]:
        compared = row["dropout"] == 0 and not row["model"].startswith("x-")
        assert (row["error"] is not None) == compared
        assert not compared or row["error"] < (1e-5 if row["mode"] == "float32" else 0.05)
    assert all(row["same_tokens"] == 1 for row in found["decoding"] if row["mode"] == "float32")


def test_flash(record):
    """Every kind, and every contestant that runs; a CPU has no FlexAttention backward."""
    pytest.importorskip("triton")
    found = record("flash", "flash_cpu")
    assert "triton" in found and len(found["rows"]) == 10
    for row in found["rows"]:
        assert row["backends"]["triton"]["ms"] > 0 and "reference" in row["backends"]
        assert ("flex" in row["backends"]) == (row["pass"] == "forward")
        assert all(other["error"] < row["allowed"] for other in row["backends"].values())
        low, high = row["backends"]["flex" if row["pass"] == "forward" else "math"]["quartiles"]
        assert low <= high and "device" in found


@pytest.mark.slow
def test_windows(record):
    pytest.importorskip("triton")
    found = record("windows", "windows_cpu")
    for row in found["rows"]:
        flex = {"flex, batch", "flex, sequence"} & {row["way"], *row["left_out"]}
        assert row["ms"] > 0 and row["difference"] < 1e-4 and row["rounds"] == 2
        assert (row["pass"] == "forward") != bool(row["left_out"]) and len(flex) < 3
    ways = {"timm", "PyTorch", "kernel"}
    for kind, some in (
        ("training", ways),
        ("forward", ways | {"flex, batch", "flex, sequence"}),
    ):
        assert {row["way"] for row in found["rows"] if row["pass"] == kind} == some


@pytest.mark.slow
def test_fused(record):
    """The whole Swin: fused blocks beside the kernel alone, PyTorch, timm and timm compiled."""
    pytest.importorskip("triton")
    found = record("fused", "fused_cpu")
    ways = {row["way"]: row for row in found["rows"]}
    assert set(ways) == {"fused", "kernel", "PyTorch", "timm", "timm, compiled"}
    for row in ways.values():
        low, high = row["quartiles"]
        assert row["ms"] > 0 and low <= row["ratio"] <= high and row["rounds"] == 2
        assert row["difference"] < 1e-3 and row["model"] == gpu.VISION["swin"]
    assert ways["timm"]["difference"] == 0 < ways["fused"]["difference"]


def test_what_is_timed_is_compiled_ahead(monkeypatch, capsys):
    """The cases of `compile` are those of the benchmarks, and it does them in its processes."""
    pytest.importorskip("triton")
    from benchmarks import compile, flash, windows

    (command,) = gpu.PARTS["compile"]("cpu", True)
    assert command[1:] == ["-m", "benchmarks.compile"]
    command_line(monkeypatch, "--workers", "1")
    compile.main()
    said = capsys.readouterr().out
    assert said.startswith("3 kernels in") and "Error" not in said
    some = compile.jobs("cuda", tiny=False)
    names = [job.function.__name__ for job in some["kernels"]]
    assert names.count("flash_call") == 2 * len(flash.SHAPES) * len(flash.KINDS) * 2
    assert names.count("windows_call") == len(windows.MODELS) * 4 * 2 * 2
    assert {job.arguments[1] for job in some["models"]} == set(gpu.VISION.values())
    assert windows.SWIN == gpu.VISION["swin"]
    batch = {job.arguments[-2] for job in some["models"]}
    assert batch == {128}  # the largest of vision.py on a GPU, which alone is compiled
    made = []
    monkeypatch.setattr(torch, "compile", lambda model: made.append(model) or model)
    options = dict(vision.TINY["vit"], num_classes=4)
    for kind in ("forward", "training"):
        compile.model_call("cpu", "vit_small_patch16_224", "timm", kind, 1, options)
    assert [model.training for model in made] == [False, True]


def test_what_compiles_at_once_fits_into_the_memory(monkeypatch):
    """Whatever is waiting; a job that needs more than there is runs alone."""
    pytest.importorskip("triton")
    from benchmarks import compile

    running, loads, lock = [], [], threading.Lock()

    def work(job, memory):
        with lock:
            running.append(job.memory)
            loads.append(list(running))
        time.sleep(0.002)
        with lock:
            running.remove(job.memory)

    monkeypatch.setattr(compile, "work", work)
    wanted = compile.jobs("cuda", tiny=False)["kernels"]
    with concurrent.futures.ThreadPoolExecutor(14) as pool:
        assert compile.run(pool, wanted, workers=14, total=25, minutes=1) == []
        assert compile.run(pool, wanted, workers=14, total=25, minutes=0) == wanted
    assert len(loads) == len(wanted) and max(map(len, loads)) > 3
    assert all(sum(load) <= 25 or len(load) == 1 for load in loads)
    assert max(map(sum, loads)) > 25  # the largest is alone
    large = [job for job in wanted if "bias" in job.arguments and job.arguments[1][2] == 16384]
    bias = 2 * 16 * 16384**2 / 2**30  # GiB in bfloat16
    assert large and all(job.memory > 3 * bias for job in large)


# --- flash, more closely ----------------------------------------------------------------------


@pytest.fixture
def flash():
    pytest.importorskip("triton")
    from benchmarks import flash

    torch.manual_seed(0)
    return flash


def test_a_wrong_gradient_of_the_bias_is_caught(flash):
    case = flash.make((2, 3, 6, 4), torch.float32, "cpu", "bias")
    exact = flash.exact_results(flash.training, case)
    assert set(exact) == {0, 2} and all(len(found) == 4 for found in exact.values())

    def half(case):  # the same output, and of all gradients that of the bias alone is wrong
        bias = 0.5 * case.bias + 0.5 * case.bias.detach()
        return flash.reference(replace(case, bias=bias))

    def wrong(case):
        return half(case)

    def gradients(function):
        def step(_, case):
            return torch.autograd.grad(function(case), case.leaves, case.grad)

        return step

    assert flash.compare(None, gradients(flash.reference), case, exact) < 1e-5
    assert flash.compare(None, gradients(wrong), case, exact) > 0.4
    outputs = flash.exact_results(flash.forward, case)
    assert flash.compare(wrong, flash.forward, case, outputs) < 1e-5


@pytest.mark.parametrize("kind", ["plain", "causal", "bias", "sliding", "packed"])
def test_flex_attention_is_the_same_attention(flash, kind):
    """In every kind it and PyTorch's backends are the equation, in float32."""
    case = flash.make((2, 2, 9, 8), torch.float32, "cpu", kind, needs=False)
    exact = flash.exact_results(flash.forward, case)
    for name in ("flex", "math", "reference"):
        function = flash.contestants("cpu")[name]
        assert flash.compare(function, flash.forward, case, exact) < 1e-5, name
    assert case.pairs() == (81 if case.seen is None else case.seen.sum())
    other = flash.make((2, 2, 9, 8), torch.float32, "cpu", kind, needs=False)
    assert flash.compare(lambda _: flash.flex(other), flash.forward, case, exact) > 0.1


def launches(flash, monkeypatch):
    """The launches' options; the kernels do not run."""
    seen = []
    monkeypatch.setattr(
        flash.flash, "launch", lambda function, *a, **o: seen.append((function.fn.__name__, o))
    )
    return seen


def test_a_tile_is_that_of_one_kernel(flash, monkeypatch):
    """Whatever the kernel is given beside it; and the table's own tile is a candidate."""
    seen = launches(flash, monkeypatch)
    tile = (16, 32, 2, 5)
    for kernel, kinds in flash.TUNED.items():
        for kind in kinds:
            case = flash.make((1, 2, 40, 16), torch.bfloat16, "cpu", kind)
            _, table = flash.launch_of(kernel, case)
            seen.clear()
            _, started = flash.launch_of(kernel, case, tile)
            assert started[2:] == tile[2:] != table[2:]
            for name, options in seen:
                own = (options["num_warps"], options["num_stages"]) == tile[2:]
                assert own == (kernel in name), (kernel, name)
        with flash.cut(kernel, tile):
            for extra in (False, True):  # of which `tiling` would change warps and stages
                options = flash.flash.tiling(kernel, 64, 64, 2, extra)
                assert tuple(options[name] for name in flash.TILE) == tile
    table, times = flash.tune("forward", case, [tile], 1, "cpu")
    assert set(times) == {table, tile}


def test_tuning_takes_all_kernels_and_kinds(flash, monkeypatch, tmp_path, capsys):
    """Without a name, too; a tile that does not compile is told and left out."""
    seen = launches(flash, monkeypatch)
    launch, tiny = flash.flash.launch, ["--tiny", "--device", "cpu", "--repeats"]

    def refuse(function, *arguments, **options):
        launch(function, *arguments, **options)
        if options["num_stages"] == 1:
            raise RuntimeError("out of resource: shared memory")

    monkeypatch.setattr(flash.flash, "launch", refuse)
    flash.main(["tune", *tiny, "2", "--out", str(tmp_path)])
    rows = json.loads((tmp_path / "tiles_cpu.json").read_text())["rows"]
    tuned = {(row["kernel"], row["kind"]) for row in rows}
    assert tuned == {(kernel, kind) for kernel, some in flash.TUNED.items() for kind in some}
    assert all(row["table"] and row["ms"] >= 0 for row in rows) and seen
    assert "out of resource" in capsys.readouterr().out


def test_a_kernel_is_tuned_by_its_launch_alone(flash):
    """Interpreted: the launch that is timed writes what the pass wrote."""
    case = flash.make((1, 1, 20, 16), torch.float32, "cpu", "sliding")
    call, _ = flash.launch_of("forward", case)
    out = call.args[9].detach()  # function, programs, device; q, k, v, mask, bias, ranges; it
    wanted = out.clone()
    out.zero_()
    call()
    assert out.shape == (1, 1, 20, 16) and torch.equal(out, wanted)
    torch.testing.assert_close(out, flash.reference(case).detach(), rtol=1e-4, atol=1e-5)


def test_overhead(monkeypatch, tmp_path):
    """Calls in which no kernel starts, and behind them the launchers stand again."""
    pytest.importorskip("triton")
    from attnlib import flash, windows
    from benchmarks import windows as benchmark

    before, threads, seen = (flash.launch, windows.launch), torch.get_num_threads(), []
    measure = benchmark.measure_overhead

    def noted(*arguments):
        seen.extend([flash.launch is before[0], windows.launch is before[1]])
        return measure(*arguments)

    monkeypatch.setattr(benchmark, "measure_overhead", noted)
    benchmark.main(["overhead", "--tiny", "--repeats", "5", "--out", str(tmp_path)])
    torch.set_num_threads(threads)
    assert seen == [False, False] and (flash.launch, windows.launch) == before
    rows = json.loads((tmp_path / "overhead_cpu.json").read_text())["rows"]
    assert {row["name"] for row in rows} == set(benchmark.kernel_calls())
    for row in rows:
        low, high = row["us_quartiles"]
        assert 0 < low <= row["us"] <= high and row["rounds"] == 5
    with pytest.raises(ZeroDivisionError):
        benchmark.without_launches(lambda: 1 / 0)
    assert (flash.launch, windows.launch) == before


@pytest.mark.parametrize(
    "name, libraries",
    [
        ("vit", {"attnlib", "timm", "torchvision", "transformers", "vit-pytorch"}),
        pytest.param("swin", {"attnlib", "timm", "torchvision", "transformers"}, marks=SLOW),
        pytest.param("swinv2", {"attnlib", "timm", "torchvision", "transformers"}, marks=SLOW),
        pytest.param("tnt", {"attnlib", "timm"}, marks=SLOW),
    ],
)
def test_vision(record, name, libraries):
    """All peers run, those with our weights agree, and each has a ratio."""
    found = record(name, f"{name}_cpu")
    assert {row["library"] for row in found["rows"]} == libraries | {"attnlib, optimized"}
    assert set(found["differences"][gpu.VISION[name]]) == libraries - {"attnlib", "vit-pytorch"}
    assert len(found["rows"]) == 2 * len(libraries) + 1  # the optimized one does not train
    assert all(
        row["ms"] > 0 and row["ratio"] > 0 and row["memory"] > 0 for row in found["rows"]
    )


def test_on_a_gpu_the_model_takes_part_with_its_kernels(monkeypatch):
    """As on a GPU, but interpreted: its logits are compared, and each has its backend."""
    pytest.importorskip("triton")
    used = []
    monkeypatch.setattr(vision, "has_kernels", lambda device: True)
    monkeypatch.setattr(vision, "under", lambda backend, call: used.append(backend) or call)
    row = dict(ms=1.0, ratio=1.0, quartiles=[1.0, 1.0])
    monkeypatch.setattr(
        vision.timing, "measured", lambda calls, *a, **o: dict.fromkeys(calls, row)
    )
    monkeypatch.setattr(vision.timing, "peak_mib", lambda call, device: 1)
    options, rest = dict(vision.TINY["vit"], num_classes=4), ("forward", 1, "cpu", 1, False)
    rows = vision.measure("vit_small_patch16_224", "float32", *rest, options, {})
    backends = dict(zip((row["library"] for row in rows), used, strict=True))
    assert backends.pop("attnlib, optimized") == "triton" and set(backends.values()) == {"auto"}


def test_on_a_gpu_swin_takes_part_with_fused_blocks(monkeypatch):
    """As on a GPU, but interpreted; in training, and compiled, the kernel for its windows."""
    pytest.importorskip("triton")
    from attnlib import inference, windows

    made, row = [], dict(ms=1.0, ratio=1.0, quartiles=[1.0, 1.0])
    fuse_swin = windows.fuse_swin
    monkeypatch.setattr(vision, "has_kernels", lambda device: True)
    monkeypatch.setattr(inference, "devices", lambda model: ["cuda:0"])

    def noted(model, trainable=False):
        made.append((type(model).__name__, trainable))
        return fuse_swin(model, trainable)

    monkeypatch.setattr(windows, "fuse_swin", noted)
    monkeypatch.setattr(
        vision.timing, "measured", lambda calls, *a, **o: dict.fromkeys(calls, row)
    )
    monkeypatch.setattr(vision.timing, "peak_mib", lambda call, device: 1)
    small = dict(img_size=16, window_size=2, embed_dim=16, depths=(2, 2), num_heads=(1, 2))
    for name, kind, options, copies in (
        ("swin", "forward", small, [("SwinTransformer", True), ("SwinTransformer", False)]),
        ("swin", "training", small, [("SwinTransformer", True)]),
        ("swinv2", "training", small, [("SwinTransformerV2", True)]),
        ("vit", "forward", vision.TINY["vit"], []),
    ):
        made.clear()
        options = dict(options, num_classes=4)
        rows = vision.measure(
            gpu.VISION[name], "float32", kind, 1, "cpu", 1, False, options, {}
        )
        assert "attnlib, optimized" in {row["library"] for row in rows} and made == copies


@pytest.mark.parametrize(
    "name",
    ["digits", *(pytest.param(name, marks=SLOW) for name in LONG_RUNS)],
)
def test_runs(record, name):
    found = record(f"run_{name}", name)
    if name == "translator":
        assert len(found["tokenizer"]) > 1000 and 0 <= found["runs"][0]["test"] <= 1
    elif name == "lengths":
        assert {run["position"] for run in found["runs"]} >= {"sinusoidal", "rotary", "none"}
    elif name == "supernet":
        assert all(0 <= row["accuracy"] <= 1 for row in found["subnets"])
    elif name == "gpt":
        assert found["best"]["valid"] == min(row["valid"] for row in found["history"])
        assert len(found["samples"]) == 3 and found["best"]["test"] > 0
    elif name == "captions":
        assert {run["contestant"] for run in found["runs"]} == {"soft", "hard"}
        assert all(0 <= run["test"]["exact"] <= 1 for run in found["runs"])
    elif name == "detr":
        assert found["history"] and 0 <= found["ap"] <= found["ap50"] <= 1
    else:
        assert [run["model"] for run in found["runs"]] == [
            "vit",
            "deit",
            "swin",
            "swinv2",
            "tnt",
        ]
        assert all(0 <= run["history"][-1]["accuracy"] <= 1 for run in found["runs"])
