"""A run records which device trained and who drew its noise; every backend is reproducible on every
engine."""

from __future__ import annotations

import math
from contextlib import nullcontext

import pytest
import torch
from kernel_backends import INTERPRETED, TRITON

from fedlgm.errors import ConfigError, RunError
from fedlgm.training import devices
from simulations import launch
from simulations.config.assembly import Assembly
from simulations.config.decided import resolve_hardware
from simulations.runs import new_folder
from simulations.runs.folder import RunFolder

LOCAL = {"trust": "local", "max_participations": 3}
CUDA = torch.cuda.is_available()


@pytest.fixture
def digest(tiny, tmp_path):
    """Model digest of a tiny run."""
    numbers = iter(range(99))

    def run(engine="local", workers=None, **privacy) -> str:
        path = tmp_path / f"run-{next(numbers)}"
        return launch.simulate(tiny(privacy=privacy), engine=engine, workers=workers, run_dir=path)[
            "model_sha256"
        ]

    return run


@pytest.mark.parametrize("trust", [{}, LOCAL], ids=["central", "local"])
def test_backends_are_reproducible_and_each_has_its_own_bits(digest, trust):
    drawn = {
        backend: digest(noise_backend=backend, **trust) for backend in ("auto", "cpu", "torch")
    }
    assert drawn["auto"] == drawn["cpu"] != drawn["torch"]
    assert digest(noise_backend="torch", **trust) == drawn["torch"]


@pytest.mark.slow
def test_workers_draw_the_same_kernel_noise(digest):
    expected = digest(noise_backend="torch", **LOCAL)
    assert digest("ray", 2, noise_backend="torch", **LOCAL) == expected


@pytest.mark.skipif(
    not INTERPRETED, reason="tests/fedlgm/aggregation/test_kernel_triton.py starts the interpreter"
)
@pytest.mark.parametrize(
    ("federation", "privacy"),
    [
        pytest.param({"rounds": 2}, {}, id="central trust"),
        # Clients derive their noise from the model and their contribution, to the last bit: one
        # round, then.
        pytest.param({"rounds": 1}, LOCAL, id="local trust"),
    ],
)
def test_triton_draws_a_runs_noise_in_its_interpreter(tiny, tmp_path, federation, privacy):
    """The same Philox words as torch's: the two models differ by rounding alone."""
    models, digests = [], []
    for number, backend in enumerate(("torch", "triton", "triton")):
        parsed = tiny(federation=federation, privacy=privacy | {"noise_backend": backend})
        digests.append(launch.simulate(parsed, run_dir=tmp_path / str(number))["model_sha256"])
        folder = RunFolder.open(tmp_path / str(number))
        models.append(
            folder.checkpoints.latest(Assembly(parsed).model.layers).transcript.models[-1]
        )
    assert digests[1] == digests[2]
    assert (models[1] - models[0]).norm() / models[0].norm() < 1e-3


def test_a_run_records_what_auto_became(tiny, tmp_path):
    launch.simulate(
        tiny(training={"device": "auto"}, federation={"rounds": 1}), run_dir=tmp_path / "run"
    )
    recorded = RunFolder.open(tmp_path / "run").recipe()
    assert recorded.training.device in devices.available_devices()
    assert recorded.privacy.noise_backend != "auto"


@pytest.mark.skipif(CUDA, reason="what is asked for is here")
def test_a_run_is_only_resumed_where_its_noise_can_be_drawn(tiny, tmp_path):
    for number, sections in enumerate(
        ({"privacy": {"noise_backend": "triton"}}, {"training": {"device": "cuda"}, "privacy": {}})
    ):
        new_folder.create(tmp_path / str(number), tiny(**sections))
        with pytest.raises(RunError, match="can be resumed only where it can draw the same noise"):
            launch.resume(tmp_path / str(number))


