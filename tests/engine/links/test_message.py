"""Messages of the pipeline links: what is packed comes out, and buffers are used again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_vpipe.engine.links.message import (
    HEADER_BYTES,
    MOST_BYTES,
    MalformedMessageError,
    Message,
    Packer,
    Received,
    announcement,
    described,
    leaves,
    left_out,
    unpack,
)
from ds_vpipe.engine.links.tensor_bytes import TensorBytes
from ds_vpipe.errors import VPipeError

FLOATING = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128]
OTHERS = [torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.bool]


def sample(dtype: torch.dtype, *shape: int, grad: bool = False) -> torch.Tensor:
    values = torch.arange(1, 1 + torch.Size(shape).numel()).reshape(shape)
    return (values % 2 == 0 if dtype == torch.bool else values.to(dtype)).requires_grad_(grad)


def assert_same(got: Any, wanted: Any) -> None:
    assert type(got) is type(wanted)
    if isinstance(wanted, torch.Tensor):
        assert (got.dtype, got.shape, got.requires_grad) == (wanted.dtype, wanted.shape, wanted.requires_grad)
        assert torch.equal(got, wanted)
        assert got.stride() == wanted.stride()
    elif wanted is not None:
        assert len(got) == len(wanted)
        for one, other in zip(got, wanted, strict=True):
            assert_same(one, other)


def through(tree: Any, extra: int = 0) -> Any:
    """The tree after its trip, in a receive buffer that is ``extra`` bytes longer than the message."""
    packed = Packer().pack(Message.ACTIVATION, 7, tree, note=11)
    buffer = torch.full((packed.size + extra,), 0xA5, dtype=torch.uint8)
    buffer[: packed.size] = packed.data
    message = unpack(buffer)
    assert (message.kind, message.micro_batch, message.note) == (Message.ACTIVATION, 7, 11)
    assert message.size == packed.size
    return message.tree


@pytest.mark.parametrize("dtype", [*FLOATING, *OTHERS], ids=str)
def test_every_dtype(dtype: torch.dtype) -> None:
    tree = (sample(dtype, 3, 5), None, sample(dtype), sample(dtype, 0, 4), sample(dtype, 1))
    assert_same(through(tree), tree)


@pytest.mark.parametrize("dtype", FLOATING, ids=str)
def test_requires_grad_of_each_tensor(dtype: torch.dtype) -> None:
    tree = (sample(dtype, 2, grad=True), sample(dtype, 2), sample(torch.int64, 2), sample(dtype, grad=True))
    got = through(tree)
    assert_same(got, tree)
    assert all(tensor.is_leaf and tensor.grad_fn is None for tensor in got)


def test_outputs_of_a_graph_become_leaves() -> None:
    output = sample(torch.float32, 3, grad=True) * 2
    got = through(output)
    assert got.is_leaf
    assert got.requires_grad
    assert torch.equal(got, output)


@pytest.mark.parametrize(
    "tree",
    [None, (), [], (None,), ((), [None, ()]), sample(torch.float32, 2), [sample(torch.bool, 3), (sample(torch.int8),)]],
    ids=repr,
)
@pytest.mark.parametrize("extra", [0, 1, 64, 5000])
def test_trees_in_longer_buffers(tree: Any, extra: int) -> None:
    assert_same(through(tree, extra), tree)


def test_non_contiguous() -> None:
    base = sample(torch.float32, 4, 6)
    windows = base.unfold(1, 4, 1), base.unfold(1, 3, 2)  # these have one element in common
    tree = (base.t(), base[:, ::2], base[1:, 2:5], base[0].expand(3, 6), base.flip(0), *windows)
    assert_same(through(tree), tree)


def test_overlapping_elements_that_stay_on_another_stage() -> None:
    """What a meta tensor would take is counted, and it has no bytes of its own in the message."""
    tree = torch.empty(4, device="meta").as_strided((3, 2), (1, 1))
    found = unpack(Packer().pack(Message.ACTIVATION, 0, tree).data).tree
    assert (found.is_meta, found.shape, found.stride()) == (True, (3, 2), (1, 1))


def test_empty_tensors_elsewhere_take_no_memory() -> None:
    """Such as the mark of a plain model's call, whose last size is a fingerprint."""
    found = unpack(Packer().pack(Message.ACTIVATION, 0, torch.empty(2, 0, 2**59, device="meta")).data).tree
    assert (found.is_meta, found.shape) == (True, (2, 0, 2**59))


