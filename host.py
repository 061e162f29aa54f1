"""Tensors whose data is in host memory for a while, so that others can have the device."""

from collections.abc import Iterable

import torch
from torch import Tensor


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
            self.copies.append((storage, torch.UntypedStorage(storage.nbytes()).copy_(storage)))
            storage.resize_(0)

    def bring_back(self) -> None:
        """Fill the tensors again. More calls do nothing."""
        while self.copies:
            storage, copy = self.copies.pop()
            storage.resize_(copy.nbytes())
            storage.copy_(copy)
