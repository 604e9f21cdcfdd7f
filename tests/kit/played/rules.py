"""The rules that the played machine keeps, each with the page of the documentation that states it.

A machine is as unkind as its documentation allows: whatever is not promised does not hold here. So
a real machine may forgive what this one finds.
"""

from __future__ import annotations

from typing import NamedTuple


class Rule(NamedTuple):
    """A rule, and its source."""

    text: str
    source: str


class Violation(AssertionError):
    """A rule was broken; on a real machine the bytes, or the process, would be lost."""

    def __init__(self, rule: Rule, found: str) -> None:
        super().__init__(f"{found}; {rule.text} ({rule.source})")
        self.rule = rule


GUIDE = "CUDA C++ Programming Guide"
DRIVER = "CUDA Driver API"
RUNTIME = "CUDA Runtime API"

STREAMS = Rule(
    "a stream works in the order of the calls; nothing but events orders two streams",
    f"{GUIDE}, Asynchronous Concurrent Execution, Streams",
)
TORN = Rule(
    "the bytes of a target are undefined until its copy or kernel has ended",
    f"{GUIDE}, Memory Model: concurrent accesses without order are a data race",
)
EVENTS = Rule(
    "work queued later waits for what the event's last record captured; an event that was never"
    " recorded delays nothing, and has been reached",
    f"{DRIVER}, Event Management, cuEventRecord; Stream Management, cuStreamWaitEvent",
)
TIMING = Rule(
    "time between two events exists once both are reached, and only if both were made with timing",
    f"{DRIVER}, Event Management, cuEventElapsedTime",
)
BATCH = Rule(
    "the copies of a batch run in any order, so none may depend on another",
    f"{DRIVER}, Memory Management, cuMemcpyBatchAsync",
)
SOURCES = Rule(
    "with the order ANY a source is read out of stream order, from the call until the copy's end",
    f"{DRIVER}, Data types, CUmemcpySrcAccessOrder",
)
ATTRIBUTES = Rule(
    "every copy of a batch needs valid attributes, and the first index must be 0;"
    " CUDA_ERROR_INVALID_VALUE otherwise",
    f"{DRIVER}, Memory Management, cuMemcpyBatchAsync",
)
ENGINES = Rule(
    "copies of one direction share a copy engine, whatever the priorities of their streams",
    f"{RUNTIME}, Stream Management, cudaStreamCreateWithPriority: they have no effect on copies"
    f" between host and device; {GUIDE}, Concurrent Data Transfers, asyncEngineCount",
)
PAGEABLE = Rule(
    "a copy from or to pageable memory may wait for the stream",
    f"{DRIVER}, API synchronization behavior, Memcpy, Asynchronous, 1 and 3",
)
KERNEL_HOST = Rule(
    "a kernel reaches only host memory that is page-locked and mapped",
    f"{GUIDE}, Page-Locked Host Memory, Mapped Memory; CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS",
)
HOST_POINTER = Rule(
    "a device without CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM needs the pointer"
    " of cuMemHostGetDevicePointer",
    f"{DRIVER}, Data types, CUdevice_attribute, 91",
)
REGISTER = Rule(
    "registering memory twice is CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED",
    f"{DRIVER}, Data types, CUresult, 712; Memory Management, cuMemHostRegister",
)
UNREGISTER = Rule(
    "unregistered memory is pageable again: work in flight must not need it, and"
    " CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED answers an address that no registration begins at",
    f"{DRIVER}, Memory Management, cuMemHostUnregister; CUresult, 713",
)
ONE_RANGE = Rule(
    "each registration maps a range of its own, and no text allows a copy across two of them:"
    " CUDA_ERROR_INVALID_VALUE",
    f"{DRIVER}, Memory Management, cuMemHostRegister",
)
CONTEXT = Rule(
    "a call of the driver works in the calling thread's context: CUDA_ERROR_INVALID_CONTEXT in a"
    " thread without one",
    f"{DRIVER}, Context Management, cuCtxSetCurrent; CUresult, 201",
)
PRIMARY = Rule(
    "using a device creates its primary context, with memory on that device",
    f"{DRIVER}, Primary Context Management, cuDevicePrimaryCtxRetain",
)
SELECTED = Rule(
    "each thread selects its device, and begins with device 0",
    f"{GUIDE}, Multi-Device System, Device Selection; PyTorch, CUDA semantics",
)
PEER = Rule(
    "a kernel reaches another device's memory only with peer access",
    f"{GUIDE}, Multi-Device System, Peer-to-Peer Memory Access",
)
STICKY = Rule(
    "after an illegal address or an assertion on the device, all further calls fail",
    f"{DRIVER}, Data types, CUresult, 700 and 710",
)
ALIGNED = Rule(
    "an access must be aligned to its size",
    f"{GUIDE}, Device Memory Accesses, Size and Alignment Requirement; CUresult, 716",
)
LAST_ERROR = Rule(
    "the runtime keeps the error of a refused call for the next check after a kernel's launch",
    f"{RUNTIME}, Error Handling, cudaGetLastError",
)
ALLOCATOR = Rule(
    "freed memory is used again in the order of the stream that it was allocated on; other streams"
    " that use it must be recorded",
    "PyTorch, torch.Tensor.record_stream, Note",
)
FREED_HOST = Rule(
    "freed host memory belongs to others at once; nothing documents that torch keeps it for copies",
    f"{RUNTIME}, API synchronization behavior; PyTorch, torch.Tensor.pin_memory",
)
UNMAPPED = Rule(
    "unmapped memory must not be touched",
    f"{DRIVER}, Virtual Memory Management, cuMemUnmap",
)
