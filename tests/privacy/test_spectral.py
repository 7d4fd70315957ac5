"""The cheap formulas of Spectral-DP agree with the mechanism written out lag by lag.

The reference materialises R by rolling the input over the torus, low-passes it by a complex
FFT with an amplitude filled bin by bin, crops, and projects. `pipeline` is crop M as a matrix,
one column for each unit impulse; everything about privacy is checked against it.
"""

import math
import warnings
from itertools import product

import pytest
import torch
from pairs import pairs
from torch import Tensor, nn

from dpsweep.core.circulant import CirculantLinear
from dpsweep.privacy.spectral import CirculantMap, ConvMap, Records, low_pass_response

KEEPS = [1.0, 0.75, 0.5, 0.25, 0.1]
QUERIES = [(1.0,), (-3.67, 4.67), (0.5, -1.2, 2.0)]
CONVS = [
    {"kernel_size": 3, "padding": "same"},
    {"kernel_size": (3, 2), "padding": "same"},
    {"kernel_size": 3, "padding": "valid"},
    {"kernel_size": (2, 3), "padding": 0},
    {"kernel_size": 3, "padding": 1},
    {"kernel_size": (5, 3), "padding": (2, 0)},
    {"kernel_size": 1},
]
CONVS_BY_NAME = {"-".join(map(str, options.values())): options for options in CONVS}
QUERIES_BY_NAME = {f"{len(weights)} points": weights for weights in QUERIES}
PRECISIONS = {"f64": (torch.float64, 1e-10), "f32": (torch.float32, 1e-5)}  # and tolerances
every_conv = pytest.mark.parametrize("options", CONVS_BY_NAME.values(), ids=CONVS_BY_NAME)
IMAGE = (2, 7, 9)
EXAMPLES = 4


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    rng = torch.Generator().manual_seed(seed + 100 * len(shape))
    return torch.randn(shape, generator=rng, dtype=torch.float64).to(dtype)


def conv(options: dict[str, object], in_channels: int = 2) -> nn.Conv2d:
    torch.manual_seed(0)
    return nn.Conv2d(in_channels, 3, **options).double()


def conv_records(layer: nn.Conv2d, weights: tuple[float, ...], dtype=torch.float64) -> Records:
    with warnings.catch_warnings():  # torch warns that even kernels with 'same' cost a copy
        warnings.simplefilter("ignore")
        shape = layer(torch.zeros(IMAGE, dtype=torch.float64)).shape
    points = range(len(weights))
    return Records(
        weights,
        tuple(randn(EXAMPLES, *IMAGE, seed=m, dtype=dtype) for m in points),
        tuple(randn(EXAMPLES, *shape, seed=10 + m, dtype=dtype) for m in points),
    )


def circulant_records(
    layer: CirculantLinear,
    weights: tuple[float, ...],
    positions: tuple[int, ...] = (),
    dtype: torch.dtype = torch.float64,
    examples: int = EXAMPLES,
) -> Records:
    points, lead = range(len(weights)), (examples, *positions)
    return Records(
        weights,
        tuple(randn(*lead, layer.in_features, seed=m, dtype=dtype) for m in points),
        tuple(randn(*lead, layer.out_features, seed=10 + m, dtype=dtype) for m in points),
    )


