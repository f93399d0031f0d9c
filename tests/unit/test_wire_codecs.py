import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from swarm_peer.codecs import CODECS, NEED_FEEDBACK, blockwise, hadamard
from swarm_peer.errors import InvalidMessage
from swarm_peer.model.gradient_norm import ROUNDING
from swarm_peer.wire.codecs import decode, decode_tokens, encode, encode_tokens, encoded_bytes, rounding_seed

# Largest relative L2 error of a round trip of normally distributed values.
ERRORS = {"none": 0.0, "fp16": 4e-4, "bf16": 3e-3, "blockwise_8bit": 0.02, "int5_hadamard": 0.06, "int4_hadamard": 0.1}
# The others leave most of the values out: test_codecs_feedback.py.
EACH = pytest.mark.parametrize("codec", [codec for codec in CODECS if codec not in NEED_FEEDBACK])
SHAPES = [(1,), (255,), (256,), (257,), (2, 3, 5), (1, 7, 41), (3, 16, 24), (2, 13, 96)]


def values(shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def relative_error(tensor, expected):
    return float((tensor - expected).norm() / expected.norm())


@EACH
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_round_trip(codec, shape):
    tensor = values(shape)
    data = encode(tensor, codec)
    assert len(data) == data.nbytes == encoded_bytes(shape, codec)
    again = decode(data, shape, codec)
    assert again.shape == tensor.shape
    assert again.dtype == torch.float32
    assert relative_error(again, tensor) <= ERRORS[codec]


@pytest.mark.parametrize(
    ("codec", "expected"),
    [
        ("none", 4 * 513),
        ("fp16", 2 * 513),
        ("bf16", 2 * 513),
        ("blockwise_8bit", 513 + 4 * 3),
        ("int5_hadamard", 9 * (40 + 2)),
        ("int4_hadamard", 9 * (32 + 2)),
    ],
)
def test_lengths(codec, expected):
    assert encoded_bytes((27, 19), codec) == expected


def test_an_unknown_codec_has_no_size():
    with pytest.raises(KeyError, match="int4"):
        encoded_bytes((300,), "int4")


@EACH
def test_outliers_spoil_their_own_block_at_most(codec):
    tensor = values((4 * blockwise.BLOCK_SIZE,))
    tensor[0] = 1000.0
    again = decode(encode(tensor, codec), tensor.shape, codec)
    assert relative_error(again, tensor) <= ERRORS[codec]
    assert relative_error(again[blockwise.BLOCK_SIZE :], tensor[blockwise.BLOCK_SIZE :]) <= ERRORS[codec]


@EACH
def test_zeros_stay_zeros(codec):
    assert not decode(encode(torch.zeros(2, 300), codec), (2, 300), codec).any()


@EACH
@pytest.mark.parametrize("scale", [1e-5, 1e4])
def test_the_error_does_not_grow_with_the_scale(codec, scale):
    tensor = values((500,)) * scale
    # fp16 has lost digits at 1e-5 already.
    bound = 4e-2 if codec == "fp16" and scale < 1 else ERRORS[codec]
    assert relative_error(decode(encode(tensor, codec), (500,), codec), tensor) <= bound


@EACH
@pytest.mark.parametrize("make", [lambda t: t.T, lambda t: t.double(), lambda t: t.bfloat16(), lambda t: t[:, ::2]])
def test_tensors_of_any_layout_and_float_type_go(codec, make):
    tensor = make(values((6, 8)))
    again = decode(encode(tensor, codec), tensor.shape, codec)
    assert relative_error(again, tensor.float()) <= ERRORS[codec]


@EACH
def test_a_graph_does_not_travel(codec):
    tensor = values((10,)).requires_grad_()
    assert not decode(encode(tensor, codec), (10,), codec).requires_grad


@EACH
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("position", [0, 100, 256, 299])
def test_what_is_not_finite_is_not_sent(codec, bad, position):
    tensor = values((300,))
    tensor[position] = bad
    with pytest.raises(OverflowError):
        encode(tensor, codec)


def test_what_leaves_the_range_of_fp16_is_cut_to_it():
    tensor = torch.full((3,), 70000.0)
    assert decode(encode(torch.tensor([7e4, -7e4, 1.0]), "fp16"), (3,), "fp16").tolist() == [65504.0, -65504.0, 1.0]
    for codec in ("none", "bf16", "blockwise_8bit", "int5_hadamard", "int4_hadamard"):
        assert relative_error(decode(encode(tensor, codec), (3,), codec), tensor) <= ERRORS[codec]


@pytest.mark.parametrize(
    ("codec", "dtype"), [("none", torch.float32), ("fp16", torch.float16), ("bf16", torch.bfloat16)]
)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_not_taken(codec, dtype, bad):
    tensor = values((2, 5)).to(dtype)
    tensor[1, 3] = bad
    data = memoryview(tensor.view(-1).view(torch.uint8).numpy())
    with pytest.raises(InvalidMessage, match=r"tensor of shape \(2, 5\) holds non-finite numbers"):
        decode(data, (2, 5), codec)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("block", [0, 1])
def test_scales_that_are_not_finite_are_not_taken(bad, block):
    data = encode(values((300,)), "blockwise_8bit")
    torch.frombuffer(data, dtype=torch.float32, count=2)[block] = bad
    with pytest.raises(InvalidMessage, match="non-finite"):
        decode(data, (300,), "blockwise_8bit")


@EACH
@pytest.mark.parametrize("shape", [(2, 3, 5), (300,)], ids=str)
def test_wrong_lengths_are_refused(codec, shape):
    data = bytearray(encode(values(shape), codec))
    for wrong in (data[:-1], data + b"\0", bytearray(), data[: len(data) // 2]):
        with pytest.raises(InvalidMessage, match=f"tensor of {len(wrong)} bytes; {len(data)} are right"):
            decode(memoryview(wrong), shape, codec)


@EACH
@given(data=st.data())
def test_whatever_has_the_right_length_is_refused_or_finite(codec, data):
    shape = (1, data.draw(st.integers(1, 9)))
    num_bytes = encoded_bytes(shape, codec)
    raw = bytearray(data.draw(st.binary(min_size=num_bytes, max_size=num_bytes)))
    try:
        tensor = decode(memoryview(raw), shape, codec)
    except InvalidMessage:
        return
    assert tensor.shape == shape
    assert tensor.isfinite().all()


# --- int4_hadamard and int5_hadamard ----------------------------------------------------------------------------------

# Normal, Laplace, Student's t of 3 degrees, and one number of each block 50 times as large: the errors in the
# docstring of codecs/hadamard.py, rounded to nearest and stochastically.
LAWS = {
    "normal": {"int4_hadamard": (0.093, 0.136), "int5_hadamard": (0.047, 0.067)},
    "laplace": {"int4_hadamard": (0.091, 0.134), "int5_hadamard": (0.046, 0.066)},
    "student": {"int4_hadamard": (0.085, 0.125), "int5_hadamard": (0.044, 0.062)},
    "outliers": {"int4_hadamard": (0.049, 0.072), "int5_hadamard": (0.024, 0.034)},
}
# The bits of a number.
HADAMARD = {"int4_hadamard": 4, "int5_hadamard": 5}
HADAMARDS = pytest.mark.parametrize("codec", HADAMARD)


def drawn(law, num_blocks=4000):
    generator = torch.Generator().manual_seed(1)
    normal = torch.randn(num_blocks, hadamard.BLOCK_SIZE, generator=generator)
    if law == "laplace":
        uniform = torch.rand(normal.shape, generator=generator) - 0.5
        return -uniform.sign() * torch.log1p(-2 * uniform.abs())
    if law == "student":
        return normal / torch.randn(3, *normal.shape, generator=generator).square().mean(0).sqrt()
    if law == "outliers":
        normal[:, 5] *= 50
    return normal


def sent(tensor, codec, seed=None):
    return decode(encode(tensor, codec, seed), tensor.shape, codec)


@HADAMARDS
@pytest.mark.parametrize("law", LAWS)
def test_few_bits_cost_the_error_that_is_written_down(law, codec):
    tensor, (nearest, stochastic) = drawn(law), LAWS[law][codec]
    assert relative_error(sent(tensor, codec), tensor) == pytest.approx(nearest, rel=0.03)
    assert relative_error(sent(tensor, codec, 3), tensor) == pytest.approx(stochastic, rel=0.03)


@HADAMARDS
def test_the_error_is_that_of_theory_and_some_times_that_of_8_bits(codec):
    """An even quantiser's error is a step / sqrt(12) to nearest, a step / sqrt(6) stochastically."""
    tensor, bits = drawn("normal"), HADAMARD[codec]
    rotated = tensor @ hadamard._rotation(torch.device("cpu")) / 8
    largest = float(rotated.abs().amax(1).square().mean().sqrt() / rotated.square().mean().sqrt())
    assert largest == pytest.approx(2.63, abs=0.02), "in standard deviations, of 64 normal numbers"
    # It takes so many steps, or one fewer.
    most = 2 ** (bits - 1)
    low, high = largest / most, largest / (most - 1)
    finer = {4: 0.95, 5: 0.98}[bits]
    assert low < relative_error(sent(tensor, codec, 1), tensor) * math.sqrt(6) < high
    assert finer * low < relative_error(sent(tensor, codec), tensor) * math.sqrt(12) < finer * high
    of_8_bits = relative_error(sent(tensor, "blockwise_8bit"), tensor)
    assert 5 < relative_error(sent(tensor, codec), tensor) / of_8_bits * 2 ** (bits - 4) < 12


@HADAMARDS
@pytest.mark.parametrize("law", LAWS)
def test_stochastic_rounding_has_no_bias(law, codec):
    tensor, tries = drawn(law, 20), 100
    mean = torch.stack([sent(tensor, codec, seed) for seed in range(tries)]).mean(0)
    assert relative_error(mean, tensor) == pytest.approx(LAWS[law][codec][1] / math.sqrt(tries), rel=0.15)
    # To nearest the error stays, however often.
    assert relative_error(sent(tensor, codec), tensor) > 5 * relative_error(mean, tensor)


@HADAMARDS
def test_a_seed_names_the_bytes(codec):
    tensor = drawn("normal", 9000)  # more than are worked on at a time
    data = bytes(encode(tensor, codec, 7))
    assert data == bytes(encode(tensor.clone(), codec, 7))
    assert data != bytes(encode(tensor, codec, 8))
    assert bytes(encode(tensor, codec)) == bytes(encode(tensor, codec))
    # The first piece of a long tensor is encoded like a short one; the random bits are those of numpy's SFC64.
    short = sent(tensor[:4096], codec, 7)
    assert torch.equal(sent(tensor, codec, 7)[:4096], short)
    assert encode(torch.arange(64.0) - 20, codec, 5).tobytes().hex() == GOLDEN[codec]


# Other bytes than these are another codec: peers of one run may have several versions of numpy and torch.
GOLDEN = {
    "int4_hadamard": "d6c02e3dd13ce31449d2b3f0e096e21fce3f113d4cc22e5b94f348e02bf03fc6ee3f",
    "int5_hadamard": "56c04c5aa167c71782b355dfc03bc51d9b7e215b89835c9728e580df46f06e8cdc5d29af3ce13c86eb5a",
}


@HADAMARDS
def test_decoding_is_exact_so_all_processors_agree(codec):
    """Members of an averaging round decode the same bytes, and vote on what they got."""
    tensor = drawn("student", 300)
    data = encode(tensor, codec, 1)
    steps = torch.frombuffer(data, dtype=torch.bfloat16, count=300).double()
    codes = np.frombuffer(data, dtype=np.uint8, offset=600).reshape(-1, 300)
    whole = np.concatenate([codes[:32] & 15, codes[:32] >> 4]).astype(np.float64)
    if codec == "int4_hadamard":
        whole -= 16 * (whole >= 8)
    else:
        signs = np.unpackbits(codes[32:, None, :], axis=1, bitorder="little")  # (8 rows, 8 places, 300)
        whole -= 16 * signs.transpose(1, 0, 2).reshape(64, 300)
    rotation = hadamard._rotation(torch.device("cpu")).double()
    exact = (torch.from_numpy(whole) * steps / 8).T @ rotation.T
    assert torch.equal(decode(data, tensor.shape, codec).double(), exact)


@pytest.mark.parametrize("codec", ["none", "fp16", "bf16", "blockwise_8bit"])
def test_other_codecs_need_no_seed(codec):
    tensor = values((300,))
    assert bytes(encode(tensor, codec, 5)) == bytes(encode(tensor, codec))


def test_seeds_differ_by_name_and_are_the_same_everywhere():
    names = [(b"a", 0), (b"a", 1), (b"b", 0), (b"a0",), ("a", 0)]
    assert len({rounding_seed(*name) for name in names}) == len(names)
    assert rounding_seed(bytes(16), 1) == 10232212917515766432
    assert all(0 <= rounding_seed(*name) < 2**64 for name in names)


@HADAMARDS
@pytest.mark.parametrize("seed", [None, 1])
@pytest.mark.parametrize("values", [[3.0], [0.0, 0.0, -5.0], [1.0] * 64, [-2.0] * 65, [1e36, -1e36], [1e-30, 2e-30]])
def test_odd_blocks_survive(values, seed, codec):
    tensor = torch.tensor(values)
    assert relative_error(sent(tensor, codec, seed).double(), tensor.double()) < 0.25


@HADAMARDS
@pytest.mark.parametrize("seed", [None, 1])
def test_what_is_beyond_all_use_is_clipped_or_zero(seed, codec):
    largest = torch.tensor([3.4e38, -3.4e38, 1.0])
    assert sent(largest, codec, seed).abs().max() == pytest.approx(2.0**120, rel=0.2)
    assert sent(torch.full((70,), 3.4e38), codec, seed).isfinite().all()
    assert not sent(torch.full((3,), 1e-40), codec, seed).any()
    assert sent(torch.tensor([1e300, -1e300], dtype=torch.float64), codec, seed).isfinite().all()


@HADAMARDS
@pytest.mark.parametrize("seed", [None, 1])
def test_no_gradient_grows_by_more_than_receivers_accept(seed, codec):
    """The worst one: after the transform a number of 8 or 16 steps, and others of just over half a step."""
    most = 2 ** (HADAMARD[codec] - 1)
    rotated = torch.full((1, hadamard.BLOCK_SIZE), 0.48 if most == 8 else 0.495)
    rotated[0, 0] = -most
    block = rotated @ hadamard._rotation(torch.device("cpu")).T / 8
    growth = float(sent(block, codec, seed).norm() / block.norm())
    least = 1.0 if seed is not None else 1.2 if most == 8 else 1.05
    assert least < growth < ROUNDING


@HADAMARDS
def test_a_row_of_nothing_goes(codec):
    assert len(encode(torch.empty(2, 0), codec)) == 0
    assert decode(memoryview(bytearray()), (2, 0), codec).shape == (2, 0)


@HADAMARDS
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 3e38])
@pytest.mark.parametrize("block", [0, 1, 4])
def test_steps_that_are_not_finite_are_not_taken(bad, block, codec):
    data = encode(values((300,)), codec)
    torch.frombuffer(data, dtype=torch.bfloat16, count=5)[block] = bad
    with pytest.raises(InvalidMessage, match="non-finite"):
        decode(data, (300,), codec)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@HADAMARDS
@pytest.mark.parametrize("seed", [None, 3])
def test_a_gpu_rounds_as_a_cpu_does(seed, codec):
    tensor = drawn("normal", 9000)
    on_gpu = encode(tensor.cuda(), codec, seed)
    again = decode(on_gpu, tensor.shape, codec)
    # Sums differ by their last digit, so a few numbers of a million are rounded to the next step.
    assert relative_error(again, sent(tensor, codec, seed)) < 5e-3


# --- tokens -----------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 60), min_size=1, max_size=50))
def test_tokens_survive(ids):
    tokens_BS = torch.tensor([ids])
    again = decode_tokens(encode_tokens(tokens_BS), tokens_BS.shape, 61)
    assert torch.equal(again, tokens_BS)
    assert again.dtype == torch.int64


@pytest.mark.parametrize("bad", [-1, 61, 2**31 - 1, -(2**31)])
@pytest.mark.parametrize("position", [0, 2, 5])
def test_tokens_outside_of_the_vocabulary_are_refused(bad, position):
    tokens_BS = torch.tensor([[0, 60, 3], [4, 5, 6]])
    tokens_BS.view(-1)[position] = bad
    with pytest.raises(InvalidMessage, match="outside of the vocabulary of 61"):
        decode_tokens(encode_tokens(tokens_BS), (2, 3), 61)


@pytest.mark.parametrize("num_bytes", [0, 23, 25, 48])
def test_tokens_of_a_wrong_length_are_refused(num_bytes):
    with pytest.raises(InvalidMessage, match=f"{num_bytes} bytes of tokens; 24 are right"):
        decode_tokens(memoryview(bytearray(num_bytes)), (2, 3), 61)
