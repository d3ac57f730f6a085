"""What a PoolRotator refuses, which form it chooses, and that a server's inference mode does not stop it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest
import torch

from leyline_agent.errors import ConfigError, UnsupportedError
from leyline_agent.kernels.pool import LayerKV, PoolRotator
from leyline_agent.kernels.rope import RopeDescriptor

PATH = {"PYTHONPATH": ":".join(sys.path)}
ROPE = RopeDescriptor(torch.linspace(1, 0.01, 4, dtype=torch.float64), 8, interleaved=False)


def layer(slots: int = 16, dtype: torch.dtype = torch.float32) -> LayerKV:
    return LayerKV(torch.randn(slots, 2, 8).to(dtype), torch.randn(slots, 2, 8).to(dtype), ROPE)


def test_auto_takes_torch_without_cuda_and_says_why() -> None:
    rotator = PoolRotator([layer()])
    assert rotator.form == "torch"
    assert "cpu" in rotator.form_reason


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_auto_takes_triton_on_cuda() -> None:
    keys = torch.randn(16, 2, 8, device="cuda")
    rotator = PoolRotator([LayerKV(keys, None, ROPE)])
    assert (rotator.form, rotator.form_reason) == ("triton", "the pool is on CUDA")


def test_a_form_that_cannot_run_is_an_error_not_a_fallback() -> None:
    with pytest.raises(ConfigError, match="fast"):
        PoolRotator([layer()], form="fast")  # type: ignore[arg-type]
    code = (
        "import torch; from leyline_agent.kernels.pool import LayerKV, PoolRotator\n"
        "PoolRotator([LayerKV(torch.zeros(4, 1, 8), None, None)], form='triton')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=PATH)
    assert "ConfigError" in done.stderr
    assert "the pool is on cpu" in done.stderr or "not installed" in done.stderr


def test_triton_is_not_imported_where_torch_runs() -> None:
    code = (
        "import sys; from leyline_agent.kernels.pool import LayerKV, PoolRotator\n"
        "import torch; PoolRotator([LayerKV(torch.zeros(4, 1, 8), None, None)])\n"
        "assert 'leyline_agent.kernels.triton_form' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env=PATH)


def test_layers_of_one_shape_are_one_launch_whatever_their_theta() -> None:
    triton_form = pytest.importorskip("leyline_agent.kernels.triton_form", reason="Triton is not installed")
    other_theta = RopeDescriptor(torch.linspace(1, 0.5, 4, dtype=torch.float64), 8, interleaved=False)
    narrow = RopeDescriptor(torch.linspace(1, 0.5, 2, dtype=torch.float64), 4, interleaved=False)
    keys = [torch.zeros(4, 2, 8) for _ in range(5)]
    one_shape = [
        LayerKV(k, k, rope) for k, rope in zip(keys, [ROPE, other_theta, None, ROPE, other_theta], strict=True)
    ]
    (table,) = triton_form.TritonForm(one_shape).tables
    assert table.planes.shape == (8, 2)  # four layers that rotate, of two heads each
    assert table.chunks_of(3).tolist() == [[0, 3, 0], [3, 4, 0], [4, 7, 1], [7, 8, 1]]  # no chunk mixes rotations
    assert len(triton_form.TritonForm([*one_shape, LayerKV(keys[0], keys[0], narrow)]).tables) == 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_cuda_graph_replays_a_rotation() -> None:
    """Nothing in a launch may wait for the GPU, and what it reads when replayed is what lies there then."""
    keys = torch.randn(64, 2, 8, device="cuda")
    rotator = PoolRotator([LayerKV(keys, None, ROPE)])
    slots, shifts = torch.arange(8, device="cuda"), torch.full((8,), 5, device="cuda")
    rotator.rotate_inplace(slots + 32, shifts)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        rotator.rotate_inplace(slots, shifts)
    before = keys.clone()
    graph.replay()
    slots += 8
    shifts.neg_()
    graph.replay()
    expected = before.clone()
    plain = PoolRotator([LayerKV(expected, None, ROPE)], form="torch")
    plain.rotate_inplace(torch.arange(16, device="cuda"), torch.tensor([5] * 8 + [-5] * 8, device="cuda"))
    torch.testing.assert_close(keys, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e4m3fn])
def test_fp8_is_opt_in(dtype: torch.dtype) -> None:
    keys = torch.zeros(16, 2, 8).to(torch.float8_e4m3fn).view(dtype)
    with pytest.raises(UnsupportedError, match="allow_fp8"):
        PoolRotator([LayerKV(keys, None, ROPE)])
    PoolRotator([LayerKV(keys, None, ROPE)], allow_fp8=True)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: LayerKV(torch.zeros(4, 8), None, ROPE), r"\[slots, heads, dim\]"),
        (lambda: LayerKV(torch.zeros(4, 8, 2).transpose(1, 2), None, ROPE), "contiguous last dimension"),
        (lambda: LayerKV(torch.zeros(4, 2, 8, dtype=torch.float64), None, ROPE), "float64"),
        (lambda: LayerKV(torch.zeros(4, 2, 8).to(torch.float8_e5m2), None, ROPE), "float8_e5m2"),
        (lambda: LayerKV(torch.zeros(4, 2, 6), None, ROPE), r"columns \[0, 8\).*width 6"),
        (lambda: LayerKV(torch.zeros(4, 2, 8), None, ROPE, rope_offset=1), r"columns \[1, 9\)"),
        (lambda: LayerKV(torch.zeros(4, 2, 8), torch.zeros(5, 2, 8), ROPE), "values 5 slots"),
        (lambda: PoolRotator([]), "at least one layer"),
        (lambda: PoolRotator([layer(16), layer(17)]), "layer 1 has 17 slots"),
        (lambda: PoolRotator([layer(), layer(dtype=torch.float16)]), "layer 1"),
    ],
)
def test_layers_are_checked(make: Callable[[], object], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        make()


ONE, TWO = torch.tensor([1]), torch.tensor([1, 2])


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (lambda r: r.rotate_inplace(TWO.int(), TWO), "slots are .* torch.int32"),
        (lambda r: r.rotate_inplace(TWO[None], TWO), "slots are"),
        (lambda r: r.rotate_inplace(TWO, ONE), "one a slot"),
        (lambda r: r.rotate_inplace(TWO, TWO.float()), "torch.float32"),
        (lambda r: r.rotate_inplace(TWO + 14, TWO), "slots reach from 15 to 16"),
        (lambda r: r.rotate_inplace(TWO - 2, TWO), "slots reach from -1 to 0"),
        (lambda r: r.copy_rotate(TWO, ONE + 5, TWO), "2 source slots, but 1 destination"),
        (lambda r: r.copy_rotate(TWO, TWO + 1, TWO), r"slots \[2\] are both read and written"),
        (lambda r: r.rotated_keys(0, TWO, TWO, torch.zeros(1, 2, 8)), r"out is \(1, 2, 8\)"),
        (lambda r: r.rotated_keys(0, TWO, TWO, torch.zeros(2, 2, 8).half()), "float16"),
    ],
)
def test_arguments_are_checked(call: Callable[[PoolRotator], None], reason: str) -> None:
    pool = layer()
    before = pool.keys.clone()
    with pytest.raises(ValueError, match=reason):
        call(PoolRotator([pool]))
    assert torch.equal(pool.keys, before)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_pools_made_under_inference_mode(device: str) -> None:
    """Their tensors refuse in-place work outside of inference mode; a caller need not think of that."""
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    with torch.inference_mode():
        keys = torch.randn(16, 2, 8, device=device)
    before = keys.clone()
    rotator = PoolRotator([LayerKV(keys, None, ROPE)])
    slots = torch.arange(1, 8, device=device)
    rotator.rotate_inplace(slots, slots)
    rotator.copy_rotate(slots, slots + 8, -slots)
    assert not torch.equal(keys[1:8], before[1:8])
    torch.testing.assert_close(keys[9:], before[1:8], rtol=0, atol=1e-5)
