"""The parts that SGLang's hierarchical cache needs on a CPU; a plug-in for each of its processes.

Three copies between device and host pools, for which ``sgl_kernel`` has kernels for CUDA, and
memory that is not pinned, for host pools and adapters. With ``sleep_on_idle``, a scheduler looks
for finished copies every 20 ms instead of every second.
"""

import gc

import torch

IDLE_MS = 20
"""Without sleep, an idle scheduler takes a whole core, and each test has several of them."""


def _all_layers_down(src_ptrs, dst_ptrs, src_indices, dst_indices, page_size):
    layers = len(src_ptrs) // len(dst_ptrs)
    src, dst = src_indices[::page_size] // page_size, dst_indices[::page_size] // page_size
    for half, host in enumerate(dst_ptrs):
        for layer in range(layers):
            device = src_ptrs[half * layers + layer]
            host[dst, layer] = device.view(-1, page_size, *device.shape[1:])[src]


def _one_layer_up(src_ptrs, dst_ptrs, src_indices, dst_indices, layer_id, page_size):
    src, dst = src_indices[::page_size] // page_size, dst_indices[::page_size] // page_size
    for host, device in zip(src_ptrs, dst_ptrs, strict=True):
        device.view(-1, page_size, *device.shape[1:])[dst] = host[src, layer_id]


def _unpinned(make):
    return lambda *args, pin_memory=False, **kwargs: make(*args, **kwargs)


def install():
    """Put them in their places."""
    from sglang.srt.managers.scheduler_components.idle_sleeper import IdleSleeper
    from sglang.srt.mem_cache.pool_host import base, common, mha

    build = base.HostKVCache.__init__

    def unpinned(self, *args, **kwargs):
        build(self, *args, **{**kwargs, "pin_memory": False})

    base.HostKVCache.__init__ = unpinned
    mha.transfer_kv_all_layer_direct_lf_pf = _all_layers_down
    mha.transfer_kv_per_layer_direct_pf_lf = _one_layer_up
    for name in ("tensor", "empty", "zeros", "arange"):
        setattr(torch, name, _unpinned(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda tensor, *_: tensor  # type: ignore[method-assign]
    common._cuda_host_register = lambda *args, **kwargs: None
    IdleSleeper.maybe_sleep = lambda self: self.poller.poll(IDLE_MS)
    gc.freeze()  # SGLang collects garbage at each flush, and would visit all imported objects