def test_overlapping_elements_of_an_empty_tensor() -> None:
    tree = (sample(torch.float32, 4, 0).unfold(0, 3, 1).transpose(1, 2), sample(torch.float32, 2))
    assert_same(through(tree), tree)


def test_gaps_and_expanded_elements_do_not_travel() -> None:
    base = sample(torch.float32, 64, 6)
    for tensor, count in ((base[:, 2], 64), (base[:, 1:3].expand(9, 64, 2), 128), (base[:, 0, None].expand(64, 6), 64)):
        dense = torch.zeros(count).reshape([1] * (tensor.dim() - 1) + [count])
        assert described(tensor)[0].size == described(dense)[0].size


def in_layout(tensor: torch.Tensor, steps: list[int], seed: int, expanded: int) -> torch.Tensor:
    """With every ``steps`` element of its dimensions, in another order of them, and expanded."""
    for dim, step in zip(range(tensor.dim()), steps, strict=False):
        tensor = tensor[(slice(None),) * dim + (slice(None, None, step),)]
    tensor = tensor.permute(torch.randperm(tensor.dim(), generator=torch.Generator().manual_seed(seed)).tolist())
    return tensor.expand(expanded, *tensor.shape) if expanded else tensor


TENSORS = st.builds(
    lambda dtype, shape, steps, seed, expanded, grad: in_layout(
        sample(dtype, *shape), steps, seed, expanded
    ).requires_grad_(grad and dtype in FLOATING),
    st.sampled_from([*FLOATING, *OTHERS]),
    st.lists(st.integers(0, 4), max_size=3),
    st.lists(st.integers(1, 3), max_size=3),
    st.integers(0, 9),
    st.integers(0, 3),
    st.booleans(),
)
TREES = st.recursive(
    st.none() | TENSORS,
    lambda trees: st.lists(trees, max_size=4) | st.lists(trees, max_size=4).map(tuple),
    max_leaves=8,
)


@given(tree=TREES, extra=st.integers(0, 300))
def test_any_tree(tree: Any, extra: int) -> None:
    assert_same(through(tree, extra), tree)


@given(trees=st.lists(TREES, min_size=1, max_size=6))
@settings(max_examples=50)
def test_one_packer_for_changing_layouts(trees: list[Any]) -> None:
    packer = Packer()
    for number, tree in enumerate([*trees, *trees]):
        packed = packer.pack(Message.GRADIENT, number, tree)
        message = unpack(packed.data.clone())
        assert (message.kind, message.micro_batch) == (Message.GRADIENT, number)
        assert_same(message.tree, tree)
        packer.release(packed)


def test_tensors_are_aligned_views_of_the_buffer() -> None:
    packed = Packer().pack(Message.ACTIVATION, 0, (sample(torch.bool, 3), sample(torch.float64, 5), sample(torch.int8)))
    assert packed.size % 64 == 0
    start = packed.data.data_ptr()
    for tensor in unpack(packed.data).tree:
        assert (tensor.data_ptr() - start) % 64 == 0
        assert tensor.untyped_storage().data_ptr() == packed.data.untyped_storage().data_ptr()


def test_a_packed_message_is_a_copy() -> None:
    tensor = sample(torch.float32, 3)
    packed = Packer().pack(Message.ACTIVATION, 0, tensor)
    tensor.zero_()
    assert unpack(packed.data).tree.tolist() == [1, 2, 3]