def amplitude(n: int, keep: float) -> list[float]:
    """Gain of each of the n complex bins, filled from the zero frequency up."""
    gains, left = [0.0] * n, keep * n
    for distance in range(n // 2 + 1):
        group = {distance % n, -distance % n}
        power = max(0.0, min(1.0, left / len(group)))
        left -= power * len(group)
        for f in group:
            gains[f] = math.sqrt(power)
    return gains


def pipeline(sizes: tuple[int, ...], crop: tuple[int, ...], keep: float) -> Tensor:
    """Crop M, shape (k, all lags): what the low-pass makes of each unit impulse."""
    impulses = torch.eye(math.prod(sizes), dtype=torch.float64).view(-1, *sizes)
    axes = tuple(range(1, 1 + len(sizes)))
    gains = torch.ones(sizes, dtype=torch.float64)
    for axis, n in enumerate(sizes):
        shape = [n if a == axis else 1 for a in range(len(sizes))]
        gains = gains * torch.tensor(amplitude(n, keep), dtype=torch.float64).view(shape)
    passed = torch.fft.ifftn(torch.fft.fftn(impulses, dim=axes) * gains, dim=axes)
    assert passed.imag.abs().max() < 1e-12
    window = (slice(None), *(slice(k) for k in crop))
    return passed.real[window].flatten(1).T


def conv_answers(layer: nn.Conv2d, records: Records, torus: tuple[int, int]) -> Tensor:
    """R of each example, shape (B, O, I, n_h * n_w), one output pixel after the other."""
    total = torch.zeros(())
    for weight, x, a in zip(records.weights, records.inputs, records.grads, strict=True):
        padded = nn.functional.pad(x.double(), layer._reversed_padding_repeated_twice)
        height, width = padded.shape[2:]
        on_torus = nn.functional.pad(padded, (0, torus[1] - width, 0, torus[0] - height))
        for y, x in product(*map(range, a.shape[2:])):
            share = weight * a[:, :, y, x].double()
            total = total + torch.einsum("bo,biuv->boiuv", share, on_torus.roll((-y, -x), (2, 3)))
    return total.flatten(3)


def circulant_answers(layer: CirculantLinear, records: Records) -> Tensor:
    """G of each example, shape (B, p, q, d), lag by lag, summed over positions."""
    (p, q, d), total = layer.weight.shape, torch.zeros(())
    for weight, x, delta in zip(records.weights, records.inputs, records.grads, strict=True):
        x = x.double().reshape(len(x), -1, q, d)
        delta = delta.double().reshape(len(x), -1, p, d)
        lags = [torch.einsum("bnps,bnqs->bpq", delta, x.roll(lag, -1)) for lag in range(d)]
        total = total + weight * torch.stack(lags, -1)
    return total


def white_rows(mapped: ConvMap | CirculantMap, crop_m: Tensor) -> Tensor:
    """W from the reference pipeline and the map's own choice of axes in the kept space."""
    return (mapped.lags.vectors / mapped.lags.variances.sqrt()).T @ crop_m


def kept_projection(crop_m: Tensor) -> Tensor:
    """Projection of the k lags on the directions in which low-passed noise is not empty."""
    variances, vectors = torch.linalg.eigh(crop_m @ crop_m.T)
    kept = vectors[:, variances > 1e-4 * variances.max()]
    return kept @ kept.T


def assert_close(actual: Tensor, expected: Tensor, tolerance: float) -> None:
    """Within `tolerance` of the largest expected entry."""
    assert actual.shape == expected.shape
    worst = (actual.double() - expected).abs().max() / expected.abs().max()
    assert worst <= tolerance, f"off by {worst:.1e} of the largest entry"


def assert_agrees(mapped, records: Records, answers: Tensor, crop_m: Tensor, tolerance) -> None:
    """`squares`, `coordinates` and `restore` against answers of shape (B, O, I, all lags)."""
    dtype = records.grads[0].dtype
    exact_B = answers.flatten(1).square().sum(1)
    squares_B = mapped.squares(records)
    assert squares_B.dtype == torch.float64
    torch.testing.assert_close(squares_B, exact_B, rtol=tolerance, atol=0)
    factor_B = torch.linspace(0.3, 1.7, len(answers), dtype=dtype)
    total = torch.einsum("b,boin->oin", factor_B.double(), answers)
    white = mapped.coordinates(records, factor_B)
    assert white.dtype == dtype
    assert white.shape == mapped.white_shape
    assert_close(white, total @ white_rows(mapped, crop_m).T, tolerance)
    gradient = total @ crop_m.T @ kept_projection(crop_m)
    assert_close(mapped.restore(white).flatten(2), gradient.flatten(2), tolerance)


@pairs(options=CONVS_BY_NAME, keep=KEEPS, weights=QUERIES_BY_NAME, precision=PRECISIONS)
def test_convolution_agrees_with_the_mechanism_lag_by_lag(options, keep, weights, precision):
    dtype, tolerance = precision
    layer = conv(options)
    records = conv_records(layer, weights, dtype)
    mapped = ConvMap.of(layer, IMAGE, keep)
    crop_m = pipeline(mapped.torus, layer.kernel_size, keep)
    answers = conv_answers(layer, records, mapped.torus)
    assert_agrees(mapped, records, answers, crop_m, tolerance)
    assert mapped.restore(mapped.coordinates(records, torch.ones(EXAMPLES))).shape == (
        layer.weight.shape
    )


@pairs(
    block=[4, 5, 8],
    positions=[(), (5,), (2, 3)],
    keep=[1.0, 0.75, 0.5, 0.25],
    weights=QUERIES_BY_NAME,
    precision=PRECISIONS,
)
def test_circulant_layer_agrees_with_the_mechanism_lag_by_lag(
    block, positions, keep, weights, precision
):
    dtype, tolerance = precision
    layer = CirculantLinear(3 * block, 2 * block, block)
    records = circulant_records(layer, weights, positions, dtype)
    answers, crop_m = circulant_answers(layer, records), pipeline((block,), (block,), keep)
    assert_agrees(CirculantMap.of(layer, keep), records, answers, crop_m, tolerance)


@every_conv
def test_torus_is_wide_enough_that_no_lag_wraps(options):
    layer = conv(options)
    records = conv_records(layer, (1.0,))
    torus = ConvMap.of(layer, IMAGE, 1.0).torus
    padded = nn.functional.pad(records.inputs[0], layer._reversed_padding_repeated_twice)
    for axis in (2, 3):
        assert torus[axis - 2] >= padded.shape[axis] + records.grads[0].shape[axis] - 1


def conv_case(keep: float):
    layer = conv({"kernel_size": (5, 3), "padding": (2, 0)})
    mapped = ConvMap.of(layer, IMAGE, keep)
    return mapped, pipeline(mapped.torus, layer.kernel_size, keep)


def circulant_case(keep: float):
    mapped = CirculantMap.of(CirculantLinear(24, 16, 8), keep)
    return mapped, pipeline((8,), (8,), keep)


CASES = [
    *((conv_case, keep) for keep in KEEPS),
    *((circulant_case, keep) for keep in KEEPS[:-1]),
]
every_case = pytest.mark.parametrize(("case", "keep"), CASES)


@every_case
def test_rows_that_give_the_white_coordinates_are_orthonormal(case, keep):
    # The whole privacy argument: then |W R| <= |R| <= C for every R, attainable or not.
    mapped, crop_m = case(keep)
    rows = white_rows(mapped, crop_m)
    identity = torch.eye(len(rows), dtype=torch.float64)
    torch.testing.assert_close(rows @ rows.T, identity, atol=1e-9, rtol=0)


@every_case
def test_restored_noise_has_the_covariance_of_low_passed_and_cropped_noise(case, keep):
    mapped, crop_m = case(keep)
    kept = kept_projection(crop_m)
    expected = kept @ crop_m @ crop_m.T @ kept
    k = len(expected)
    axes = torch.eye(len(mapped.lags.variances), dtype=torch.float64)
    back = mapped.lags.restore(axes)
    torch.testing.assert_close(back.T @ back, expected, atol=1e-12, rtol=0)
    assert mapped.noise_gain == pytest.approx(expected.trace().item() / k, rel=1e-10)

    draws = mapped.lags.restore(randn(40_000, len(axes)))
    # Of 40 000 draws a covariance has standard deviation sqrt((K_ij^2 + K_ii K_jj)/40 000), at
    # most sqrt(2/40 000) of the largest variance; 6 of them for some 200 entries, a false alarm
    # in a few million.
    tolerance = 6 * math.sqrt(2 / 40_000) * expected.diagonal().max().item()
    torch.testing.assert_close(draws.T @ draws / 40_000, expected, atol=tolerance, rtol=0)


@pytest.mark.parametrize("keep", [1.0, 0.9, 0.75])
def test_each_kernel_entry_has_keep_squared_of_the_noise(keep):
    # Feng et al. 2023, Corollary 1; at these no direction is dropped.
    mapped = ConvMap.of(conv({"kernel_size": 3, "padding": 1}), IMAGE, keep)
    assert mapped.white_shape == (3, 2, 9)
    variances = mapped.lags.restore(torch.eye(9, dtype=torch.float64)).square().sum(0)
    torch.testing.assert_close(variances, torch.full_like(variances, keep**2))
    assert mapped.noise_gain == pytest.approx(keep**2)


@pytest.mark.parametrize(("keep", "num_kept"), [(1.0, 8), (0.5, 5), (0.25, 3), (0.125, 1)])
def test_circulant_layer_releases_one_coordinate_for_each_bin_that_passes(keep, num_kept):
    mapped = CirculantMap.of(CirculantLinear(24, 16, 8), keep)
    assert mapped.white_shape == (2, 3, num_kept)
    assert mapped.noise_gain == pytest.approx(keep)


@every_conv
def test_without_filter_a_convolution_gives_the_ordinary_gradient(options):
    layer = conv(options)
    records = conv_records(layer, (1.0,))
    mapped = ConvMap.of(layer, IMAGE, keep=1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        output = layer(records.inputs[0])
    (gradient,) = torch.autograd.grad(output, layer.weight, records.grads)
    white = mapped.coordinates(records, torch.ones(EXAMPLES, dtype=torch.float64))
    torch.testing.assert_close(mapped.restore(white), gradient, rtol=0, atol=1e-11)
    assert mapped.noise_gain == pytest.approx(1.0)


def test_without_filter_a_circulant_layer_gives_the_ordinary_gradient():
    layer = CirculantLinear(24, 16, 8).double()
    records = circulant_records(layer, (1.0,), positions=(5,))
    mapped = CirculantMap.of(layer, keep=1.0)
    (gradient,) = torch.autograd.grad(layer(records.inputs[0]), layer.weight, records.grads)
    white = mapped.coordinates(records, torch.ones(EXAMPLES, dtype=torch.float64))
    torch.testing.assert_close(mapped.restore(white), gradient, rtol=0, atol=1e-11)
    assert mapped.noise_gain == pytest.approx(1.0)


def example_cases(weights=(-3.67, 4.67), dtype=torch.float32):
    """A map and records for each kind of layer."""
    layer = conv({"kernel_size": 3, "padding": 1})
    yield ConvMap.of(layer, IMAGE, 0.5), conv_records(layer, weights, dtype)
    blocks = CirculantLinear(24, 16, 8)
    yield CirculantMap.of(blocks, 0.5), circulant_records(blocks, weights, (5,), dtype)


KINDS = pytest.mark.parametrize("kind", [0, 1], ids=["conv", "circulant"])


@KINDS
@pytest.mark.parametrize("wild", [math.nan, math.inf, -math.inf, 1e30, 3e38])
def test_an_example_of_factor_zero_leaves_no_trace(kind, wild):
    mapped, records = list(example_cases())[kind]
    factor_B = torch.tensor([0.5, 0.0, 1.0, 0.0])
    without = Records(
        records.weights,
        *(tuple(z[[0, 2]] for z in leaf) for leaf in (records.inputs, records.grads)),
    )
    expected = mapped.coordinates(without, factor_B[[0, 2]])
    records.inputs[0][1] = wild
    records.grads[1][3].view(-1)[::2] = wild
    assert_close(mapped.coordinates(records, factor_B), expected.double(), 1e-6)
    squares_B = mapped.squares(records)
    torch.testing.assert_close(squares_B[[0, 2]], mapped.squares(without))
    if not math.isfinite(wild):
        assert not squares_B[[1, 3]].isfinite().any()
    else:
        assert not (squares_B[[1, 3]] <= 1e30).any()


@KINDS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_nobody_answers_with_zeros(kind, dtype):
    mapped, records = list(example_cases(dtype=dtype))[kind]
    empty = each_leaf(records, lambda z: z[:0])
    assert mapped.squares(empty).shape == (0,)
    white = mapped.coordinates(empty, torch.zeros(0, dtype=dtype))
    assert torch.equal(white, torch.zeros(mapped.white_shape, dtype=dtype))


@KINDS
def test_answers_do_not_depend_on_how_the_batch_is_sliced(kind):
    mapped, records = list(example_cases(dtype=torch.float64))[kind]
    times = 175
    many = each_leaf(records, lambda z: z.repeat(times, *[1] * (z.dim() - 1)))
    factor_B = torch.linspace(0, 1, times * EXAMPLES, dtype=torch.float64)
    torch.testing.assert_close(mapped.squares(many), mapped.squares(records).repeat(times))
    expected = mapped.coordinates(records, factor_B.view(times, EXAMPLES).sum(0))
    torch.testing.assert_close(mapped.coordinates(many, factor_B), expected)


@pytest.mark.parametrize(("per_example", "sizes"), [(1, [4]), (2**19, [2, 2]), (2**30, [1] * 4)])
def test_slices_hold_each_example_once_in_order_and_at_least_one_at_a_time(per_example, sizes):
    records = conv_records(conv({"kernel_size": 3}), (0.5, 2.0))
    records.inputs[0].requires_grad_()
    parts = list(records.slices(per_example))
    assert [len(some.grads[0]) for _, some in parts] == sizes
    for part, some in parts:
        assert some.weights == records.weights
        assert not some.inputs[0].requires_grad
        assert torch.equal(some.grads[0], records.grads[0][part])
    for leaf in ("inputs", "grads"):
        for m in (0, 1):
            joined = torch.cat([getattr(some, leaf)[m] for _, some in parts])
            assert torch.equal(joined, getattr(records, leaf)[m])


@KINDS
def test_records_kept_by_autograd_are_not_differentiated_through(kind):
    mapped, records = list(example_cases())[kind]
    records.inputs[0].requires_grad_()
    assert not mapped.squares(records).requires_grad
    assert not mapped.coordinates(records, torch.ones(EXAMPLES)).requires_grad


@pytest.mark.parametrize("apart", [1e-2, 1e-4])
@KINDS
def test_points_that_nearly_cancel_keep_a_precise_norm(kind, apart):
    # In float32 the cross terms would leave a relative error of 1e-7 / apart^2 in the square.
    mapped, records = list(example_cases((1.0, -1.0)))[kind]
    near = nearly_equal(records, apart, torch.float32)
    exact_B = answers_of(mapped, near).flatten(1).square().sum(1)
    torch.testing.assert_close(mapped.squares(near), exact_B, rtol=1e-5, atol=0)


@pytest.mark.parametrize("apart", [1e-6, 1e-7, 1e-8, 1e-9])
@KINDS
def test_where_all_but_rounding_cancels_the_norm_is_overestimated(kind, apart):
    mapped, records = list(example_cases((1.0, -1.0), torch.float64))[kind]
    many = each_leaf(records, lambda z: z.repeat(8, *[1] * (z.dim() - 1)))
    near = nearly_equal(many, apart, torch.float64)
    exact_B = answers_of(mapped, near).flatten(1).square().sum(1)
    alone_B = mapped.squares(Records((1.0,), near.inputs[:1], near.grads[:1]))
    squares_B = mapped.squares(near)
    assert (squares_B >= exact_B * (1 - 1e-6)).all()
    assert (squares_B - exact_B <= 1e-13 * alone_B).all()


@KINDS
def test_points_that_cancel_wholly_have_a_norm_of_almost_nothing(kind):
    mapped, records = list(example_cases((1.0, -1.0), torch.float64))[kind]
    same = nearly_equal(records, 0.0, torch.float64)
    alone_B = mapped.squares(Records((1.0,), same.inputs[:1], same.grads[:1]))
    assert (mapped.squares(same) <= 1e-13 * alone_B).all()
    assert (mapped.squares(same) >= 0).all()


def each_leaf(records: Records, change) -> Records:
    inputs, grads = (tuple(map(change, leaf)) for leaf in (records.inputs, records.grads))
    return Records(records.weights, inputs, grads)


def nearly_equal(records: Records, apart: float, dtype: torch.dtype) -> Records:
    """The second point at a relative distance of about `apart` from the first."""
    inputs, grads = (
        (near.to(dtype), (near + apart * far).to(dtype))
        for near, far in (map(Tensor.double, leaf) for leaf in (records.inputs, records.grads))
    )
    return Records(records.weights, inputs, grads)


def answers_of(mapped: ConvMap | CirculantMap, records: Records) -> Tensor:
    """The reference's answers for the layers of `example_cases`."""
    if isinstance(mapped, ConvMap):
        return conv_answers(conv({"kernel_size": 3, "padding": 1}), records, mapped.torus)
    return circulant_answers(CirculantLinear(24, 16, 8), records)


@pytest.mark.parametrize("n", [1, 2, 3, 8, 9, 15, 20, 49])
@pytest.mark.parametrize("keep", [1.0, 0.9, 0.75, 0.5, 0.25, 0.1])
def test_low_pass_lets_exactly_its_share_of_white_noise_through(n, keep):
    keep = max(keep, 1 / n)
    gains = low_pass_response(n, keep)
    assert gains.dtype == torch.float64
    assert gains[0] == 1
    assert (gains.diff() <= 0).all()
    full = [gains[min(f, n - f)].item() for f in range(n)]
    assert sum(g**2 for g in full) == pytest.approx(keep * n, rel=1e-12)
    assert full == pytest.approx(amplitude(n, keep), abs=1e-7)
    assert sum(0 < g < 1 - 1e-7 for g in gains.tolist()) <= 1


def test_keep_one_is_no_filter():
    assert torch.equal(low_pass_response(9, 1.0), torch.ones(5, dtype=torch.float64))
    assert torch.equal(low_pass_response(10, 1.0), torch.ones(6, dtype=torch.float64))


@pytest.mark.parametrize("keep", [0.0, -0.5, 1.01, math.nan, math.inf])
def test_keep_outside_the_unit_interval_is_refused(keep):
    message = rf"keep must lie in \(0, 1\], got {keep}"
    with pytest.raises(ValueError, match=message):
        ConvMap.of(conv({"kernel_size": 3}), IMAGE, keep)
    with pytest.raises(ValueError, match=message):
        CirculantMap.of(CirculantLinear(24, 16, 8), keep)


def test_keep_that_would_shrink_a_constant_is_refused_with_one_that_works():
    layer = CirculantLinear(18, 12, 6)
    message = (
        r"keep = 0\.1 passes 0\.6 of this layer's 6 frequencies.*Raise keep to 0\.1667 or more"
    )
    with pytest.raises(ValueError, match=message):
        CirculantMap.of(layer, 0.1)
    assert CirculantMap.of(layer, 0.1667).white_shape == (2, 3, 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stride": 2}, r"stride = \(1, 1\), got \(2, 2\)\. Use stride 1 and pool"),
        ({"stride": (1, 2)}, r"stride = \(1, 1\), got \(1, 2\)"),
        ({"dilation": 2}, r"dilation = \(1, 1\), got \(2, 2\)\. Use dilation 1"),
        ({"padding": 1, "padding_mode": "reflect"}, r"padding_mode = zeros, got reflect"),
    ],
)
def test_other_convolutions_are_refused(options, message):
    with pytest.raises(ValueError, match="Spectral-DP handles Conv2d with " + message):
        ConvMap.of(conv({"kernel_size": 3, **options}), IMAGE, 0.5)


def test_grouped_convolution_is_refused():
    layer = nn.Conv2d(4, 8, 3, groups=2)
    with pytest.raises(ValueError, match=r"groups = 1, got 2\. Use groups 1"):
        ConvMap.of(layer, (4, 7, 9), 0.5)


@pytest.mark.gpu
@KINDS
def test_gpu_agrees_with_cpu(kind):
    mapped, records = list(example_cases())[kind]
    there = each_leaf(records, Tensor.cuda)
    factor_B = torch.linspace(0, 1, EXAMPLES)
    torch.testing.assert_close(mapped.squares(there).cpu(), mapped.squares(records))
    white = mapped.coordinates(records, factor_B)
    torch.testing.assert_close(mapped.coordinates(there, factor_B.cuda()).cpu(), white)
    torch.testing.assert_close(mapped.restore(white.cuda()).cpu(), mapped.restore(white))
