"""Between host memory and the device: values that go there, tensors that are away from it for a while."""

from collections.abc import Iterable
from weakref import WeakValueDictionary

import torch
from torch import Tensor

away = WeakValueDictionary[int, torch.UntypedStorage]()  # of this process: storages' addresses, and their copies


class OnHost:
    """The data of tensors, moved to host memory when this is made. The tensors are empty until `bring_back`.

    Storages are emptied in place, as FSDP1 does it: parameters and views stay the objects that they are, and hold the
    same values again afterwards, but at other addresses.
    """

    def __init__(self, tensors: Iterable[Tensor]):
        storages = (tensor.untyped_storage() for tensor in tensors)
        unique = {storage.data_ptr(): storage for storage in storages if storage.nbytes()}  # views share one
        self.copies = []
        for storage in unique.values():  # one by one: on a CPU both are in the same memory
            # Pinned, a copy is several times as fast; torch keeps the memory until it captures a graph.
            host = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=storage.device.type == "cuda")
            self.copies.append((storage, host.untyped_storage().copy_(storage)))
            away[storage._cdata] = self.copies[-1][1]
            storage.resize_(0)

    def bring_back(self) -> None:
        """Fill the tensors again. More calls do nothing."""
        while self.copies:
            storage, copy = self.copies.pop()
            storage.resize_(copy.nbytes())
            storage.copy_(copy)


def data_of(tensor: Tensor) -> Tensor:
    """Return a tensor; while its data are away from the device, a view of their copy in host memory."""
    copy = away.get(tensor.untyped_storage()._cdata)
    if copy is None:
        return tensor
    place = torch.empty(0, dtype=tensor.dtype)
    return place.set_(copy, tensor.storage_offset(), tensor.shape, tensor.stride())


def upload(values: object, device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """Return host values as a device tensor without waiting for the device."""
    tensor = torch.as_tensor(values, dtype=dtype)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