def test_released_buffers_are_used_again_while_the_layout_stays() -> None:
    packer = Packer()
    first, second = (packer.pack(Message.ACTIVATION, n, sample(torch.float32, 4)) for n in range(2))
    assert first is not second
    packer.release(first)
    assert packer.pack(Message.GRADIENT, 9, sample(torch.float32, 4) + 1, note=5) is first
    message = unpack(first.data)
    assert (message.kind, message.micro_batch, message.note) == (Message.GRADIENT, 9, 5)
    assert message.tree.tolist() == [2, 3, 4, 5]
    assert unpack(second.data).tree.tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize(
    "other",
    [
        sample(torch.float32, 5),
        sample(torch.int32, 4),
        sample(torch.float32, 4, grad=True),
        (sample(torch.float32, 4),),
    ],
    ids=["shape", "dtype", "requires_grad", "tree"],
)
def test_buffers_of_another_layout_are_not_used_again(other: Any) -> None:
    packer = Packer()
    old = packer.pack(Message.ACTIVATION, 0, sample(torch.float32, 4))
    new = packer.pack(Message.ACTIVATION, 1, other)
    packer.release(old)  # delivered only after the layout had changed
    again = packer.pack(Message.ACTIVATION, 2, other)
    assert again is not old
    packer.release(new)
    assert packer.pack(Message.ACTIVATION, 3, other) is new
    assert packer.pack(Message.ACTIVATION, 4, sample(torch.float32, 4)) is old  # the two latest layouts are kept
    packer.pack(Message.ACTIVATION, 5, sample(torch.float32, 7))
    packer.release(old)
    assert packer.pack(Message.ACTIVATION, 6, sample(torch.float32, 4)) is not old


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        ((sample(torch.float32, 2), 3), "got int, allowed are tensors, None and tuples or lists of them"),
        ({"a": sample(torch.float32, 2)}, "got dict, allowed are tensors"),
        ("text", "got str"),
        (
            torch.eye(2).to_sparse(),
            r"got a tensor of layout sparse_coo, allowed is a strided one; pass its \.to_dense\(\)",
        ),
        (
            torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
            "got a nested tensor, allowed is a strided one; pass ",
        ),
        (torch.zeros(2, dtype=torch.uint16), r"got a tensor of dtype torch\.uint16, allowed are float32, .*bool"),
    ],
)
def test_refused_values(tree: Any, words: str) -> None:
    packer = Packer()
    good = packer.pack(Message.ACTIVATION, 0, sample(torch.float32, 2))
    with pytest.raises(VPipeError, match=f"^stage boundary: {words}") as error:
        packer.pack(Message.ACTIVATION, 1, tree)
    assert "\n" not in str(error.value)
    packer.release(good)
    assert packer.pack(Message.ACTIVATION, 1, sample(torch.float32, 2)) is good  # a refusal changes nothing


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        (torch.eye(2).to_sparse(), r"layout sparse_coo, .* pass its \.to_dense\(\)"),
        (torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), r"nested .* pass its \.to_padded_tensor\(0\)"),
    ],
)
def test_refused_values_of_an_accelerator(tensor: torch.Tensor, words: str) -> None:
    with pytest.raises(VPipeError, match=f"^stage boundary: got a .*{words}"):
        left_out((tensor,), lambda one: True)


def test_what_no_host_has_memory_for_is_refused_where_it_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ds_vpipe.engine.links.message.MOST_BYTES", 10_000)
    with pytest.raises(VPipeError, match=r"^stage boundary: got a tensor of shape \(1013,\) .* pass \.contiguous\(\)"):
        described(torch.ones(1013, 3)[:, 1])


def test_announcement() -> None:
    data = announcement(123_456_789_000)
    assert data.numel() <= HEADER_BYTES
    message = unpack(data)
    assert message.kind is Message.OVERSIZE
    assert message.size == 123_456_789_000
    assert message.tree is None


def test_leaves_from_left_to_right() -> None:
    one, two = sample(torch.float32), sample(torch.int8)
    assert [id(leaf) for leaf in leaves((one, [None, (two,)], None))] == [id(one), id(None), id(two), id(None)]


@pytest.mark.parametrize("way", ["within", "beside"])
def test_tensors_of_a_message_may_be_changed_apart(way: str) -> None:
    """Autograd counts changes of each: a layer may save one and write to another, as with tensors of its own."""
    tree = tuple(torch.full((3,), float(n), requires_grad=n == 2) for n in range(3))
    if way == "beside":
        layout = TensorBytes.of(tree)
        data = torch.empty(layout.size, dtype=torch.uint8)
        layout.pack(data)
        written, saved, weight = layout.unpack(data)
    else:
        written, saved, weight = unpack(Packer().pack(Message.ACTIVATION, 0, tree).data).tree
    output = saved * weight
    written.add_(1)
    output.sum().backward()
    assert weight.grad.tolist() == [1, 1, 1]
    assert written.tolist() == [1, 1, 1]


