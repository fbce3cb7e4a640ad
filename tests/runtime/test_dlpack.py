"""DLPack: numpy and PyTorch read what we hand out, and we what they do. In host memory, where all three work."""

import gc
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from vitdeploy.errors import TensorError
from vitdeploy.runtime import cuda as dlpack
from vitdeploy.runtime.cuda import DeviceArray, borrow

DTYPES = ["float32", "float16", "int8", "uint8", "int32", "int64", "bool"]
HOST = (dlpack.CPU, 0)


class Owner:
    """An array in host memory that is offered as ours are in device memory."""

    def __init__(self, array):
        self.array = array

    def __dlpack_device__(self):
        return HOST

    def __dlpack__(self, **_):
        return dlpack.export(self.array.ctypes.data, self.array.shape, self.array.dtype.name, HOST, self)


def sample(dtype, shape=(2, 3, 4)):
    return np.arange(np.prod(shape)).reshape(shape).astype(dtype)


@pytest.mark.parametrize("shape", [(), (1,), (5,), (2, 3, 4)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_numpy_and_torch_read_what_we_hand_out(dtype, shape):
    array = sample(dtype, shape)
    np.testing.assert_array_equal(np.from_dlpack(Owner(array)), array)
    tensor = torch.from_dlpack(Owner(array))
    assert tensor.data_ptr() == array.ctypes.data
    np.testing.assert_array_equal(tensor.numpy(), array)


@pytest.mark.parametrize("dtype", DTYPES)
def test_we_read_what_torch_hands_out(dtype):
    tensor = torch.from_numpy(sample(dtype))
    view = dlpack.read(tensor.__dlpack__())
    assert (view.pointer, view.shape, view.dtype, view.device) == (tensor.data_ptr(), (2, 3, 4), dtype, HOST)


def test_a_slice_begins_where_it_begins():
    tensor = torch.arange(24).reshape(4, 6)[2:]
    assert dlpack.read(tensor.__dlpack__()).pointer == tensor.data_ptr()


def test_an_offset_in_bytes_is_added():
    array = sample("float32")
    capsule = Owner(array).__dlpack__()
    dlpack._ManagedTensor.from_address(dlpack._pointer(capsule, b"dltensor")).tensor.byte_offset = 48
    assert dlpack.read(capsule).pointer == array[1].ctypes.data


def test_the_owner_lives_as_long_as_someone_uses_its_memory():
    owner = Owner(sample("float32"))
    alive = weakref.ref(owner)
    tensor = torch.from_dlpack(owner)
    del owner
    gc.collect()
    assert alive() is not None
    assert float(tensor[1, 2, 3]) == 23.0
    del tensor
    gc.collect()
    assert alive() is None
    assert not dlpack._exported


def test_a_capsule_that_nobody_takes_over_keeps_nothing():
    owner = Owner(sample("float32"))
    alive = weakref.ref(owner)
    capsule = owner.__dlpack__()
    del owner
    assert alive() is not None
    del capsule
    gc.collect()
    assert alive() is None
    assert not dlpack._exported


def test_reading_takes_nothing_over():
    capsule = Owner(sample("float32")).__dlpack__()
    assert dlpack.read(capsule) == dlpack.read(capsule)
    del capsule
    assert not dlpack._exported


def test_what_is_not_contiguous_is_refused():
    with pytest.raises(TensorError, match="not contiguous") as caught:
        dlpack.read(torch.zeros(3, 4).T.__dlpack__())
    assert caught.value.found == "strides (1, 4) for the shape (4, 3)"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.complex64])
def test_a_type_that_numpy_lacks_is_refused(dtype):
    with pytest.raises(TensorError, match="a type that numpy lacks"):
        dlpack.read(torch.zeros(2, dtype=dtype).__dlpack__())


@pytest.mark.parametrize("value", [None, object()])
def test_what_is_no_capsule_is_refused(value):
    with pytest.raises(TensorError, match="not a readable DLPack capsule"):
        dlpack.read(value)


def test_an_array_in_host_memory_is_no_input_on_the_device():
    with pytest.raises(TensorError, match="not in GPU memory") as caught:
        borrow(Owner(sample("float32")), stream=None)
    assert (caught.value.found, caught.value.expected) == ("DLPack device (1, 0)", "DLPack device (2, 0)")
    with pytest.raises(TensorError, match="not an array in GPU memory") as caught:
        borrow([1.0], stream=None)
    assert caught.value.found == "list"


def test_memory_that_its_owner_does_not_share_is_refused():
    class Kept:
        def __dlpack_device__(self):
            return dlpack.CUDA, 0

        def __dlpack__(self, **_):
            return torch.zeros(2, requires_grad=True).__dlpack__()

    with pytest.raises(TensorError, match="cannot be shared") as caught:
        borrow(Kept(), SimpleNamespace(handle=1))
    assert "gradient" in caught.value.found


@pytest.mark.parametrize("asked", [{"copy": True}, {"dl_device": HOST}])
def test_a_copy_or_another_device_is_refused_as_the_array_standard_says(asked):
    array = DeviceArray.__new__(DeviceArray)  # no memory is asked for
    with pytest.raises(BufferError, match="cannot be exported as a copy"):
        array.__dlpack__(stream=None, max_version=(1, 0), **asked)


class Interface:
    def __init__(self, **facts):
        self.__cuda_array_interface__ = {"version": 3, "data": (4096, False), **facts}


def test_a_cuda_array_interface_is_read():
    value = Interface(shape=(2, 3), typestr="<f4", strides=(12, 4))
    taken = borrow(value, stream=None)
    assert (taken.pointer, taken.shape, taken.dtype, taken.keeper) == (4096, (2, 3), "float32", value)
    with pytest.raises(TensorError, match="not contiguous"):
        borrow(Interface(shape=(2, 3), typestr="<f4", strides=(4, 8)), stream=None)