@pytest.mark.skipif(CUDA, reason="what is asked for is here")
def test_what_is_not_available_is_refused_before_anything_is_written(tiny, tmp_path):
    for sections, message in (
        (
            {"training": {"device": "cuda"}},
            r"training\.device: 'cuda' is not available; found here: .*cpu",
        ),
        ({"training": {"device": "cuda:7"}}, r"training\.device: 'cuda:7' is not available"),
        ({"privacy": {"noise_backend": "triton"}}, r"privacy\.noise_backend: 'triton' needs"),
    ):
        with pytest.raises(ConfigError, match=message):
            launch.simulate(tiny(**sections), run_dir=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    with pytest.raises(ConfigError, match="must be auto, cpu, cuda, cuda:N, mps or xpu"):
        tiny(training={"device": "gpu"})


def test_an_accelerators_sums_are_not_noised_on_the_cpu():
    cuda, metal = torch.device("cuda"), torch.device("mps")
    with pytest.raises(ConfigError, match="use 'auto'"):
        devices.resolve_noise("cpu", cuda)
    assert devices.resolve_noise("auto", cuda) == ("triton" if TRITON else "torch")
    assert devices.resolve_noise("auto", metal) == "torch"
    with pytest.raises(ConfigError, match="needs"):
        devices.resolve_noise("triton", metal)


@pytest.mark.parametrize(
    "program", ["nothing", "older switch", "newer switch", "newer switch for all"]
)
def test_exact_arithmetic_leaves_no_trace(program, request):
    backends = torch.backends

    def usual() -> None:
        torch.set_float32_matmul_precision("highest")
        backends.cudnn.allow_tf32 = True
        backends.fp32_precision = backends.cuda.matmul.fp32_precision = "none"
        backends.cudnn.conv.fp32_precision = backends.cudnn.rnn.fp32_precision = "tf32"

    def state() -> list:
        found = [backends.cudnn.deterministic, backends.cudnn.benchmark]
        found += [
            s.fp32_precision
            for s in (backends, backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn)
        ]
        for getter in (torch.get_float32_matmul_precision, lambda: backends.cudnn.allow_tf32):
            try:
                found.append(getter())
            except RuntimeError:  # torch's own complaint about contradicting switches
                found.append("contradiction")
        return found

    request.addfinalizer(usual)
    if program == "older switch":
        torch.set_float32_matmul_precision("high")
    elif program == "newer switch":
        backends.cuda.matmul.fp32_precision = "tf32"
    elif program == "newer switch for all":
        backends.fp32_precision = "tf32"
    before = state()
    with devices.exact_arithmetic(torch.device("cuda")):
        assert state()[:2] == [True, False]
        assert state()[3:] == ["ieee", "ieee", "ieee", "highest", False]
    assert state() == before


def test_ray_workers_share_the_gpus_there_are():
    pytest.importorskip("ray")
    from simulations.engines.ray import gpu_share

    cuda = torch.device("cuda")
    assert gpu_share(torch.device("cpu"), 3, 0) == 0
    assert gpu_share(cuda, 2, 4) == 1
    for workers, gpus in ((3, 1), (3, 2), (7, 2), (500, 8)):
        share = gpu_share(cuda, workers, gpus)
        assert gpus * int(1 / share) >= workers
    with pytest.raises(RunError, match="Ray has 0: use --engine local"):
        gpu_share(cuda, 2, 0)
    with pytest.raises(RunError, match=r"training\.device = 'cuda' instead"):
        gpu_share(torch.device("cuda:1"), 2, 4)


def test_flowers_actors_reserve_their_share_of_a_gpu(tiny, tmp_path, monkeypatch):
    pytest.importorskip("ray")
    from simulations.engines import flower

    class Submitted(Exception):
        pass

    class Command:
        def submit(self, *arguments):
            raise Submitted(arguments)

    monkeypatch.setattr(flower, "private_superlink", lambda log: nullcontext(Command()))
    folder = new_folder.create(tmp_path / "run", resolve_hardware(tiny()))
    with pytest.raises(
        Submitted, match=r"num-supernodes=2 .*client-resources-num-gpus=0\.5 init-args-num-cpus=2"
    ):
        flower.run_flower(folder, 2, 2, gpus=0.5)


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
@pytest.mark.parametrize("engine", ["ray", "flower"])
def test_workers_on_one_gpu_give_the_model_of_one_process(tiny, tmp_path, engine):
    pytest.importorskip("ray")
    parsed = tiny(training={"device": "cuda"})
    shared = launch.simulate(parsed, run_dir=tmp_path / "shared", engine=engine, workers=2)
    assert (
        shared["model_sha256"]
        == launch.simulate(parsed, run_dir=tmp_path / "one", engine="local")["model_sha256"]
    )


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
@pytest.mark.parametrize("vectorize", ["on", "off"])
@pytest.mark.parametrize("trust", [{}, LOCAL], ids=["central", "local"])
def test_a_gpu_run_is_reproducible_and_close_to_the_cpus(tiny, tmp_path, trust, vectorize):
    """Under local trust it is as far from it as other noise is: noise depends on a contribution's
    last bits."""
    models, digests = [], []
    for number, device in enumerate(("cuda", "cuda", "cpu")):
        parsed = tiny(
            federation={"rounds": 1 if trust else 3},
            training={"device": device, "vectorize": vectorize},
            privacy={"noise_backend": "torch" if device == "cpu" else "auto", **trust},
        )
        digests.append(launch.simulate(parsed, run_dir=tmp_path / str(number))["model_sha256"])
        folder = RunFolder.open(tmp_path / str(number))
        models.append(
            folder.checkpoints.latest(
                Assembly(resolve_hardware(parsed)).model.layers
            ).transcript.models[-1]
        )
    assert digests[0] == digests[1]
    if trust:
        (row,) = RunFolder.open(tmp_path / "0").rows()
        assert float((models[0] - models[2]).norm()) == pytest.approx(
            math.sqrt(2) * row["noise_scale"], rel=0.15
        )
        return
    # Noise that falls on another step of the grid moves a coordinate by a thousandth of the noise.
    assert (models[0] - models[2]).norm() / models[2].norm() < 1e-3
    assert (models[0] - models[2]).abs().median() < 1e-4