def read(data: torch.Tensor, words: Sequence[int] = ()) -> Received | MalformedMessageError:
    """The message or the refusal, which is one line; anything else would end the test. ``words`` are put into it."""
    if words:
        header = data.view(torch.int64)
        header[:3] = torch.tensor([len(data), 5 + len(words), 1])
        header[5 : 5 + len(words)] = torch.tensor(words)
    try:
        return unpack(data)
    except MalformedMessageError as error:
        return error


def check(result: Received | MalformedMessageError, data: torch.Tensor) -> None:
    """A refusal in one line, or tensors that lie in memory of theirs: an expanded one may claim any size."""
    if isinstance(result, MalformedMessageError):
        assert str(result)
        assert "\n" not in str(result)
        return
    assert isinstance(result.kind, Message)
    assert result.size <= len(data) or result.kind is Message.OVERSIZE
    with_gaps = 0
    for leaf in leaves(result.tree):
        if leaf is None or leaf.numel() == 0 or leaf.is_meta:
            continue
        last = leaf.storage_offset() + sum((n - 1) * s for n, s in zip(leaf.shape, leaf.stride(), strict=True))
        assert 0 <= last < leaf.untyped_storage().nbytes() // leaf.itemsize
        for corner in (0, -1):
            leaf.detach()[(corner,) * leaf.dim()].item()
        if leaf.untyped_storage().data_ptr() != data.untyped_storage().data_ptr():
            with_gaps += leaf.untyped_storage().nbytes()
    assert with_gaps <= MOST_BYTES


@pytest.mark.parametrize("code", [-4, 12])
def test_a_code_of_no_dtype_is_refused(code: int) -> None:
    result = read(torch.zeros(HEADER_BYTES, dtype=torch.uint8), [code, 0, 1, 1, 1])
    assert str(result) == f"{code} stands for no dtype"


@given(content=st.binary(max_size=400))
def test_any_bytes_are_a_message_or_one_line(content: bytes) -> None:
    data = torch.tensor(list(content), dtype=torch.uint8)
    check(read(data), data)


WORDS = st.integers(-4, 20) | st.integers(-(2**63), 2**63 - 1) | st.sampled_from([2**31, 2**40, 2**62, 4096, 64])


@given(tree=TREES, changes=st.lists(st.tuples(st.integers(0, 40), WORDS), min_size=1, max_size=3))
@settings(max_examples=300)
def test_a_header_with_other_words_is_a_message_or_one_line(tree: Any, changes: list[tuple[int, int]]) -> None:
    packed = Packer().pack(Message.ACTIVATION, 7, tree)
    words = packed.form.words
    data = packed.data.clone()
    header = data.view(torch.int64)
    for place, word in changes:
        header[place % min(len(header), 5 + len(words))] = word
    check(read(data), data)


def test_nothing_is_allocated_for_what_a_header_claims() -> None:
    column = torch.ones(64, 6)[:, 2]
    data = Packer().pack(Message.ACTIVATION, 0, column).data
    header = data.view(torch.int64)
    at = header.tolist().index(6, 5)  # its stride
    header[at] = 2**40
    assert "does not fit" in str(read(data))
    header[at] = 6
    assert isinstance(read(data), Received)
    halves = Packer().pack(Message.ACTIVATION, 0, (column, column)).data
    words = halves.view(torch.int64)
    for place in [at for at, word in enumerate(words.tolist()[: int(words[1])]) if word == 6]:
        words[place] = MOST_BYTES // (63 * 4) - 64  # each fits alone
    assert "does not fit" in str(read(halves))
    for size in (len(data) + 64, len(data) - 64, 2**60, -1):
        header[0] = size
        assert f"says that it has {size} bytes" in str(read(data))


def test_a_message_that_is_longer_than_its_buffer_is_refused() -> None:
    form, data = described(sample(torch.float32, 1000))[0], torch.zeros(256, dtype=torch.uint8)
    assert str(read(data, form.words)) == f"a message of {form.size} bytes does not fit into 256"
    assert data.untyped_storage().nbytes() == 256


def test_words_nested_too_deep() -> None:
    words = [-2, 1] * 100_000 + [-1]
    data = torch.zeros(8 * (5 + len(words)), dtype=torch.uint8)
    data.view(torch.int64)[:] = torch.tensor([len(data), 5 + len(words), 1, 0, 0, *words])
    assert "RecursionError" in str(read(data))
